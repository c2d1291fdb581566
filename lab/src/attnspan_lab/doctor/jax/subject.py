"""The subject of an examination in JAX: a function or a flax module, and its batches."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from attnspan_lab.doctor.factory import batches_of, options_of
from attnspan_lab.doctor.names import IDS, valid_entries, words_of
from attnspan_lab.doctor.unfit import require

__all__ = [
    "FAST",
    "JaxSubject",
    "Traced",
    "floats",
    "is_jax",
    "is_spread",
    "jax_subject",
    "replaced",
    "whole",
    "wide",
]

#: Options of a program whose speed does not matter. The compiler's passes over operators stay the same.
FAST = {"xla_backend_optimization_level": 0}
_LENGTHS = re.compile("len")
# Names of tokens, the most probable first.
_FIRST = ("input_ids", "tokens", "inputs", "idx", "x")
_NO_SEQUENCES = ("position", "label", "target", "cache")
_OPTIONS = ("causal", "documents", "static", "variables", "mesh", "in_shardings", "one_device")


@dataclass
class JaxSubject:
    """A function and its batches. A factory returns it, or ``(function, batches)``, or these and a dict.

    Args:
        fn: A function, jitted or not: ``fn(**batch)``, ``fn(*batch)`` or ``fn(batch)``. A flax.nnx module
            and a bound flax.linen module (``module.bind(variables)``) are also possible.
        batches: Dicts of arguments, tuples of arguments, or single arrays. At most 12 are used.
        variables: Parameters. If you pass them, they are the first argument of ``fn``, and the doctor checks
            their gradients.
        causal: Whether no token may see later tokens. None: not declared.
        documents: Function from a batch to the document number of each token, integer (B, S).
        static: Names of arguments that are static under jit. Strings, booleans and None are always static.
        mesh: Mesh of devices. The doctor also runs the first batch on it. None: the mesh that the step uses.
        in_shardings: Name of an argument to its PartitionSpec. The name "variables" is for the variables,
            with one spec or a pytree of specs. Other arguments are replicated.
        one_device: The same function without the mesh. It is needed if ``fn`` uses shard_map and has a
            fixed number of devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from attnspan_lab.doctor.jax import JaxSubject
        >>> JaxSubject(lambda w, x: x @ w, [{"x": jnp.ones((2, 3))}], variables=jnp.ones((3, 4))).name
        '<lambda>'
    """

    fn: Callable[..., Any]
    batches: list[Any]
    variables: Any = None
    causal: bool | None = None
    documents: Callable[[Any], Any] | None = None
    static: tuple[str, ...] = ()
    mesh: Any = None
    in_shardings: dict[str, Any] = field(default_factory=dict)
    one_device: Callable[..., Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def title(self) -> str:
        """Name of the function or module."""
        return self.name

    @property
    def plain(self) -> JaxSubject:
        """The subject on one device. The mesh stays for functions that name its axes."""
        batches, variables = jax.tree.map(whole, (self.batches, self.variables))
        more = {"batches": batches, "variables": variables, "in_shardings": {}, "one_device": None}
        return replace(self, fn=self.one_device or self.fn, **more)

    @property
    def context(self) -> AbstractContextManager[Any]:
        """The context in which the function runs: with its mesh, if it has one."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def is_jitted(self) -> bool:
        """Whether the user has jitted the function."""
        return hasattr(self.fn, "lower")

    def call(self, batch: Any, variables: Any = None, fn: Callable[..., Any] | None = None) -> Any:
        """Call the function with a batch."""
        fn = self.fn if fn is None else fn
        variables = self.variables if variables is None else variables
        first = () if self.variables is None else (variables,)
        if isinstance(batch, Mapping):
            return fn(*first, **batch)
        return fn(*first, *batch) if isinstance(batch, (tuple, list)) else fn(*first, batch)

    def named(self, batch: Any) -> dict[str, Any]:
        """Name the leaves of a batch: by the argument, or by the key in a nested dict."""
        return dict(zip(self.names(batch), jax.tree.leaves(batch), strict=True))

    def names(self, batch: Any) -> list[str]:
        """List the names of a batch's leaves, in the order of `jax.tree.leaves`."""
        arguments = list(self.arguments(batch))
        found = []
        for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]:
            keys: list[Any] = [getattr(x, "key", getattr(x, "name", getattr(x, "idx", ""))) for x in path]
            known = [x for x in keys if isinstance(x, str)]
            found.append(known[-1] if known else arguments[keys[0] if keys else 0])
        return found

    def arguments(self, batch: Any) -> dict[str, Any]:
        """Name the arguments of a batch."""
        if isinstance(batch, Mapping):
            return dict(batch)
        values = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        try:
            names = list(inspect.signature(self.fn).parameters)[self.variables is not None :]
        except (TypeError, ValueError):
            names = []
        return {names[i] if i < len(names) else str(i): x for i, x in enumerate(values)}

    def with_arguments(self, batch: Any, arguments: Mapping[str, Any]) -> Any:
        """Make a batch of the same form from other arguments."""
        if isinstance(batch, Mapping):
            return dict(arguments)
        values = tuple(arguments.values())
        return values if isinstance(batch, (tuple, list)) else values[0]

    def map(self, batch: Any, change: Callable[[str, Any], Any]) -> Any:
        """Change leaves of a batch. ``change`` gets the name and the value of each leaf."""
        flat, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(tree, list(map(change, self.names(batch), flat)))

    def is_static(self, name: str, leaf: Any) -> bool:
        """Whether a leaf of a batch is no argument of the traced program."""
        return (
            name in self.static
            or not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))
            or isinstance(leaf, bool)
        )

    def has_several_sequences(self, batch: Any) -> bool:
        """Whether a batch has several sequences of tokens, as for an encoder and a decoder.

        Labels and targets of the same shape as the tokens are no other sequence.
        """
        found = self._token_ids(batch)
        own = [name for name in found if "label" not in name and "target" not in name]
        return len({x.shape for x in found.values()}) > 1 or len(own) > 1

    def _token_ids(self, batch: Any) -> dict[str, Any]:
        """Name the integers (B, S) that may be tokens, and their labels."""
        integers = {k: x for k, x in self.named(batch).items() if _is_integer_grid(x)}
        others = ("mask", "position")
        return {k: x for k, x in integers.items() if not (IDS.search(k) or any(y in k for y in others))}

    def tokens(self, batch: Any) -> dict[str, Any]:
        """Find the tokens: integers (B, S), or else all floats (B, S, ...)."""
        if ids := self._token_ids(batch):
            name = min(ids, key=lambda x: _FIRST.index(x) if x in _FIRST else len(_FIRST))
            return {name: ids[name]}
        whole = {k: x for k, x in self.named(batch).items() if np.ndim(x) in (3, 4) and floats(x)}
        size = next((x.shape[:2] for x in whole.values()), None)
        return {k: x for k, x in whole.items() if x.shape[:2] == size}

    def size(self, batch: Any) -> tuple[int, int] | None:
        """Return the batch size and the number of tokens, if the batch has tokens."""
        return next((tuple(x.shape[:2]) for x in self.tokens(batch).values()), None)

    def document_names(self, batch: Any) -> list[str]:
        """List the arguments that state documents."""
        return [k for k, x in self.named(batch).items() if _states_documents(k, x) or "position" in k]

    def padding_names(self, batch: Any) -> list[str]:
        """List the arguments that state padding: a mask (B, S), or else lengths (B,)."""
        size, named = self.size(batch), self.named(batch)
        others = self.other_masks(batch).values()
        masks = [name for name, x in named.items() if "mask" in name and np.shape(x) == size]
        masks = [x for x in masks if x not in others]
        if masks or size is None:
            return masks
        return [name for name, x in named.items() if _LENGTHS.search(name) and _are_lengths(x, size)]

    def other_masks(self, batch: Any) -> dict[str, str]:
        """Name the padding mask (B, S) of each sequence that is not the tokens.

        Two sequences may have the same length. Then the mask must share a word with the name of one sequence.
        """
        named = {k: x for k, x in self.named(batch).items() if hasattr(x, "ndim")}
        masks = {k for k, x in named.items() if "mask" in k and x.ndim == 2}
        taken = masks | {k for k in named if any(w in k for w in _NO_SEQUENCES)}
        taken |= {k for k, x in named.items() if _states_documents(k, x)}
        long = {k: x for k, x in named.items() if x.ndim in (2, 3) and k not in taken}
        found = {}
        for mask in sorted(masks):
            fits = [k for k, x in long.items() if x.shape[:2] == named[mask].shape]
            alike = [k for k in fits if words_of(k) & words_of(mask)]
            own = alike if len(fits) > 1 else fits
            if len(own) == 1 and own[0] not in self.tokens(batch):
                found[own[0]] = mask
        return found

    def document_ids(self, batch: Any) -> np.ndarray | None:
        """Find the document number of each token, (B, S), if the batch has several documents."""
        if self.documents is not None:
            found = np.asarray(self.documents(batch))
        else:
            named = self.named(batch)
            known = [np.asarray(x) for name, x in named.items() if _states_documents(name, x)]
            known += [
                (np.diff(np.asarray(x), axis=1, prepend=-1) <= 0).cumsum(1)
                for name, x in named.items()
                if "position" in name and np.ndim(x) == 2
            ]
            if not known:
                return None
            found = known[0]
        return found if (found != found[:, :1]).any() else None

    def valid(self, batch: Any) -> np.ndarray | None:
        """Find the tokens that are not padding, bool (B, S), if the batch has a padding mask or lengths."""
        for name in self.padding_names(batch):
            x, shown = np.asarray(self.named(batch)[name]), self.marked(batch, name)
            if (x.ndim == 1 or np.isin(x, (0, 1)).all()) and not (shown == shown.flat[0]).all():
                return shown
        return None

    def stated(self, batch: Any, length: int) -> np.ndarray | None:
        """Find the entries that a mask or lengths of a sequence state to be no padding, bool (B, length).

        The tokens come first. Unlike `valid`, it also finds them if all are valid.
        """
        names, named = self.padding_names(batch), self.named(batch)
        own = [self.marked(batch, x) for x in names if length == (self.size(batch) or (0, 0))[1]]
        own += [valid_entries(x, np.asarray(named[x])) for x in self.other_masks(batch).values()]
        return next((x for x in own if x.shape[1] == length and x.any()), None)

    def marked(self, batch: Any, name: str) -> np.ndarray:
        """Read the tokens that are not padding, bool (B, S), from a padding mask or from lengths."""
        x = np.asarray(self.named(batch)[name])
        if x.ndim == 1:
            return np.asarray(np.arange((self.size(batch) or (0, 0))[1]) < x[:, None])
        return np.asarray(valid_entries(name, x))


