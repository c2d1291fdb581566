"""The handful of array functions that masks need, for NumPy, torch and JAX alike.

A mask is lowered in the framework of its own arrays. Rather than three copies of the lowering, there is one,
written against `Arrays`. Neither torch nor JAX is imported unless one of its arrays is handed in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from .errors import DeviceError, DtypeError

__all__ = [
    "INT32_MAX",
    "NUMPY",
    "Array",
    "Arrays",
    "JaxArrays",
    "TorchArrays",
    "arrays_for",
    "is_array",
    "is_bool",
    "is_integer",
    "outside_inference_mode",
    "own",
]

Array = Any
"""A NumPy array, a torch tensor or a JAX array."""

INT32_MAX = 2**31 - 1


def _is_torch(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: object) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_array(x: object) -> bool:
    """Whether `x` is an array of one of the three frameworks.

    Example:
        >>> is_array(np.zeros(2)), is_array([0, 0])
        (True, False)
    """
    return isinstance(x, np.ndarray) or _is_torch(x) or _is_jax(x)


def is_integer(x: Array) -> bool:
    """Whether the dtype of `x` is an integer (not bool) one.

    Example:
        >>> is_integer(np.zeros(2, np.uint8)), is_integer(np.zeros(2, bool))
        (True, False)
    """
    if _is_torch(x):
        torch = sys.modules["torch"]
        return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return bool(np.issubdtype(x.dtype, np.integer))


def is_bool(x: Array) -> bool:
    """Whether the dtype of `x` is bool.

    Example:
        >>> is_bool(np.zeros(2, bool))
        True
    """
    if _is_torch(x):
        return bool(x.dtype == sys.modules["torch"].bool)
    return bool(x.dtype == np.bool_)


def _saturated(x: Any) -> Any:
    """Integers of NumPy or JAX, none beyond int32."""
    x = x if is_array(x) else np.asarray(x)
    kind, size = x.dtype.kind, x.dtype.itemsize
    if kind == "u" and size >= 4:
        return x.clip(None, INT32_MAX)
    return x.clip(-INT32_MAX - 1, INT32_MAX) if kind == "i" and size > 4 else x


class Arrays:
    """NumPy's functions under the names used here; the JAX form differs in a few signatures only."""

    name = "numpy"
    xp: Any = np

    def same(self, other: Arrays) -> bool:
        """Whether both make arrays of one framework on one device."""
        return self.name == other.name

    def tracing(self) -> bool:
        """Whether a compiler is reading this code, so that sizes must not be compared for nothing."""
        return False

    def is_static(self, size: Any) -> bool:
        """Whether a size is one number, not a symbol that a compiler would have to fix."""
        del size
        return True

    def concrete(self, x: Array) -> bool:
        """Whether Python may read the values of `x` now, at no cost: on the host, not under a tracer."""
        del x
        return True

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.xp.asarray(x, dtype=dtype)

    def to_int32(self, x: Any) -> Array:
        """`x` as int32; values beyond it become its ends, never the plausible ones of a wrapped cast."""
        return self.asarray(_saturated(x), "int32")

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def arange(self, n: int) -> Array:
        return self.xp.arange(n, dtype="int32")

    def full(self, shape: Sequence[int], value: int, dtype: str = "int32") -> Array:
        return self.xp.full(tuple(shape), value, dtype=dtype)

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return self.xp.broadcast_to(x, tuple(shape))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return self.xp.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return self.xp.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.xp.maximum(a, b)

    def clip(self, x: Array, low: int, high: int) -> Array:
        return self.xp.clip(x, low, high)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype, copy=False)

    def cumsum(self, x: Array) -> Array:
        return self.xp.cumsum(x, axis=-1)

    def cummax(self, x: Array) -> Array:
        return np.maximum.accumulate(x, axis=-1)

    def sum(self, x: Array) -> Array:
        """Sum over the last axis, as int64."""
        return self.xp.sum(x, axis=-1, dtype="int64")

    def any(self, x: Array) -> Array:
        return self.xp.any(x, axis=-1)

    def stack(self, xs: Sequence[Array]) -> Array:
        return self.xp.stack(self.xp.broadcast_arrays(*xs), axis=-1)

    def concat(self, xs: Sequence[Array]) -> Array:
        return self.xp.concatenate(list(xs), axis=-1)

    def argsort(self, x: Array) -> Array:
        return self.xp.argsort(x, axis=-1, kind="stable")

    def sort(self, x: Array) -> Array:
        return self.xp.sort(x, axis=-1)

    def take(self, x: Array, index: Array, axis: int) -> Array:
        return self.xp.take(x, index, axis=axis)

    def take_along(self, x: Array, index: Array) -> Array:
        """Gather along the last axis; the leading axes broadcast."""
        if x.ndim == 1 and index.ndim == 1:
            return x[index]
        lead = self._lead(x, index)
        x = self.broadcast_to(x, (*lead, x.shape[-1]))
        return self.xp.take_along_axis(x, self.broadcast_to(index, (*lead, index.shape[-1])), axis=-1)

    def _lead(self, x: Array, y: Array) -> tuple[Any, ...]:
        """The shape to which all axes but the last broadcast."""
        return tuple(np.broadcast_shapes(x.shape[:-1], y.shape[:-1]))

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        """Ranks of `values` (..., m) in the ascending rows of `table` (..., n); leading axes broadcast."""
        side: Literal["left", "right"] = "right" if right else "left"
        if table.ndim == 1:
            return np.searchsorted(table, values, side=side)
        lead = self._lead(table, values)
        tables = np.broadcast_to(table, (*lead, table.shape[-1])).reshape(-1, table.shape[-1])
        rows = np.broadcast_to(values, (*lead, values.shape[-1])).reshape(-1, values.shape[-1])
        ranks = [np.searchsorted(t, r, side=side) for t, r in zip(tables, rows, strict=True)]
        return np.stack(ranks).reshape(*lead, values.shape[-1])

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        """A 1-D int64 array of `size` zeros with `values` added at `index`."""
        # float64 weights are exact here: sums of block remainders stay far below 2**53.
        return np.bincount(index, weights=values, minlength=size).astype(np.int64)


