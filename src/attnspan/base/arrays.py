"""The few array functions that masks need, for NumPy, torch and JAX.

A mask is lowered in the framework of its own arrays, by one lowering that is written against `Arrays`. This
module uses torch and JAX only if the program has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from attnspan.errors import DeviceError, DtypeError, ShapeError, expect

from .plain import check_plain
from .recorded import is_recorded, is_static, sure

Array = Any
"""A NumPy array, a torch tensor or a JAX array."""

#: Largest int32. It ends an interval without a limit.
INT32_MAX = 2**31 - 1


def _is_torch(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: object) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_array(x: object) -> bool:
    """Whether `x` is an array of one of the three frameworks."""
    return isinstance(x, np.ndarray) or _is_torch(x) or _is_jax(x)


def is_integer(x: Array) -> bool:
    """Whether `x` has an integer dtype. bool is none."""
    if _is_torch(x):
        return not (x.is_floating_point() or x.is_complex() or is_bool(x))
    return bool(np.issubdtype(x.dtype, np.integer))


def is_bool(x: Array) -> bool:
    """Whether `x` has the dtype bool."""
    return bool(x.dtype == (sys.modules["torch"].bool if _is_torch(x) else np.bool_))


def kind_of(x: Any) -> str:
    """The dtype of an array, or the type of anything else, for the "got" part of an error.

    Example:
        >>> kind_of(np.zeros(2)), kind_of([0, 0])
        ('float64', 'list')
    """
    return str(x.dtype) if is_array(x) else type(x).__name__


def _saturated(x: Any) -> Any:
    """Clip integers to the range of int32."""
    if _is_torch(x):
        torch = sys.modules["torch"]
        x = x.to(torch.int64) if x.dtype in (torch.uint32, torch.uint64) else x
        return x.clamp(-INT32_MAX - 1, INT32_MAX) if x.dtype == torch.int64 else x
    x = x if is_array(x) else np.asarray(x)
    kind, size = x.dtype.kind, x.dtype.itemsize
    if kind == "u" and size >= 4:
        return x.clip(None, INT32_MAX)
    return x.clip(-INT32_MAX - 1, INT32_MAX) if kind == "i" and size > 4 else x


class Arrays:
    """Array functions of NumPy. They reduce, sort, join and gather along the last axis."""

    name = "numpy"
    xp: Any = np
    device: Any = None
    _dtypes: Mapping[str, Any] = {"int32": "int32", "int64": "int64", "bool": "bool"}
    _on: Mapping[str, Any] = {}  # where new arrays are made
    _stable: Mapping[str, Any] = {"kind": "stable"}

    def tracing(self) -> bool:
        """Whether a compiler traces this code, where comparing a size would make it a constant."""
        return False

    def is_one(self, size: Any) -> bool:
        """Whether a size is known to be 1. A symbol is not."""
        return isinstance(size, int) and size == 1

    def size(self, size: Any) -> Any:
        """A size of an array as a number, or as a compiler's symbol."""
        return size

    def is_static(self, size: Any) -> bool:
        """Whether a size is a number, not a symbol that a compiler would have to fix."""
        del size
        return True

    def concrete(self, x: Array) -> bool:
        """Whether Python may read the values of `x` at no cost: on the host, not under a tracer."""
        return self.readable(x)

    def readable(self, x: Array) -> bool:
        """Whether Python may read the values of `x`, perhaps from a device: not under a tracer."""
        del x
        return True

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.xp.asarray(x, dtype=dtype)

    def to_int32(self, x: Any) -> Array:
        """Convert `x` to int32. Larger values are clipped, because wrapped values would look plausible."""
        return self.asarray(_saturated(x), "int32")

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x

    def arange(self, n: int) -> Array:
        return self.xp.arange(n, dtype=self._dtypes["int32"], **self._on)

    def full(self, shape: Sequence[int], value: int, dtype: str = "int32") -> Array:
        return self.xp.full(tuple(shape), value, dtype=self._dtypes[dtype], **self._on)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(self._dtypes[dtype], copy=False)

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return self.xp.broadcast_to(x, tuple(shape))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return self.xp.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return self.xp.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.xp.maximum(a, b)

    def clip(self, x: Array, low: int, high: int) -> Array:
        return self.xp.minimum(self.xp.maximum(x, low), high)  # np.clip takes three times as long

    def cumsum(self, x: Array) -> Array:
        return self.xp.cumsum(x, axis=-1)

    def cummax(self, x: Array) -> Array:
        return np.maximum.accumulate(x, axis=-1)

    def sum(self, x: Array) -> Array:
        """The sum, as int64."""
        return self.xp.sum(x, axis=-1, dtype=self._dtypes["int64"])

    def any(self, x: Array) -> Array:
        return self.xp.any(x, axis=-1)

    def stack(self, xs: Sequence[Array]) -> Array:
        """Broadcast arrays along a new last axis."""
        alike = len({x.shape for x in xs}) == 1
        return self.xp.stack(xs if alike else self.xp.broadcast_arrays(*xs), axis=-1)

    def concat(self, xs: Sequence[Array]) -> Array:
        return self.xp.concatenate(list(xs), axis=-1)

    def argsort(self, x: Array) -> Array:
        return self.xp.argsort(x, **self._stable)

    def sort(self, x: Array) -> Array:
        return self.xp.sort(x)

    def take(self, x: Array, index: Array, axis: int) -> Array:
        return self.xp.take(x, index, axis=axis)

    def take_along(self, x: Array, index: Array) -> Array:
        """Gather along the last axis. The leading axes broadcast."""
        if x.ndim == 1 and index.ndim == 1:
            return x[index]
        return self.xp.take_along_axis(*self._aligned(x, index), axis=-1)

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        """Ranks of `values` (..., m) in the ascending rows of `table` (..., n). Leading axes broadcast."""
        if table.ndim == 1:
            return np.searchsorted(table, values, side="right" if right else "left")
        tables, rows = self._aligned(table, values)
        ranks = np.empty(rows.shape, np.int64)
        for at in np.ndindex(rows.shape[:-1]):
            ranks[at] = np.searchsorted(tables[at], rows[at], side="right" if right else "left")
        return ranks

    def _aligned(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Broadcast all axes but the last of two arrays."""
        lead = self.xp.broadcast_shapes(x.shape[:-1], y.shape[:-1])
        return self.broadcast_to(x, (*lead, x.shape[-1])), self.broadcast_to(y, (*lead, y.shape[-1]))

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        """A 1-D int64 array of `size` zeros with `values` added at `index`."""
        # float64 weights are exact here, because sums of block remainders stay far below 2**53.
        return np.bincount(index, weights=values, minlength=size).astype(np.int64)


class JaxArrays(Arrays):
    """Array functions of JAX."""

    name = "jax"
    _stable: Mapping[str, Any] = {"stable": True}

    def __init__(self) -> None:
        self.jax: Any = sys.modules["jax"]
        self.xp = self.jax.numpy
        # JAX has 32 bits by default, and warns if 64 are requested.
        self._dtypes = {name: self.jax.dtypes.canonicalize_dtype(name) for name in Arrays._dtypes}

    def concrete(self, x: Array) -> bool:
        return self.readable(x) and (not _is_jax(x) or all(d.platform == "cpu" for d in x.devices()))

    def readable(self, x: Array) -> bool:
        return not isinstance(x, self.jax.core.Tracer)

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.xp.asarray(own(x), dtype=self._dtypes[dtype])

    def cummax(self, x: Array) -> Array:
        return self.jax.lax.cummax(x, axis=x.ndim - 1)

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        if not isinstance(table.shape[-1], int):
            # Bisection needs the number of digits of the size, which a symbol does not have. Count instead.
            below = self.xp.less_equal if right else self.xp.less
            return self.xp.sum(below(table[..., None, :], values[..., :, None]), axis=-1, dtype="int32")

        def search(row: Array, wanted: Array) -> Array:
            return self.xp.searchsorted(row, wanted, side="right" if right else "left")

        return self.xp.vectorize(search, signature="(n),(m)->(m)")(table, values)

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        return self.full((size,), 0, "int64").at[index].add(values)


class TorchArrays(Arrays):
    """Array functions of torch, on one device."""

    name = "torch"
    _stable: Mapping[str, Any] = {"stable": True}

    def __init__(self, device: Any) -> None:
        self.xp = sys.modules["torch"]
        self.device, self._on = device, {"device": device}
        self._dtypes = {"int32": self.xp.int32, "int64": self.xp.int64, "bool": self.xp.bool}

    def tracing(self) -> bool:
        return is_recorded()

    def is_one(self, size: Any) -> bool:
        return sure(self.size(size) == 1)

    def size(self, size: Any) -> Any:
        # In torch.jit.trace, sizes are tensors. The sizes of a mask become fixed, and kernels refuse others.
        return int(size) if _is_torch(size) else size

    def is_static(self, size: Any) -> bool:
        return is_static(self.size(size))

    def concrete(self, x: Array) -> bool:
        return self.readable(x) and (not _is_torch(x) or bool(x.device.type == "cpu"))

    def readable(self, x: Array) -> bool:
        if is_recorded():
            return False
        if not _is_torch(x):
            return True
        # Fake, functional and other subclasses, and wrappers of torch.func, have no readable values.
        plain = type(x) is self.xp.Tensor or type(x) is self.xp.nn.Parameter
        if plain and self.xp._C._are_functorch_transforms_active():
            plain = not self.xp._C._functorch.is_functorch_wrapped_tensor(x)
        return bool(plain)

    def asarray(self, x: Any, dtype: str) -> Array:
        return self.cast(self.xp.as_tensor(own(x), device=self.device), dtype)

    def to_int32(self, x: Any) -> Array:
        # A compiler traces NumPy arrays as tensors, and cannot read their dtype.
        return super().to_int32(self.xp.as_tensor(x) if is_recorded() and not _is_torch(x) else x)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        # NumPy indices may come with torch bounds.
        if not _is_torch(x):
            return np.asarray(x)
        functions = self.xp._C._are_functorch_transforms_active()
        # torch.func would wrap the result, although `x` is a plain tensor.
        with self.xp._C._DisableFuncTorch() if functions else nullcontext():
            return np.asarray(stored(x).detach().cpu().numpy())

    def contiguous(self, x: Array) -> Array:
        return x.contiguous()

    def cast(self, x: Array, dtype: str) -> Array:
        wanted = self._dtypes[dtype]
        return x if x.dtype is wanted else stored(x).to(wanted)

    def minimum(self, a: Array, b: Any) -> Array:
        return self.xp.minimum(a, b) if _is_torch(b) else self.xp.clamp(a, max=b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.xp.maximum(a, b) if _is_torch(b) else self.xp.clamp(a, min=b)

    def cummax(self, x: Array) -> Array:
        return self.xp.cummax(x, dim=-1).values

    def clip(self, x: Array, low: int, high: int) -> Array:
        return x.clip(low, high)

    def stack(self, xs: Sequence[Array]) -> Array:
        return self.xp.stack(self.xp.broadcast_tensors(*xs), dim=-1)

    def sort(self, x: Array) -> Array:
        return self.xp.sort(x).values

    def take(self, x: Array, index: Array, axis: int) -> Array:
        return self.xp.index_select(stored(x), axis, index)

    def take_along(self, x: Array, index: Array) -> Array:
        # No take_along_dim, whose broadcasting would specialize dynamic sizes.
        x, index = self._aligned(x, index.to(self.xp.int64))
        return self.xp.gather(x, -1, index)

    def searchsorted(self, table: Array, values: Array, *, right: bool = False) -> Array:
        if table.ndim > 1:
            table, values = self._aligned(table, values)
        return self.xp.searchsorted(table.contiguous(), values.contiguous(), right=right)

    def scatter_add(self, size: int, index: Array, values: Array) -> Array:
        zeros = self.full((size,), 0, "int64")
        return zeros.index_add(0, index.to(self.xp.int64), values.to(self.xp.int64))


#: The array functions of NumPy.
NUMPY = Arrays()


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leave inference mode while masks are made, because autograd cannot save inference tensors."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)  # type: ignore[no-any-return]


def own(x: Any) -> Any:
    """Copy a NumPy array, contiguous and in native byte order. Return anything else as it is.

    Frameworks share memory with NumPy arrays if they can. A write after the forward pass would then change
    data that the backward pass has saved, and no version counter would notice it.

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


# NumPy arrays whose memory nothing else can write, by identity. A read-only view may have a writable base, so
# the flag alone does not show it.
_frozen: WeakValueDictionary[int, np.ndarray[Any, Any]] = WeakValueDictionary()


def frozen(x: Any) -> Any:
    """Copy an array, so that it shares no memory with another one. A NumPy copy is read-only.

    Example:
        >>> x = np.arange(3)
        >>> y = frozen(x)
        >>> y.flags.writeable, x.flags.writeable, frozen(y) is y
        (False, True, True)
    """
    if x is None or is_frozen(x):
        return x
    if not isinstance(x, np.ndarray):
        return x.detach().clone() if _is_torch(x) else x.copy()
    found = own(x)
    found.flags.writeable = False
    _frozen[id(found)] = found
    return found


def is_frozen(x: Any) -> bool:
    """Whether a NumPy array was made by `frozen`, so that its values cannot change."""
    known = _frozen.get(id(x))
    return known is not None and known is x and not known.flags.writeable


def stored(x: Any, name: str = "array") -> Any:
    """Return the torch tensor itself, or raise if its storage was freed or shrunk.

    Many functions of torch would read beyond such a storage. Fake tensors, other subclasses and tensors under
    torch.func are not checked, because they may have no storage.
    """
    torch = sys.modules["torch"]
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    if not plain or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return x
    if not (x.is_cpu and x.numel()):
        return x
    last = x.numel() - 1
    if not x.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    held, needed = x.untyped_storage().nbytes(), (x.storage_offset() + 1 + last) * x.itemsize
    if held < needed:
        remedy = "Restore it first: untyped_storage().resize_() freed or shrank it"
        wanted, got = "a storage of {} bytes for its shape {}", f"{held} bytes"
        expect(False, name, wanted, got, remedy, needed, tuple(x.shape), error=ShapeError)
    return x


def arrays_for(candidates: Iterable[object], like: object = None, what: str = "mask") -> Arrays:
    """Find the array functions for the framework and device of some arrays.

    Args:
        candidates: Arrays and other objects, which are ignored. NumPy arrays may be mixed with arrays of
            another framework.
        like: An array that decides if no candidate is an array of torch or JAX. Default: NumPy.
        what: Name of the argument, for errors.

    Raises:
        DeviceError: For arrays of two frameworks, or tensors on two devices.
        DtypeError: If `like` decides and is no array.

    Example:
        >>> arrays_for([np.zeros(3), None, 4]).name
        'numpy'
    """
    found: Arrays | None = None
    for x in candidates:
        check_plain(what, x)
        if isinstance(x, np.ndarray):
            found = NUMPY if found is None else found
        elif _is_torch(x) or _is_jax(x):
            other = TorchArrays(x.device) if _is_torch(x) else JaxArrays()  # type: ignore[attr-defined]
            if found is not None and found is not NUMPY:
                _check_same_place(what, found, other)
            found = other
    if like is None or (found is not None and found is not NUMPY):
        return NUMPY if found is None else found
    if not is_array(like):
        remedy = "Pass an array of the framework, and on the device, that the mask is for"
        raise DtypeError("like", expected="an array", got=type(like).__name__, remedy=remedy)
    return arrays_for([like], what="like")


def _check_same_place(what: str, a: Arrays, b: Arrays) -> None:
    if a.name != b.name or a.device != b.device:
        got = " and ".join(f"torch on {x.device}" if x.name == "torch" else x.name for x in (a, b))
        raise DeviceError(
            what,
            expected="arrays of one framework on one device",
            got=got,
            remedy="Move them to one device first. Convert between frameworks by from_dlpack",
        )