def _is_integer_grid(x: Any) -> bool:
    return np.ndim(x) == 2 and bool(jnp.issubdtype(x.dtype, jnp.integer))


def _states_documents(name: str, x: Any) -> bool:
    """Whether an argument is the document numbers of tokens, (B, S)."""
    return IDS.search(name) is not None and _is_integer_grid(x)


def _are_lengths(x: Any, size: tuple[int, int]) -> bool:
    """Whether an array has a number of tokens for each batch element."""
    x = np.asarray(x)
    return x.shape == size[:1] and x.dtype.kind in "iu" and x.min() >= 1 and x.max() <= size[1]


@dataclass
class Traced:
    """The jaxpr of a step, and its arguments.

    Attributes:
        closed: The jaxpr. Its arguments are the leaves of the variables, then the leaves of the batch.
        leaves: The arguments.
        variables: Number of leaves of the variables.
        names: Names of the batch's leaves.
        shapes: Pytree of the results' shapes.
    """

    closed: Any
    leaves: list[Any]
    variables: int
    names: list[str]
    shapes: Any

    @classmethod
    def of(cls, subject: JaxSubject, batch: Any) -> Traced:
        """Trace the function. Static leaves of the batch stay as they are.

        A jitted function does not tell which arguments are static. If tracing fails, its numbers are static.
        """
        try:
            return cls._of(subject, batch)
        except Exception:
            numbers = [k for k, x in subject.named(batch).items() if isinstance(x, (int, float))]
            if not subject.is_jitted or not numbers:
                raise
        return cls._of(replace(subject, static=(*subject.static, *numbers)), batch)

    @classmethod
    def _of(cls, subject: JaxSubject, batch: Any) -> Traced:
        own, tree = jax.tree.flatten(subject.variables)
        flat, form = jax.tree.flatten(batch)
        names = subject.names(batch)
        moving = [i for i, x in enumerate(flat) if not subject.is_static(names[i], x)]

        def call(*leaves: Any) -> Any:
            given = replaced(flat, moving, leaves[len(own) :])
            variables = jax.tree.unflatten(tree, leaves[: len(own)])
            return subject.call(jax.tree.unflatten(form, given), variables)

        leaves = [*own, *(flat[i] for i in moving)]
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(*leaves)
        return cls(closed, leaves, len(own), [names[i] for i in moving], shapes)

    @property
    def typed(self) -> list[Any]:
        """The arguments as arrays. Python numbers get the dtype that the step was traced with."""
        pairs = zip(self.leaves, self.closed.jaxpr.invars, strict=True)
        return [x if hasattr(x, "dtype") else np.asarray(x, v.aval.dtype) for x, v in pairs]

    @cached_property
    def run(self) -> Any:
        """The compiled step, from leaves to a list of results."""
        return jax.jit(jaxpr_as_fun(self.closed))

    @cached_property
    def trial(self) -> Any:
        """The same as `run`, but compiled in a third of the time."""
        return jax.jit(jaxpr_as_fun(self.closed), compiler_options=FAST)

    def program(self) -> Any:
        """Compile the step for reading it."""
        return self.trial.lower(*self.leaves).compile()