class JaxArrays(Arrays):
    """The same in JAX, where the few functions whose signature differs are its own."""

    name = "jax"

    def __init__(self) -> None:
        self.jax: Any = sys.modules["jax"]
        self.xp = self.jax.numpy

    def concrete(self, x: Array) -> bool:
        if not _is_jax(x):
            return True
        if isinstance(x, self.jax.core.Tracer):
            return False
        return all(device.platform == "cpu" for device in x.devices())

    def _dtype(self, name: str) -> Any:
        # JAX keeps 32 bits unless told otherwise, and warns when asked for more.
        return self.jax.dtypes.canonicalize_dtype(name)

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.xp.asarray(own(x), dtype=self._dtype(dtype))

    def to_int32(self, x: Any) -> Array:
        # NumPy's before they become JAX's, which may have no int64.
        return self.asarray(_saturated(x), "int32")

    def full(self, shape: Sequence[int], value: int, dtype: str = "int32") -> Array:
        return self.xp.full(tuple(shape), value, dtype=self._dtype(dtype))

    def contiguous(self, x: Array) -> Array:
        return x

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(self._dtype(dtype))

    def _lead(self, x: Array, y: Array) -> tuple[Any, ...]:
        # JAX's own knows symbols of sizes.
        return tuple(self.xp.broadcast_shapes(x.shape[:-1], y.shape[:-1]))

    def cummax(self, x: Array) -> Array:
        return self.jax.lax.cummax(x, axis=x.ndim - 1)

    def sum(self, x: Array) -> Array:
        return self.xp.sum(x, axis=-1, dtype=self._dtype("int64"))

    def argsort(self, x: Array) -> Array:
        return self.xp.argsort(x, axis=-1, stable=True)

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        if not isinstance(table.shape[-1], int):
            # Halving takes as many steps as the size has digits, which a symbol has not: count instead.
            below = self.xp.less_equal if right else self.xp.less
            return self.xp.sum(below(table[..., None, :], values[..., :, None]), axis=-1, dtype="int32")
        side = "right" if right else "left"
        if table.ndim == 1:
            return self.xp.searchsorted(table, values, side=side)
        search = self.xp.vectorize(
            lambda t, v: self.xp.searchsorted(t, v, side=side), signature="(n),(m)->(m)"
        )
        return search(table, values)

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        zeros = self.xp.zeros(size, self._dtype("int64"))
        return zeros.at[index].add(values)


