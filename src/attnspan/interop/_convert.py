"""Conversion of tensors to JAX's arguments and of JAX's arrays to tensors, without copies.

On a CPU, the fastest supported way to JAX is a NumPy view. A jitted function reads the view without a copy if
its first element lies on a multiple of 64 bytes, as in torch's own allocations. The way back uses DLPack, as
do both ways on a GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from attnspan.errors import BackendError, DeviceError, DtypeError, expect

#: The dtypes that both torch and JAX have.
TYPES = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32"}
TYPES |= {9: "uint64", 10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16"}
TYPES |= {18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn"}
_TO_JAX: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, x): jax.numpy.dtype(x) for x in TYPES.values()}
_TO_TORCH = {own: x for x, own in _TO_JAX.items()}
# For dtypes that NumPy lacks: a NumPy dtype of the same size, for a view.
_SEEN_AS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def jax_dtype(name: str, dtype: torch.dtype) -> np.dtype[Any]:
    """Return JAX's dtype for the argument ``name``. Raises if JAX would narrow it."""
    expect(dtype in _TO_JAX, name, "a dtype that JAX has", dtype, "Convert the tensor", error=DtypeError)
    check_width(name, _TO_JAX[dtype])
    return _TO_JAX[dtype]


def check_width(name: str, dtype: np.dtype[Any]) -> None:
    """Raise if JAX would narrow the dtype."""
    kept = jax.dtypes.canonicalize_dtype(dtype) == dtype
    expected = "a dtype of 32 bits or fewer, because JAX's 64-bit mode is off"
    remedy = 'Convert it (.int(), .astype("int32")), or set jax.config.update("jax_enable_x64", True)'
    expect(kept, name, expected, dtype, remedy, error=DtypeError)


def torch_dtype(name: str, dtype: Any) -> torch.dtype:
    """Return torch's dtype for ``name``, if DLPack supports it."""
    remedy = "Convert it inside the function (jax.random.key_data for keys)"
    expect(dtype in _TO_TORCH, name, "a dtype that torch has", dtype, remedy, error=DtypeError)
    return _TO_TORCH[dtype]


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise unless the tensors are on one device, and JAX can read from it."""
    got = " and ".join(sorted(set(map(str, devices))))
    alike = len(set(devices)) == 1
    expect(alike, "tensors", "all on one device", got, "Move them to one device", error=DeviceError)
    kind, index = devices[0].type, devices[0].index or 0
    remedy = "Move the tensors to such a device. Meta tensors have no data"
    expect(kind in ("cpu", "cuda"), "tensors", "a CPU or CUDA device", kind, remedy, error=DeviceError)
    remedy = "Install jax[cuda13], or move the tensors to the CPU"
    seen = kind == "cpu" or _jax_sees_cuda(index)
    expect(seen, "JAX", f"the device cuda:{index}", jax.local_devices(), remedy, error=DeviceError)


def _jax_sees_cuda(index: int) -> bool:
    try:
        return any(x.local_hardware_id == index for x in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


def check_layout(name: str, x: Tensor) -> None:
    """Raise unless the tensor has strides."""
    dense = x.layout is torch.strided
    expect(dense, name, "a dense tensor", f"layout {x.layout}", "Call .to_dense()", error=BackendError)


def as_arguments(tensors: Sequence[Tensor]) -> list[Any]:
    """Convert tensors to arguments of a jitted function. Tensors with row-major strides are not copied."""
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
    seen_as = _SEEN_AS.get(x.dtype)
    array = x.numpy() if seen_as is None else x.view(seen_as).numpy().view(_TO_JAX[x.dtype])
    # A view has no device, so JAX would move it to an accelerator.
    own = _own_device()
    return array if own is None else jax.device_put(array, own, may_alias=True)


@functools.cache
def _own_device() -> Any:
    """Return the CPU if JAX's default device is another one."""
    return None if jax.default_backend() == "cpu" else jax.local_devices(backend="cpu")[0]


def as_tensors(arrays: Sequence[jax.Array]) -> list[Tensor]:
    """Return tensors in the memory of JAX's arrays, which are computed when the function returns.

    It waits for safety: otherwise torch could write to the arguments while JAX still reads them.
    """
    for x in arrays:
        x.block_until_ready()
    try:
        return [from_dlpack(x.__dlpack__()) for x in arrays]
    except BufferError as error:
        what, expected = "the result of the JAX function", "arrays on one device"
        remedy = "Shard over torch's devices, or call the sharded function from JAX"
        raise BackendError(what, expected=expected, got=str(error), remedy=remedy) from None
