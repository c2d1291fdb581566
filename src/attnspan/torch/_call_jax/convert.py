"""Tensors as JAX's arguments and JAX's arrays as tensors, each in the other's memory.

On a CPU the fastest supported way in is a NumPy view: a jitted function reads it where it is, if its first
element lies on a multiple of 64 bytes (torch's own allocations do). The way back, and both ways on a GPU, is
DLPack.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ...errors import BackendError, DeviceError, DtypeError

# Where NumPy has no such type: the type as JAX calls it, and one of its size through which to look at it.
_EXTENDED: dict[torch.dtype, tuple[Any, torch.dtype]] = {
    torch.bfloat16: (ml_dtypes.bfloat16, torch.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, torch.uint8),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, torch.uint8),
}
_PLAIN = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_TO_JAX: dict[torch.dtype, np.dtype[Any]] = {x: np.dtype(str(x).removeprefix("torch.")) for x in _PLAIN}
_TO_JAX |= {x: np.dtype(own) for x, (own, _) in _EXTENDED.items()}
_TO_TORCH = {own: x for x, own in _TO_JAX.items()}
# What JAX would silently narrow while its 64-bit mode is off.
_WIDE = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})


def jax_dtype(name: str, dtype: torch.dtype) -> np.dtype[Any]:
    """The element type as JAX calls it.

    Args:
        name: Of the argument, for the error.
        dtype: Of the tensor.

    Raises:
        TypeError: JAX has none, or would narrow it to 32 bits.

    Example:
        >>> jax_dtype("x", torch.bfloat16)
        dtype(bfloat16)
    """
    if dtype not in _TO_JAX:
        got, remedy = str(dtype), "Convert the tensor to an element type that JAX has"
        raise DtypeError(name, expected="an element type that JAX has", got=got, remedy=remedy)
    config: Any = jax.config
    if dtype in _WIDE and not config.jax_enable_x64:
        raise DtypeError(
            name,
            expected="an element type of 32 bits or fewer, as JAX's 64-bit mode is off",
            got=str(dtype),
            remedy='Convert it (.int(), .float()), or set jax.config.update("jax_enable_x64", True)',
        )
    return _TO_JAX[dtype]


def torch_dtype(name: str, dtype: Any) -> torch.dtype:
    """The element type as torch calls it.

    Raises:
        TypeError: torch has none, or none that DLPack knows.

    Example:
        >>> torch_dtype("result", np.dtype("float32"))
        torch.float32
    """
    found = _TO_TORCH.get(dtype)
    if found is None:
        remedy = "Convert it inside the function (jax.random.key_data for keys)"
        raise DtypeError(name, expected="an element type that torch has", got=str(dtype), remedy=remedy)
    return found


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise unless JAX can read from there.

    Raises:
        ValueError: They are several, or one that JAX has not.

    Example:
        >>> check_devices([torch.device("cpu")])
    """
    if len(set(devices)) > 1:
        got, remedy = " and ".join(sorted(set(map(str, devices)))), "Move them to one device"
        raise DeviceError("tensors", expected="all on one device", got=got, remedy=remedy)
    kind, index = devices[0].type, devices[0].index or 0
    if kind not in ("cpu", "cuda"):
        remedy = "Move the tensors there (meta tensors have no data to read)"
        raise DeviceError("tensors", expected="a CPU or CUDA device", got=kind, remedy=remedy)
    if kind == "cuda" and not _jax_sees_cuda(index):
        got, remedy = f"{jax.local_devices()}", "Install jax[cuda13], or move the tensors to the CPU"
        raise DeviceError("JAX", expected=f"the device cuda:{index}", got=got, remedy=remedy)


def _jax_sees_cuda(index: int) -> bool:
    try:
        return any(x.local_hardware_id == index for x in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


def check_layout(name: str, x: Tensor) -> None:
    """Raise unless the tensor has strides.

    Raises:
        ValueError: It is sparse or of an opaque layout.

    Example:
        >>> check_layout("x", torch.ones(2))
    """
    if x.layout is not torch.strided:
        got = f"one of layout {x.layout}"
        raise BackendError(name, expected="a dense tensor", got=got, remedy="Call .to_dense()")


def as_arguments(tensors: Sequence[Tensor]) -> list[Any]:
    """What a jitted function takes for the tensors, in their memory.

    Strides other than those of row-major order cost the one copy that makes them so, and on a CPU an address
    that is no multiple of 64 costs one inside JAX.

    Example:
        >>> x = torch.ones(2, 3)
        >>> as_arguments([x])[0].ctypes.data == x.data_ptr()
        True
    """
    return [_as_argument(x) for x in tensors]


def _as_argument(x: Tensor) -> Any:
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        check_layout("tensor", x)
        x = x.contiguous()
    if not x.is_cpu:
        return jax.dlpack.from_dlpack(x)
    extended = _EXTENDED.get(x.dtype)
    array = x.numpy() if extended is None else x.view(extended[1]).numpy().view(extended[0])
    # A view has no device of its own, and would be taken to an accelerator.
    return jax.device_put(array, _cpu(), may_alias=True) if _computes_elsewhere() else array


@functools.cache
def _computes_elsewhere() -> bool:
    return jax.default_backend() != "cpu"


@functools.cache
def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


def as_tensors(arrays: Sequence[jax.Array]) -> list[Tensor]:
    """Tensors in the memory of JAX's arrays, which are computed when this returns.

    Waiting is the price of safety: torch would let others write to the arguments while JAX still reads them.

    Raises:
        ValueError: An array is sharded over several devices.

    Example:
        >>> x = jax.numpy.arange(3)
        >>> as_tensors([x])[0].data_ptr() == x.unsafe_buffer_pointer()
        True
    """
    for x in arrays:
        x.block_until_ready()
    try:
        return [from_dlpack(x.__dlpack__()) for x in arrays]
    except BufferError as error:
        raise BackendError(
            "the result of the JAX function",
            expected="arrays that are on one device",
            got=str(error),
            remedy="Shard over the devices of torch, or call the sharded function from JAX",
        ) from None
