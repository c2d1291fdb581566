"""The subject of an examination: a model and its batches, from a factory, a library or a script."""

from __future__ import annotations

import copy
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.doctor.factory import (
    MOST_BATCHES,
    batches_of,
    check_path,
    factory_of,
    options_of,
    require_file,
)
from attnspan_lab.doctor.patched import patched
from attnspan_lab.doctor.places import is_users_class
from attnspan_lab.doctor.torch.cost.kept_graphs import detached
from attnspan_lab.doctor.torch.isolation.declared import Declared, declared
from attnspan_lab.doctor.torch.restored_state import State
from attnspan_lab.doctor.unfit import Unfit, require
from attnspan_lab.zoo.step import objective, results_of

__all__ = ["Subject", "copied", "load"]

_FACTORY = "a factory that returns (model, batches), or (model, batches, expectations)"
#: Names of tokens, before or after the embedding.
_TOKENS = ("input_ids", "inputs_embeds", "hidden_states", "x", "tokens", "idx")
_EXPECTED = ("causal", "documents", "step", "streaming")


@dataclass
class Subject:
    """A model and its batches.

    Attributes:
        model: Called with a batch: ``model(**batch)``, ``model(*batch)`` or ``model(batch)``.
        batches: The factory's batches, at most `MOST_BATCHES`.
        expected: The factory's third value. "causal" is a bool. "documents" is a function from a batch to the
            document number of each token, integer (B, S). "step" is a function for
            `attnspan.testing.assert_same_as_one_rank`. "streaming" is a bool: queries must not see later
            tokens of another sequence.
        target: Name that the subject was loaded by.
        more: Batches of other kinds, only for eager steps.
        first: Name of the tokens, if the batch has several sequences.
        start: State of the model that each call of it begins with, or None to leave the model as it is.
    """

    model: nn.Module
    batches: list[Any]
    expected: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    more: list[Any] = field(default_factory=list)
    first: str = ""
    start: State | None = None

    def restore(self) -> None:
        """Put the model's state back to the start, so that a repeated step is the same step."""
        if self.start is not None:
            self.start.restore()

    def call(self, model: Callable[..., Any], batch: Any) -> Any:
        """Call the model with a copy of a batch."""
        if model is self.model:
            self.restore()
        batch = tree_map(copied, batch)
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, Sequence) else model(batch)

    def results(self, out: Any, batch: Any) -> dict[str, Tensor]:
        """Select the floating-point results of a model without padding rows. A scalar loss is kept."""
        found = results_of(out, batch if isinstance(batch, Mapping) else {})
        leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        return found or {str(i): x for i, x in enumerate(leaves)}

    def step(self, model: Callable[..., Any], batch: Any, *, backward: bool = True) -> dict[str, Tensor]:
        """Run one step. It returns the results and leaves gradients in the parameters, if there are any."""
        self.model.zero_grad(set_to_none=True)
        results = self.results(self.call(model, batch), batch)
        if backward and any(x.requires_grad for x in results.values()):
            objective(results).backward()  # type: ignore[no-untyped-call]
        return results

    def gradients(self) -> dict[str, Tensor]:
        """Read the gradients that the last step left in the parameters, as float64."""
        return {name: x.grad.double() for name, x in self.model.named_parameters() if x.grad is not None}

    def copy(self) -> Subject:
        """Copy the subject, so that its model can be changed. Modules that cannot be copied raise."""
        self.restore()
        return replace(
            self, model=copy.deepcopy(self.model, detached(self.model)), target="", more=[], start=None
        )

    def named(self, batch: Any) -> dict[str, Any]:
        """Name the tensors of a batch by key, by the parameter that receives it, or by position."""
        listed = zip(self._names(), _listed(batch), strict=False)
        items = batch.items() if isinstance(batch, Mapping) else listed
        return {str(name): x for name, x in items if isinstance(x, Tensor)}

    @property
    def parameters(self) -> list[str]:
        """Names of the arguments of the model's forward pass."""
        return list(inspect.signature(type(self.model).forward).parameters)

    def _names(self) -> Iterator[str]:
        """Yield the names of the model's positional parameters, and then numbers."""
        parameters = inspect.signature(type(self.model).forward).parameters.values()
        own = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD][1:]
        yield from own
        yield from map(str, count(len(own)))

    def rows(self, batch: Any) -> int:
        """Return the batch size: the first dimension of the tokens, or else of the batch's first tensor."""
        if (found := self.tokens(batch)) is not None:
            return found[1].shape[0] or 1
        return next((len(x) for x in self.named(batch).values() if x.dim()), 1) or 1

    def tokens(self, batch: Any) -> tuple[str, Tensor] | None:
        """Find the tensor (B, S) or (B, S, D) of tokens, with its name. Packed tokens (S,) have B = 1."""
        named = self.named(batch)
        first = [x for x in (self.first, *_TOKENS) if x in named]
        for name in [*first, *named]:
            x = named[name]
            if (x.dim() == 2 and not x.is_floating_point() and x.dtype != torch.bool) or (
                x.dim() == 3 and x.is_floating_point()
            ):
                return name, x
            if name in first and x.dim() == (2 if x.is_floating_point() else 1):
                return name, x[None]
        return None

    def with_tokens(self, batch: Any, name: str, tokens: Tensor) -> Any:
        """Replace the tokens of a batch."""
        before = self.named(batch)[name]
        tokens = tokens.reshape(before.shape)
        if isinstance(batch, Mapping):
            return {**batch, name: tokens}
        listed = [tokens if x is before else x for x in _listed(batch)]
        return tokens if isinstance(batch, Tensor) else listed

    def declared(self, batch: Any) -> Declared:
        """Read documents, padding and masks of pairs from a batch with tokens."""
        tokens = self.tokens(batch)
        if tokens is None:
            return Declared()
        given = self.expected.get("documents")
        documents = None if given is None else torch.as_tensor(given(batch))
        rows, length = tokens[1].shape[:2]
        return declared(self.named(batch), (rows, length), documents)

    def masks(self, batch: Any) -> list[Tensor]:
        """List the padding masks of a batch, bool (B, S). True marks real tokens."""
        return [
            x == 0 if "padding" in name else x != 0
            for name, x in self.named(batch).items()
            if "mask" in name and x.dim() == 2 and bool(((x == 0) | (x == 1)).all())
        ]

    @property
    def title(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    @property
    def is_causal(self) -> bool:
        """Whether the model declares that tokens do not see later tokens."""
        if "causal" in self.expected:
            return bool(self.expected["causal"])
        config: Any = getattr(self.model, "config", None)
        is_decoder = getattr(config, "is_decoder", False)
        is_decoder = is_decoder and not getattr(config, "is_encoder_decoder", False)
        return bool(is_decoder) or "CausalLM" in self.title


def copied(x: Any) -> Any:
    """Copy a tensor or a cache of a batch, which a call may change."""
    if isinstance(x, Tensor):
        return x.clone()
    if not isinstance(x, nn.Module) and not (hasattr(x, "__dict__") and is_users_class(type(x))):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:  # The object cannot be copied, so the call gets it as it is.
        return x


def _listed(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def load(target: str, arguments: Sequence[str] = ()) -> Any:
    """Load the subject that a name stands for.

    Args:
        target: One of: ``package.module:factory`` or ``file.py:factory``; a class of transformers or
            diffusers, which is built tiny; a script ``train.py``, whose first compiled model is examined.
        arguments: Arguments of the script.

    Returns:
        A `Subject`, or an `attnspan_lab.doctor.jax.JaxSubject` if the factory returns a function for JAX.

    Raises:
        OptionError: The module, function or class does not exist, or a factory returns something else.
            Exceptions of the factory itself are passed on.
    """
    check_path(target)
    if target.endswith(".py") and ":" not in target:
        return _of_script(target, arguments)
    if ":" not in target:
        from attnspan_lab.doctor.torch.library import of_library

        try:
            model, batches, more = of_library(target)
        except Unfit:
            require_file(target, is_file=not Path(target).is_dir())
            raise
        return Subject(model, batches, target=target, more=more)
    pid, made = os.getpid(), factory_of(target)
    made = made() if callable(made) and not isinstance(made, nn.Module) else made
    if os.getpid() != pid:
        os._exit(0)  # The factory forked and returned in both processes. Only the parent goes on.
    if _is_jax(made):
        from attnspan_lab.doctor.jax.subject import jax_subject

        return jax_subject(made, target)
    return _subject(made, target)


def _is_jax(made: Any) -> bool:
    """Whether the result of a factory is for JAX. Torch models do not import JAX."""
    if "jax" not in sys.modules:
        return False
    from attnspan_lab.doctor.jax.subject import is_jax

    return is_jax(made)


def _subject(made: Any, what: str) -> Subject:
    kind = "None" if made is None else type(made).__name__
    got = f"a tuple of {len(made)}" if isinstance(made, tuple) else kind
    fits = isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])
    require(fits, what, _FACTORY, got, "Return the model and the batches in a tuple")
    model, batches, *rest = made
    got, remedy = type(model).__name__, "Wrap it in one"
    require(isinstance(model, nn.Module), what, "a torch.nn.Module first", got, remedy)
    expected = options_of(rest, _EXPECTED, "expectations", what)
    taken = batches_of(batches, (Tensor,), "tensors", what)
    for batch in taken:
        fits, got = isinstance(batch, (Mapping, tuple, list, Tensor)), type(batch).__name__
        wanted = "batches that are dicts of arguments, tuples, or tensors"
        require(fits, what, wanted, f"a batch of type {got}", "Yield such batches")
    return Subject(model, taken, expected, what)