class TorchArrays(Arrays):
    """The same in torch, on one device."""

    name = "torch"

    def __init__(self, device: Any) -> None:
        self.torch: Any = sys.modules["torch"]
        self.device = device

    def same(self, other: Arrays) -> bool:
        return isinstance(other, TorchArrays) and bool(self.device == other.device)

    def _dtype(self, name: str) -> Any:
        return {"int32": self.torch.int32, "int64": self.torch.int64, "bool": self.torch.bool}[name]

    def tracing(self) -> bool:
        return bool(self.torch.compiler.is_compiling())

    def is_static(self, size: Any) -> bool:
        return bool(self.torch.fx.experimental.symbolic_shapes.has_static_value(size))

    def concrete(self, x: Array) -> bool:
        if self.torch.compiler.is_compiling():
            return False
        if not _is_torch(x):
            return True
        # Fake, functional and other subclasses have no values to read, nor have wrappers of torch.func.
        plain = type(x) is self.torch.Tensor or type(x) is self.torch.nn.Parameter
        if plain and self.torch._C._are_functorch_transforms_active():
            plain = not self.torch._C._functorch.is_functorch_wrapped_tensor(x)
        return bool(plain and x.device.type == "cpu")

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.torch.as_tensor(own(x), device=self.device).to(self._dtype(dtype))

    def to_int32(self, x: Any) -> Array:
        if not _is_torch(x):
            return self.asarray(_saturated(x), "int32")
        if x.dtype in (self.torch.uint32, self.torch.uint64):
            x = x.to(self.torch.int64)
        if x.dtype == self.torch.int64:
            x = x.clamp(-INT32_MAX - 1, INT32_MAX)
        return self.asarray(x, "int32")

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        # NumPy indices may come with torch bounds.
        if not _is_torch(x):
            return np.asarray(x)
        if not self.torch._C._are_functorch_transforms_active():
            return np.asarray(x.detach().cpu().numpy())
        with self.torch._C._DisableFuncTorch():  # It would wrap what is read, though this is a plain tensor.
            return np.asarray(x.detach().cpu().numpy())

    def arange(self, n: int) -> Array:
        return self.torch.arange(n, dtype=self.torch.int32, device=self.device)

    def full(self, shape: Sequence[int], value: int, dtype: str = "int32") -> Array:
        return self.torch.full(tuple(shape), value, dtype=self._dtype(dtype), device=self.device)

    def contiguous(self, x: Array) -> Array:
        return x.contiguous()

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return x.expand(tuple(shape))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return self.torch.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return self.torch.minimum(a, b) if _is_torch(b) else self.torch.clamp(a, max=b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.torch.maximum(a, b) if _is_torch(b) else self.torch.clamp(a, min=b)

    def clip(self, x: Array, low: int, high: int) -> Array:
        return self.torch.clamp(x, low, high)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(self._dtype(dtype))

    def cumsum(self, x: Array) -> Array:
        return self.torch.cumsum(x, dim=-1)

    def cummax(self, x: Array) -> Array:
        return self.torch.cummax(x, dim=-1).values

    def sum(self, x: Array) -> Array:
        return self.torch.sum(x, dim=-1, dtype=self.torch.int64)

    def any(self, x: Array) -> Array:
        return self.torch.any(x, dim=-1)

    def stack(self, xs: Sequence[Array]) -> Array:
        return self.torch.stack(self.torch.broadcast_tensors(*xs), dim=-1)

    def concat(self, xs: Sequence[Array]) -> Array:
        return self.torch.cat(list(xs), dim=-1)

    def argsort(self, x: Array) -> Array:
        return self.torch.argsort(x, dim=-1, stable=True)

    def sort(self, x: Array) -> Array:
        return self.torch.sort(x, dim=-1).values

    def take(self, x: Array, index: Array, axis: int) -> Array:
        return self.torch.index_select(x, axis, index)

    def take_along(self, x: Array, index: Array) -> Array:
        # Not take_along_dim: its broadcasting would fix dynamic sizes to the ones it sees.
        lead = self.torch.broadcast_shapes(x.shape[:-1], index.shape[:-1])
        index = index.to(self.torch.int64).expand(*lead, index.shape[-1])
        return self.torch.gather(x.expand(*lead, x.shape[-1]), -1, index)

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        if table.ndim > 1:
            lead = self.torch.broadcast_shapes(table.shape[:-1], values.shape[:-1])
            table = table.expand(*lead, table.shape[-1])
            values = values.expand(*lead, values.shape[-1])
        return self.torch.searchsorted(table.contiguous(), values.contiguous(), right=right)

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        zeros = self.torch.zeros(size, dtype=self.torch.int64, device=self.device)
        return zeros.index_add(0, index.to(self.torch.int64), values.to(self.torch.int64))


NUMPY = Arrays()


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Masks are made of ordinary tensors, also in inference mode: autograd cannot save those of that mode.

    Example:
        >>> import torch
        >>> with torch.inference_mode(), outside_inference_mode():
        ...     torch.zeros(1).is_inference()
        False
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)  # type: ignore[no-any-return]


