"""A torch function as a function of JAX: in place where arrays are there, a callback where they are not."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._installed import require
from ..errors import DtypeError, OptionError

_Flat = Callable[..., list[Any]]


def from_torch(fn: Callable[..., Any], *, results: Any = None) -> Callable[..., Any]:
    """A torch function on JAX's arrays, differentiable by torch's autograd.

    Called with arrays it runs at once, in their memory and with results in torch's. Where JAX traces
    (``jit``, ``grad``, ``vmap``, ``scan``) it becomes a callback to the host: arguments and results are
    copied, once on a CPU. ``vmap`` calls it once for each element. Backward calls ``fn`` again under
    autograd, for nothing of torch can be kept between two callbacks.

    Args:
        fn: A pure function of tensors, in any structure that is a pytree of JAX; it must not write to them.
            Whatever is no array is handed on as it is. Parameters that it closes over get no gradient:
            pass them, with `torch.func.functional_call` for a module.
        results: Shapes and element types of what ``fn`` returns, as `jax.ShapeDtypeStruct`, in its structure;
            found with torch's fake tensors by default.

    Returns:
        The function of arrays, and of arguments as ``fn`` takes them.

    Raises:
        ImportError: torch is not installed.
        TypeError: At the call: ``fn`` returns what is no tensor, or an element type that JAX would narrow.
        ValueError: At the call: no arrays; ``fn`` wrote to an argument.

    Example:
        >>> import torch
        >>> square = from_torch(lambda x: (x * x).sum())
        >>> x = jnp.array([1.0, 2.0])
        >>> float(square(x)), jax.jit(jax.grad(square))(x).tolist()
        (5.0, [2.0, 4.0])
    """
    require("torch", "attnspan.jax.from_torch", "torch")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        if not places:
            remedy = "Call the torch function itself where no array is involved"
            raise OptionError("from_torch", expected="at least one array", got="none", remedy=remedy)
        trees: list[Any] = []

        def flat(*tensors: Any) -> list[Any]:
            filled = list(leaves)
            for i, x in zip(places, tensors, strict=True):
                filled[i] = x
            given, named = jax.tree_util.tree_unflatten(tree, filled)
            found, structure = jax.tree_util.tree_flatten(fn(*given, **named))
            trees.append(structure)
            return found

        arrays = [leaves[i] for i in places]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            made = _traced(flat, _declared(results, trees) or _inferred(flat, arrays))(*arrays)
        else:
            made = _run_at_once(flat, arrays)
        return jax.tree_util.tree_unflatten(trees[-1], made)

    return call


def _torch() -> Any:
    return import_module("torch")


def _convert() -> Any:
    """Conversions of the bridge the other way round; they need both frameworks."""
    return import_module("attnspan.torch._call_jax.convert")


def _declared(results: Any, trees: list[Any]) -> list[Any] | None:
    if results is None:
        return None
    found, structure = jax.tree_util.tree_flatten(results)
    trees.append(structure)
    return found


def _inferred(flat: _Flat, arrays: Sequence[Any]) -> list[Any]:
    """Shapes and element types of the results, without running the function on data."""
    torch, convert = _torch(), _convert()
    mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        dtypes = [convert.torch_dtype("argument", x.dtype) for x in arrays]
        fakes = [torch.empty(x.shape, dtype=d) for x, d in zip(arrays, dtypes, strict=True)]
        found = [_checked(x) for x in flat(*fakes)]
        return [jax.ShapeDtypeStruct(tuple(x.shape), convert.jax_dtype("result", x.dtype)) for x in found]


def _checked(x: Any) -> Any:
    if not isinstance(x, _torch().Tensor):
        raise DtypeError(
            "the result of the torch function",
            expected="tensors, in any structure that is a pytree of JAX",
            got=f"a {type(x).__name__}",
            remedy="Return tensors only (torch.tensor for a number)",
        )
    return x


def _run_at_once(flat: _Flat, arrays: Sequence[Any]) -> list[Any]:
    tensors = _tensors(arrays)
    with _torch().no_grad():
        found = [_checked(x) for x in flat(*tensors)]
    _check_unwritten(tensors)
    convert = _convert()
    for x in found:
        convert.jax_dtype("result", x.dtype)
    return [jax.dlpack.from_dlpack(_plain(x)) for x in found]


def _plain(x: Any) -> Any:
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _tensors(arrays: Sequence[Any]) -> list[Any]:
    """Tensors in the memory of arrays; NumPy's own may be read-only, which torch cannot express."""
    torch = _torch()
    return [
        torch.from_dlpack(x) if isinstance(x, jax.Array) else torch.from_dlpack(jnp.asarray(x))
        for x in arrays
    ]


def _check_unwritten(tensors: Sequence[Any]) -> None:
    for i, x in enumerate(tensors):
        if x._version:
            raise OptionError(
                f"argument {i} of the torch function",
                expected="a tensor that is read, as JAX's arrays never change",
                got="one that it wrote to",
                remedy="Clone it first; the array of JAX is spoilt",
            )


def _traced(flat: _Flat, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function where JAX traces, with its derivative."""

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return _back(functools.partial(_forward, flat), results, arrays)

    def forward(*arrays: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return call(*arrays), arrays

    def backward(arrays: tuple[Any, ...], grads: list[Any]) -> tuple[Any, ...]:
        wanted = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        there = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
        given = [g for g, is_there in zip(grads, there, strict=True) if is_there]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x, want in zip(arrays, wanted, strict=True) if want
        ]
        run = functools.partial(_gradients, flat, wanted, there)
        found = iter(_back(run, shapes, (*arrays, *given)))
        return tuple(next(found) if want else None for want in wanted)

    call.defvjp(forward, backward)
    return call


def _back(run: Callable[..., Any], results: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    return list(jax.pure_callback(run, tuple(results), *arrays, vmap_method="sequential"))


def _forward(flat: _Flat, *arrays: Any) -> tuple[Any, ...]:
    tensors = _tensors(arrays)
    with _torch().no_grad():
        found = [_checked(x) for x in flat(*tensors)]
    _check_unwritten(tensors)
    return tuple(_convert().as_arguments(found))


def _gradients(flat: _Flat, wanted: Sequence[bool], there: Sequence[bool], *arrays: Any) -> tuple[Any, ...]:
    """The gradients of the arguments that are wanted, from those of the results behind them."""
    torch = _torch()
    tensors = [x.detach().requires_grad_(want) for x, want in zip(_tensors(arrays), wanted, strict=False)]
    # Complex gradients of torch are the conjugates of JAX's.
    grads = [x.conj() for x in _tensors(arrays[len(wanted) :])]
    with torch.enable_grad():
        found = [_checked(x) for x, is_there in zip(flat(*tensors), there, strict=True) if is_there]
        pairs = [(x, g) for x, g in zip(found, grads, strict=True) if x.requires_grad]
        sources = [x for x, want in zip(tensors, wanted, strict=True) if want]
        if not pairs:
            return tuple(_convert().as_arguments([torch.zeros_like(x) for x in sources]))
        outs, incoming = zip(*pairs, strict=True)
        made = torch.autograd.grad(outs, sources, incoming, materialize_grads=True)
    return tuple(_convert().as_arguments([x.conj() for x in made]))
