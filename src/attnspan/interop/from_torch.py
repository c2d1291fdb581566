"""A torch function as a function of JAX: at once where arrays are there, a part of the program elsewhere."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._installed import require
from ..errors import DtypeError, OptionError
from . import _torch_calls

__all__ = ["from_torch"]

_Flat = Callable[..., list[Any]]


def from_torch(fn: Callable[..., Any], *, results: Any = None) -> Callable[..., Any]:
    """A torch function on JAX's arrays, differentiable by torch's autograd.

    Called with arrays it runs at once, in their memory, and its results become arrays in place where nothing
    else has their memory. Where JAX traces (``jit``, ``grad``, ``vmap``, ``scan``) it becomes part of the
    program: on a CPU its arguments are XLA's own buffers and each result is copied once; elsewhere it is a
    callback to the host, which copies both.
    ``vmap`` calls it once for each element. Backward calls ``fn`` again under autograd, for nothing of torch
    can be kept between two calls.

    Args:
        fn: A pure function of tensors, in any structure that is a pytree of JAX; it must neither write to
            them nor keep them. Whatever is no array is handed on as it is. Parameters that it closes over
            get no gradient: pass them, with `torch.func.functional_call` for a module.
        results: Shapes and element types of what ``fn`` returns, as `jax.ShapeDtypeStruct`, in its structure;
            found with torch's fake tensors by default.

    Returns:
        The function of arrays, and of arguments as ``fn`` takes them.

    Raises:
        ImportError: torch is not installed.
        TypeError: At the call: an argument is a tensor or a key of JAX, or ``fn`` returns what is no tensor;
            of either, an element type that JAX would narrow.
        ValueError: At the call: no arrays; ``fn`` wrote to an argument. A program that runs later raises
            `jax.errors.JaxRuntimeError` with the error's text; so it does where ``fn`` kept an argument, or
            returned other shapes or element types than were found or declared.

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
        for i, x in enumerate(leaves):
            _check_leaf(i, x)
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
            trees[:] = [structure]
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


def _check_leaf(i: int, x: Any) -> None:
    """Raise unless it is an array that torch can read, or no array at all."""
    name = f"argument leaf {i} of the torch function"
    if isinstance(x, _torch().Tensor):
        got, remedy = "a tensor of torch", "Convert it with jax.dlpack.from_dlpack(x), or close over it"
        raise DtypeError(name, expected="arrays of JAX or NumPy", got=got, remedy=remedy)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        remedy = "Pass its words, jax.random.key_data(key)"
        raise DtypeError(name, expected="an element type that torch has", got=f"{x.dtype}", remedy=remedy)
    if isinstance(x, np.ndarray) and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise DtypeError(
            name,
            expected="an element type of 32 bits or fewer, as JAX's 64-bit mode is off",
            got=f"{x.dtype}",
            remedy='Convert it (.astype("int32")), or set jax.config.update("jax_enable_x64", True)',
        )


def _declared(results: Any, trees: list[Any]) -> list[Any] | None:
    if results is None:
        return None
    found, structure = jax.tree_util.tree_flatten(results)
    trees.append(structure)
    return found


def _inferred(flat: _Flat, arrays: Sequence[Any]) -> list[Any]:
    """Shapes and element types of the results, without running the function on data."""
    torch, convert = _torch(), import_module("._convert", __package__)
    mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        dtypes = [convert.torch_dtype("argument", x.dtype) for x in arrays]
        fakes = [torch.empty(x.shape, dtype=d) for x, d in zip(arrays, dtypes, strict=True)]
        found = [_checked(x) for x in flat(*fakes)]
        _torch_calls.check_unwritten(fakes)  # Before it spoils anything.
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
    tensors = _torch_calls.tensors_of(arrays)
    found = _forward(flat, *tensors)
    _torch_calls.check_unwritten(tensors)
    return _torch_calls.arrays_of(found)


def _traced(flat: _Flat, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function where JAX traces, with its derivative."""
    run = _torch_calls.operation(functools.partial(_forward, flat), results)

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return run(*arrays)

    def forward(*arrays: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return call(*arrays), arrays

    def backward(arrays: tuple[Any, ...], grads: list[Any]) -> tuple[Any, ...]:
        wanted = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        there = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
        given = [g for g, is_there in zip(grads, there, strict=True) if is_there]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x, want in zip(arrays, wanted, strict=True) if want
        ]
        gradients = functools.partial(_gradients, flat, wanted, there)
        found = iter(_torch_calls.operation(gradients, shapes)(*arrays, *given))
        return tuple(next(found) if want else None for want in wanted)

    call.defvjp(forward, backward)
    return lambda *arrays: call(*_torch_calls.vary_alike(arrays))


def _forward(flat: _Flat, *tensors: Any) -> list[Any]:
    with _torch().no_grad():
        return [_checked(x) for x in flat(*tensors)]


def _gradients(flat: _Flat, wanted: Sequence[bool], there: Sequence[bool], *given: Any) -> list[Any]:
    """The gradients of the arguments that are wanted, from those of the results behind them."""
    torch = _torch()
    tensors = [x.detach().requires_grad_(want) for x, want in zip(given, wanted, strict=False)]
    # Complex gradients of torch are the conjugates of JAX's.
    grads = [x.conj() for x in given[len(wanted) :]]
    with torch.enable_grad():
        found = [_checked(x) for x, is_there in zip(flat(*tensors), there, strict=True) if is_there]
        pairs = [(x, g) for x, g in zip(found, grads, strict=True) if x.requires_grad]
        sources = [x for x, want in zip(tensors, wanted, strict=True) if want]
        if not pairs:
            return [torch.zeros_like(x) for x in sources]
        outs, incoming = zip(*pairs, strict=True)
        made = torch.autograd.grad(outs, sources, incoming, materialize_grads=True)
    return [x.conj() for x in made]
