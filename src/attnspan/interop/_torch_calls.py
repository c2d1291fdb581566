"""A torch function as an operation of JAX: on XLA's buffers on a CPU, by a callback to the host elsewhere."""

import ctypes
import gc
import itertools
import secrets
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from ..errors import DtypeError, OptionError, ShapeError
from ..jax import _ffi
from ..jax._varying import axes_of, axes_of_types, spread
from ..kernels import cpu

#: Of tensors; it returns tensors, and leaves the choice of a grad mode to nobody else.
Run = Callable[..., Sequence[Any]]
#: As the compiled module hands it over: address, XLA's number of the element type, shape.
_Buffer = tuple[int, int, tuple[int, ...]]

# XLA's numbers of the element types that torch has.
_TYPES = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32"}
_TYPES |= {9: "uint64", 10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16"}
_TYPES |= {18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn"}

# Keys are words of compiled programs. No other process has them, should a program get there.
_keys = itertools.count(secrets.randbits(62))
_functions: "weakref.WeakValueDictionary[int, _Function]" = weakref.WeakValueDictionary()
_told = False


class _Function:
    """What a program calls, by its key; it lives as long as a program that has the key."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.key = next(_keys)
        _functions[self.key] = self

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """By JAX's own callback: on its copies of the arguments."""
        tensors = tensors_of(arrays)
        found = self.run(*tensors)
        check_unwritten(tensors)
        return tuple(_convert().as_arguments(found))


def operation(run: Run, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of arrays that calls `run` with tensors wherever and however JAX runs it.

    Args:
        run: The function of tensors.
        results: Shape and element type of each of its results.

    Returns:
        A function of at least one array, all of which vary over the same axes (`vary_alike`); `vmap` calls it
        once for each element. It has no derivative.
    """
    function = _Function(run)
    declared = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)

    def call(*arrays: Any) -> list[Any]:
        return list(_call.bind(*arrays, function=function, results=declared))

    mapped: Callable[..., list[Any]] = jax.custom_batching.sequential_vmap(call)
    return mapped


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Within `shard_map`: what varies over one axis of the mesh makes all results vary over it."""
    return list(spread(tuple(arrays), axes_of(*arrays)))


def _torch() -> Any:
    return import_module("torch")


def _convert() -> Any:
    """Conversions of the bridge the other way round; they need both frameworks."""
    return import_module("._convert", __package__)


def tensors_of(arrays: Sequence[Any]) -> list[Any]:
    """Tensors in the memory of arrays; NumPy's own may be read-only, which torch cannot express."""
    torch = _torch()
    return [
        torch.from_dlpack(x) if isinstance(x, jax.Array) else torch.from_dlpack(jnp.asarray(x))
        for x in arrays
    ]


def arrays_of(tensors: Sequence[Any]) -> list[Any]:
    """Arrays in the memory of tensors, if nobody else has it, for arrays never change; else in a copy."""
    convert = _convert()
    # No name may hold one of the tensors, nor a second one its memory: references are counted.
    fresh = [_is_fresh(tensors, i) for i in range(len(tensors))]
    made = []
    for x, is_fresh in zip(tensors, fresh, strict=True):
        convert.jax_dtype("result", x.dtype)
        own = x.detach() if is_fresh else x.detach().clone()
        made.append(jax.dlpack.from_dlpack(own.resolve_conj().resolve_neg().contiguous()))
    return made


def _is_fresh(tensors: Sequence[Any], i: int) -> bool:
    """Whether this list alone has the tensor, and the tensor alone its memory, which torch allocated."""
    # References: of the list and of the question; uses: of Python's object.
    if sys.getrefcount(tensors[i]) > 2 or tensors[i]._use_count() > 1:
        return False
    storage = tensors[i].untyped_storage()
    # Of the tensor and of `storage`.
    return bool(storage.resizable() and _torch()._C._storage_Use_Count(storage._cdata) <= 2)


def check_unwritten(tensors: Sequence[Any]) -> None:
    """Raise if one of the tensors, which were fresh, was written to."""
    for i, x in enumerate(tensors):
        if x._version:
            raise OptionError(
                f"argument {i} of the torch function",
                expected="a tensor that is read, as JAX's arrays never change",
                got="one that it wrote to",
                remedy="Clone it first; the array of JAX is spoilt",
            )


def _check_results(found: Sequence[Any], declared: Sequence[tuple[tuple[int, ...], Any]]) -> None:
    """Raise unless the tensors have the shapes and torch's element types that the program was made for."""
    what, remedy = "torch function", "Return what `results` declares, or as for torch's fake tensors"
    if len(found) != len(declared):
        raise ShapeError(what, expected=f"{len(declared)} results", got=f"{len(found)}", remedy=remedy)
    for i, (x, (shape, dtype)) in enumerate(zip(found, declared, strict=True)):
        name = f"result {i} of the {what}"
        if tuple(x.shape) != tuple(shape):
            raise ShapeError(name, expected=f"{tuple(shape)}", got=f"{tuple(x.shape)}", remedy=remedy)
        if x.dtype != dtype:
            raise DtypeError(name, expected=f"{dtype}", got=f"{x.dtype}", remedy=remedy)
        _convert().check_layout(name, x)


# Where XLA runs it: the compiled module calls `_on_buffers`.


def _on_buffers(key: int, arguments: Sequence[_Buffer], results: Sequence[_Buffer]) -> str | None:
    """Run a function between XLA's buffers; return what went wrong.

    XLA reuses the memory of the arguments after the call, so that none of them may be held any longer.
    """
    function = _functions.get(key)
    if function is None:
        return "attnspan.jax.from_torch: expected a program of this process, got one of another"
    memories: list[weakref.ref[Any]] = []
    wrong = None
    try:
        _fill(function.run, arguments, results, memories)
    except BaseException as error:  # All of them are XLA's to report.
        wrong = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}"
    return _held(memories) or wrong


def _fill(
    run: Run, arguments: Sequence[_Buffer], results: Sequence[_Buffer], memories: list["weakref.ref[Any]"]
) -> None:
    torch = _torch()
    tensors = [_view(x, memories) for x in arguments]
    found = run(*tensors)
    check_unwritten(tensors)
    _check_results(found, [(shape, getattr(torch, _TYPES[number])) for _, number, shape in results])
    with torch.no_grad():
        for x, buffer in zip(found, results, strict=True):
            _view(buffer, []).copy_(x)


def _view(buffer: _Buffer, memories: list["weakref.ref[Any]"]) -> Any:
    """A tensor in XLA's memory. The weak reference dies with the last tensor or array that looks at it."""
    torch, (address, number, shape) = _torch(), buffer
    dtype = getattr(torch, _TYPES[number])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:  # XLA has no memory for it, and torch makes none of it.
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * size).from_address(address)
    memories.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def _held(memories: Sequence["weakref.ref[Any]"]) -> str | None:
    if all(x() is None for x in memories):
        return None
    gc.collect()  # Cycles that nobody holds.
    held = [str(i) for i, x in enumerate(memories) if x() is not None]
    if not held:
        return None
    error = OptionError(
        "the torch function",
        expected="one that keeps none of its arguments, whose memory is JAX's",
        got=f"one that still holds argument {', '.join(held)} after the call",
        remedy="Clone what you keep",
    )
    return f"{type(error).__name__}: {error}"


# The operation, as JAX sees it.


def _at_once(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[Any]:
    """Outside of `jit`: in the memory of the arrays, if one CPU has all of them."""
    devices = set().union(*(x.devices() for x in arrays if isinstance(x, jax.Array)))
    if len(devices) > 1 or any(x.platform != "cpu" for x in devices):
        run = jax.jit(lambda *given: _call.bind(*given, function=function, results=results))
        return list(run(*arrays))
    tensors = tensors_of(arrays)
    found = function.run(*tensors)
    check_unwritten(tensors)
    _check_results(found, [(x.shape, _convert().torch_dtype("result", x.dtype)) for x in results])
    return arrays_of(found)


def _avals(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[ShapedArray]:
    del function
    like = arrays[0]  # What they vary over is alike in all of them.
    if not axes_of_types(like):
        return [ShapedArray(x.shape, x.dtype) for x in results]
    return [
        like.update(
            shape=x.shape,
            dtype=x.dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*(None,) * len(x.shape))),
        )
        for x in results
    ]


def _by_callback(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[Any]:
    return list(jax.pure_callback(function, tuple(results), *arrays))


def _lower_to_buffers(ctx: Any, *operands: Any, function: _Function, results: Sequence[Any]) -> Any:
    if cpu.compiled() is None:
        return _lower_to_callback(ctx, *operands, function=function, results=results)
    _tell_compiled_module()
    # The executable itself holds what it is made with, and no cache on disk takes it.
    ctx.module_context.add_host_callback(function)
    return jax.ffi.ffi_lowering("attnspan_callback")(ctx, *operands, key=np.int64(function.key))


def _tell_compiled_module() -> None:
    global _told
    _ffi.register()
    if not _told:
        cpu.compiled().set_xla_callback(_on_buffers)
        _told = True


_lower_to_callback = mlir.lower_fun(_by_callback, multiple_results=True)
_call = Primitive("attnspan_from_torch")
_call.multiple_results = True
_call.def_impl(_at_once)
_call.def_abstract_eval(_avals)
mlir.register_lowering(_call, _lower_to_callback, cacheable=False)
mlir.register_lowering(_call, _lower_to_buffers, platform="cpu", cacheable=False)
