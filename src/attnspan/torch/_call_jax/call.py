"""The public `call_jax`."""

import functools
from collections.abc import Callable, Hashable
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ..._installed import require
from ...errors import DtypeError, OptionError
from .keys import is_jax_array, is_tracer, value_key
from .operators import call_op, is_watched, record

_PLAIN = (Tensor, torch.nn.Parameter)


def call_jax(fn: Callable[..., Any], /, *args: Any, **static: Any) -> Any:
    """A JAX function on torch tensors: one operator, in the tensors' memory, with a derivative.

    Args:
        fn: A function of arrays that JAX can trace; jitted or not, it is compiled. Its traces are shared with
            every function that means the same: docs/bridge.md has the rule, and what changes unseen.
        args: Tensors on one device, in any structure that is a pytree of torch (masks are). Whatever is no
            tensor is handed to ``fn`` as it is; it must be hashable, and each value is a trace of its own.
        static: The same by keyword.

    Returns:
        What ``fn`` returns, with a tensor for each array. It shares the array's memory, and on a CPU each
        contiguous tensor at an address that is a multiple of 64 is read where it is.

    Raises:
        TypeError: An element type that JAX has not or would narrow, or what is neither a tensor nor hashable;
            ``fn`` returns what is no array.
        ValueError: No tensors, several devices, or one that JAX does not see.
        ImportError: JAX is not installed.
        NotImplementedError: A second derivative; take the inner one in JAX.

    Example:
        >>> import jax.numpy as jnp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = call_jax(lambda x: jnp.sum(x * x), x)
        >>> y.backward()
        >>> y.item(), x.grad.tolist()
        (5.0, [2.0, 4.0])
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph(fn, args, static)
    call, tensors = _bind(fn, args, static)
    if is_watched() or not all(type(x) in _PLAIN for x in tensors):
        handle = _functions().register(call)
        if get_proxy_mode() is not None:
            _functions().pin(call)
        results = call_op(tensors, handle)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        results = record(call, None, tensors)
    else:
        results = call.forward([x.shape for x in tensors])(tensors)
    return import_module("jax").tree_util.tree_unflatten(call.tree, results)


@functools.cache
def _functions() -> Any:
    """The rooms that need JAX."""
    require("jax", "attnspan.torch.call_jax", "jax")
    return import_module(".functions", __package__)


def _bind(fn: Any, args: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The call without its tensors, and these."""
    functions = _functions()
    if not static and args and all(isinstance(x, Tensor) for x in args):
        structure: Hashable = len(args)
        arguments, tensors = functions.positional(len(args)), list(args)
    else:
        leaves, spec = pytree.tree_flatten((args, static))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        structure, arguments = structured(functions, spec, leaves)
    if not tensors:
        remedy = "Call the function itself where no tensor is involved"
        raise OptionError("call_jax", expected="at least one tensor", got="none", remedy=remedy)
    kinds = [(x.dtype, x.dim(), x.device) for x in tensors]
    return functions.Call(fn, functions.table.traces_of(fn), structure, arguments, kinds), tensors


def structured(functions: Any, spec: Any, leaves: list[Any]) -> tuple[Hashable, Any]:
    """The key of all that is no tensor, and how it is put together again."""
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else x for x in leaves]
    keys = tuple(_leaf_key(i, x) for i, x in enumerate(others))
    return (spec, tuple(places), keys), functions.Arguments(spec, others, places)


def _leaf_key(i: int, x: Any) -> Hashable:
    if is_jax_array(x):
        traced = "a tracer" if is_tracer(x) else "an array"
        raise DtypeError(
            f"argument leaf {i}",
            expected="torch tensors",
            got=f"{traced} of JAX",
            remedy="Convert it with torch.from_dlpack(x), or call the function from JAX itself",
        )
    try:
        return value_key(x)
    except TypeError:
        raise DtypeError(
            f"argument leaf {i}",
            expected="a tensor, or something hashable that the function is compiled for",
            got=f"a {type(x).__name__}",
            remedy="Pass a tensor (torch.from_numpy), or close over it",
        ) from None


# Older ones take functions of one code for one, and would run the first for the second.
_TELLS_FUNCTIONS_APART = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def _in_graph(fn: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """The call as Dynamo traces it: the function is a constant of the graph, guarded by its identity."""
    if not _TELLS_FUNCTIONS_APART:
        raise OptionError(
            "call_jax in a compiled function",
            expected="torch 2.13 or newer, whose compiler guards which function it was given",
            got=torch.__version__,
            remedy="Call it outside, or under torch.compiler.disable",
        )
    leaves, spec = pytree.tree_flatten((args, static))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = tuple([_TENSOR if isinstance(x, Tensor) else _number(x) for x in leaves])
    kinds = tuple([(x.dtype, x.dim(), x.device) for x in tensors])
    # Dynamo takes a method for no constant, but its object and its function for two, which it guards.
    parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn, None)
    handle = _handle_of(parts[0], parts[1], id(parts[0]), _described(spec), others, kinds)
    results = call_op(tensors, handle)
    return _rebuild(handle, (), results)


def _number(x: Any) -> Any:
    """A static number as it is now, where the compiler would make a symbol of one that varies."""
    return guard_scalar(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _described(spec: Any) -> tuple[Any, ...]:
    """A tree's structure as constants, which Dynamo can hand on."""
    return spec.type, spec._context, tuple([_described(x) for x in spec.children()])


def _structure(described: tuple[Any, ...]) -> pytree.TreeSpec:
    kind, context, children = described
    if kind is None:
        return pytree.treespec_leaf()
    return pytree.TreeSpec(kind, context, [_structure(x) for x in children])


# What stands for a tensor among the constants of a graph, and what for that elsewhere.
_TENSOR = "\0tensor"
_PLACE = torch.empty(0)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _handle_of(
    fn: Any,
    method: Any,
    number: int,
    described: tuple[Any, ...],
    others: tuple[Any, ...],
    kinds: tuple[Any, ...],
) -> str:
    del number
    if method is not None:
        fn = MethodType(method, fn)
    functions = _functions()
    leaves = [_PLACE if x == _TENSOR else x for x in others]
    structure, arguments = structured(functions, _structure(described), leaves)
    return functions.handle_in_graph(fn, structure, arguments, kinds)  # type: ignore[no-any-return]


def _rebuild(handle: str, path: tuple[int, ...], results: list[Tensor]) -> Any:
    """The part of the results at a path, of structures that Dynamo can build."""
    kind = _kind_at(handle, path)
    if kind == "leaf":
        return results[int(_number_at(handle, path))]
    if kind == "None":
        return None
    count = int(_number_at(handle, path))
    parts = [_rebuild(handle, (*path, i), results) for i in range(count)]
    if kind == "list":
        return parts
    if kind == "tuple":
        return tuple(parts)
    return {_key_at(handle, path, i): x for i, x in enumerate(parts)}


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _kind_at(handle: str, path: tuple[int, ...]) -> str:
    return _functions().find(handle).part(path)[0]  # type: ignore[no-any-return]


# As text: an int might become a symbol.
@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _number_at(handle: str, path: tuple[int, ...]) -> str:
    return str(_functions().find(handle).part(path)[1])


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _key_at(handle: str, path: tuple[int, ...], i: int) -> Any:
    return list(_functions().find(handle).part(path)[2])[i]