def own(x: Any) -> Any:
    """A NumPy array as a contiguous copy in native byte order; anything else as it is.

    Frameworks share memory with NumPy arrays where they can. A caller who writes into one after the forward
    pass would change what the backward pass has saved, and no version counter sees it.

    Example:
        >>> x = np.arange(3)
        >>> own(x) is x, own(x[::-1]).tolist()
        (False, [2, 1, 0])
    """
    if not isinstance(x, np.ndarray):
        return x
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return torch.as_tensor(x).clone()
    return x.astype(x.dtype.newbyteorder("="), order="C")


def arrays_for(candidates: Iterable[object], like: object = None, what: str = "mask") -> Arrays:
    """The functions for the framework (and device) of the given arrays.

    Args:
        candidates: anything; entries that are not arrays are passed over. NumPy arrays go with those of any
            other framework.
        like: decides where the candidates are arrays of NumPy, or none are arrays; without it, NumPy does.
        what: names the argument that they are of.

    Raises:
        DeviceError: for arrays of two frameworks, or tensors on two devices.

    Example:
        >>> arrays_for([np.zeros(3), None, 4]).name
        'numpy'
    """
    found: Arrays | None = None
    for x in candidates:
        if isinstance(x, np.ndarray):
            found = NUMPY if found is None else found
        elif _is_torch(x) or _is_jax(x):
            other = TorchArrays(x.device) if _is_torch(x) else JaxArrays()  # type: ignore[attr-defined]
            if found is not None and found.name != "numpy" and not found.same(other):
                raise DeviceError(
                    what,
                    expected="arrays of one framework on one device",
                    got=f"{_place(found)} and {_place(other)}",
                    remedy="Move them to one place first, from one framework to another by its from_dlpack",
                )
            found = other
    if found is None or (found is NUMPY and like is not None):
        if like is not None and not is_array(like):
            raise DtypeError(
                "like",
                expected="an array",
                got=type(like).__name__,
                remedy="Pass one of the framework, and on the device, that the mask is for",
            )
        return NUMPY if like is None else arrays_for([like])
    return found


def _place(arrays: Arrays) -> str:
    return f"torch on {arrays.device}" if isinstance(arrays, TorchArrays) else arrays.name