class _Found(BaseException):
    """Ends a script after enough calls of its compiled model."""


def _of_script(path: str, arguments: Sequence[str]) -> Subject:
    """Run a script until its first compiled model was called with enough batches, or until it ends."""
    require(Path(path).is_file(), path, "a script", "no such file", "Pass the path as you would to python")
    seen, compile_, hooks = Subject(nn.Identity(), []), torch.compile, list[Any]()

    def record(model: nn.Module, args: Any, kwargs: Any) -> None:
        batch = dict(kwargs) if kwargs and not args else _bound(model, args, kwargs)
        seen.batches.append(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, batch))
        if len(seen.batches) >= MOST_BATCHES:
            raise _Found

    def watched(model: Any = None, **options: Any) -> Any:
        """Return the model itself, uncompiled, and record the batches that it is called with."""
        if not isinstance(model, nn.Module) or seen.model is model or hooks:
            return compile_(model, **options)
        seen.model = model
        # The result of torch.compile has the model under this name.
        model.__dict__["_orig_mod"] = model
        hooks.append(model.register_forward_pre_hook(record, with_kwargs=True))
        return model

    def compiled(model: nn.Module, **options: Any) -> None:
        watched(model, **options)

    left: Any = None
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with (
            patched(torch, compile=watched),
            patched(nn.Module, compile=compiled),
            patched(sys, argv=[path, *arguments]),
        ):
            runpy.run_path(path, run_name="__main__")
    except _Found:
        pass
    except SystemExit as end:
        left = end.code
    finally:
        for hook in hooks:
            hook.remove()
        seen.model.__dict__.pop("_orig_mod", None)
    got = f"none that was called before the script ended with {left!r}" if left else "none that was called"
    remedy = "Compile a model with torch.compile(model) and call it, or pass a factory"
    require(seen.batches, path, "a script that compiles a model", got, remedy)
    return seen


def _bound(model: nn.Module, args: Any, kwargs: Any) -> Any:
    if not kwargs:
        return args
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