def is_spread(x: Any) -> bool:
    """Whether an array is on several devices."""
    return len(getattr(getattr(x, "sharding", None), "device_set", ())) > 1


def whole(x: Any) -> Any:
    """Move an array to one device. JAX may still move it to the devices of the context's mesh."""
    if not is_spread(x):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(whole(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def replaced(leaves: Sequence[Any], chosen: Sequence[int], own: Sequence[Any]) -> list[Any]:
    """Return arguments with other values for the chosen ones."""
    return list((dict(enumerate(leaves)) | dict(zip(chosen, own, strict=True))).values())


def floats(out: Any) -> list[Any]:
    """List the floating-point leaves of results."""
    return [x for x in jax.tree.leaves(out) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]


def wide(out: Any) -> list[np.ndarray]:
    """List the floating-point leaves of results, as float64."""
    return [np.asarray(x, np.float64) for x in floats(out)]


def is_jax(made: Any) -> bool:
    """Whether the result of a factory is for JAX: a `JaxSubject`, or a function that is no torch module."""
    if isinstance(made, JaxSubject):
        return True
    fits = isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])
    torch = sys.modules.get("torch")
    return fits and not (torch is not None and isinstance(made[0], torch.nn.Module))


def jax_subject(made: Any, what: str) -> JaxSubject:
    """Check the result of a factory, and make the subject.

    Raises:
        OptionError: The factory returns something else.
    """
    if not isinstance(made, JaxSubject):
        fn, batches, *rest = made
        options = options_of(rest, _OPTIONS, "options", what)
        made = JaxSubject(fn, batches, **options)
    taken = batches_of(made.batches, (jax.Array, np.ndarray), "arrays", what)
    foreign = any(type(x).__module__.partition(".")[0] == "torch" for x in jax.tree.leaves(taken))
    wanted, remedy = "a torch.nn.Module first, or a function and arrays", "Use arrays of JAX or NumPy"
    require(not foreign, what, wanted, "a function and tensors", remedy)
    return _with_module(replace(made, batches=taken))


def _with_module(made: JaxSubject) -> JaxSubject:
    """Take the variables out of a flax module."""
    fn, nnx = made.fn, sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(fn, nnx.Module):
        module, (graph, variables) = fn, nnx.split(fn)
        bound = partial(nnx.merge, graph)
    elif hasattr(fn, "unbind"):
        module, variables = fn.unbind()
        bound = module.bind
    else:
        return made

    def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(variables)(*args, **kwargs)

    # The variables stand for ``self``.
    run.__signature__ = inspect.signature(inspect.unwrap(type(module).__call__))  # type: ignore[attr-defined]
    return replace(made, fn=run, variables=variables, name=type(module).__name__)
