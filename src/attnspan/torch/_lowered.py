"""Masks lowered once: what layers share that are given one mask, or masks without data that mean the same.

Lowering is arithmetic on small arrays. On the CPU NumPy does it, whose calls cost a fraction of torch's.
"""

from collections import OrderedDict
from dataclasses import fields
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import NUMPY, is_frozen, stored
from attnspan.base.forks import ForkSafeLock
from attnspan.base.pytrees import library_classes
from attnspan.call import lower_mask
from attnspan.call.options import Given
from attnspan.masks.bounds import Spans
from attnspan.masks.expression import Mask, Prepared
from attnspan.masks.lowering import begin

from . import compat

_STATIC = (bool, int, str, type(None))
# Sizes for which one mask is remembered: kinds of layers, prefill and decoding.
_MOST_SIZES = 4
# Masks without arrays, of few spans: bounds take 8 bytes for a row and span, 16 masks of 65,536 rows 8 MiB. A
# copy to a device is waited for once, where lowering there would launch a dozen kernels in each call.
_MOST_STATIC = 16


_FIXED = object()  # the value of an array that nothing can write


class _Known(NamedTuple):
    """One lowering, and what the mask's arrays held then."""

    sizes: tuple[int, ...]
    device: torch.device
    lowered: Prepared
    arrays: list[Any]
    values: list[
        Any
    ]  # of CPU tensors a copy, of other tensors the version, of NumPy arrays shape, dtype, bytes


class _ByIdentity:
    """A dictionary whose keys are masks that live, by identity: others may be equal to them."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Mask], list[_Known]]] = {}

    def get(self, mask: Mask) -> list[_Known]:
        entry = self._entries.get(id(mask))
        return entry[1] if entry is not None and entry[0]() is mask else []

    def set(self, mask: Mask, known: list[_Known]) -> None:
        key, entries = id(mask), self._entries

        def forget(gone: ref[Mask]) -> None:
            # Another mask may have the number by now.
            if (entry := entries.get(key)) is not None and entry[0] is gone:
                del entries[key]

        entries[key] = ref(mask, forget), known

    def __len__(self) -> int:
        return len(self._entries)


_memory = _ByIdentity()
_static: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
_lock = ForkSafeLock()


def lowered(mask: Any, q: Tensor, k: Tensor) -> Prepared | None:
    """The mask lowered for a call with the default indices, from memory where it was lowered before.

    Values decide for arrays on the host: a copy of them is kept. For tensors on a device, their version
    counters do, which writes through ``.data`` do not advance.

    Args:
        mask: What `attention` was given. One that was prepared in NumPy is converted, once.
        q: Shape (B, H, Sq, D), a plain tensor.
        k: Shape (B, Hkv, Sk, D), likewise.

    Returns:
        The lowered mask, or None for one that cannot be remembered (a function, a subclass of tensors), or is
        wrong, which the general way reports.

    Example:
        >>> from attnspan import causal, segments
        >>> mask, q = causal() & segments(torch.tensor([0, 0, 1])), torch.ones(1, 1, 3, 8)
        >>> lowered(mask, q, q) is lowered(mask, q, q)
        True
    """
    batch, heads, q_len, _ = q.shape
    sizes: tuple[int, ...] = (q_len, k.shape[2], batch, heads)
    if isinstance(mask, Mask) and (key := mask.static_key()) is not None:
        # Another stream might still read what this memory has let go.
        return _without_data(mask, ((q.device, stream_of(q)), key, *sizes[:2]))
    if isinstance(mask, Prepared):
        if type(mask.lowered.bounds) is not np.ndarray:
            return mask
        sizes = ()
    elif not isinstance(mask, Mask):
        return None
    known = _memory.get(mask)
    for one in known:
        if one.sizes == sizes and one.device == q.device and all(map(_unchanged, one.arrays, one.values)):
            return one.lowered
    try:
        found = _lower(mask, q, k, sizes)
    except (ValueError, TypeError, _UnknowableError):
        return None
    # Those whose arrays were written into are of no more use.
    others = [one for one in known if one.sizes != sizes or one.device != q.device] if known else []
    _memory.set(mask, [found, *others[: _MOST_SIZES - 1]])
    return found.lowered


def stream_of(q: Tensor) -> int:
    """Identity of CUDA's current stream."""
    return torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0


def _unchanged(x: Any, value: Any) -> bool:
    if value is _FIXED:
        return is_frozen(x)
    if isinstance(x, np.ndarray):  # bytes compare in a tenth of the time of np.array_equal
        return bool(x.shape == value[0] and x.dtype == value[1] and x.tobytes() == value[2])
    return x.dtype == value.dtype and torch.equal(x, value) if x.is_cpu else compat.version_of(x) == value


class _UnknowableError(Exception):
    """Values cannot tell whether a part of the mask has changed: a function, or an array of another kind."""


def _lower(mask: Mask, q: Tensor, k: Tensor, sizes: tuple[int, ...]) -> _Known:
    sources: dict[int, tuple[Any, Any]] = {}
    twin = _twin(mask, sources)
    arrays: list[Any] = []
    values: list[Any] = []
    for x, copy in sources.values():
        if isinstance(x, Tensor) and (x.device != q.device or (copy is None and x.is_inference())):
            raise _UnknowableError  # for the general way to refuse, or without a version counter
        arrays.append(x)
        if isinstance(x, Tensor):
            values.append(compat.version_of(x) if copy is None else torch.from_numpy(copy))
        elif is_frozen(x):
            values.append(_FIXED)
        else:
            values.append((copy.shape, copy.dtype, copy.tobytes()))
    if isinstance(twin, Prepared):
        spans = twin.lowered
        found = _as_tensors(q.device, spans.bounds, spans.k_len, twin.q_index, twin.k_index, twin.bare)
    elif q.is_cpu:
        found = _by_numpy(twin, sizes)
    else:
        found = lower_mask(mask, q, k, Given(), like=q)
    return _Known(sizes, q.device, found, arrays, values)


def _twin(x: Any, sources: dict[int, tuple[Any, Any]]) -> Any:
    """An expression, or a part of one, with NumPy copies of its arrays; gathers each array and its copy.

    The copies are what is lowered: another thread may write into the arrays meanwhile. A tensor on a device
    has None for a copy. An array that stands in two places stays one, as it must: the lowering knows arrays
    by identity.
    """
    if type(x) in _STATIC:
        return x
    if type(x) is tuple:
        return tuple([_twin(part, sources) for part in x])
    if type(x) is Tensor or type(x) is np.ndarray:
        if id(x) not in sources:
            host: Any = x if isinstance(x, np.ndarray) else stored(x).numpy() if x.is_cpu else None
            sources[id(x)] = x, None if host is None else np.array(host)
        return sources[id(x)][1]
    # A mask of a class of the user is lowered as it is, anew in each call: it may want tensors, or read
    # what is no field of it.
    if type(x) not in library_classes:
        raise _UnknowableError
    twin = object.__new__(type(x))
    for field in fields(x):  # type: ignore[arg-type]
        value = getattr(x, field.name)
        vars(twin)[field.name] = value if type(value) in _STATIC else _twin(value, sources)
    return twin


def _by_numpy(mask: Mask, sizes: tuple[int, ...], device: Any = "cpu") -> Prepared:
    low = begin(NUMPY, mask.leaves(), *sizes)
    bounds = low.bounds(mask)
    if bounds.shape[3] > 1:
        bounds = Spans._checked(bounds, low.top).compact().bounds
    return _as_tensors(device, bounds, low.top, None if low.counted_back else low.q_index[:, 0])


def _as_tensors(
    device: Any, bounds: Any, k_len: int, rows: Any, keys: Any = None, bare: bool = False
) -> Prepared:
    """A mask of NumPy's arrays as one of tensors on a device."""
    with torch.inference_mode(False):  # Autograd could not save a tensor of that mode.
        spans = Spans._checked(torch.from_numpy(bounds).to(device), k_len)
        rows = rows if rows is None else torch.tensor(rows, device=device)
        keys = keys if keys is None else torch.tensor(keys, device=device)
        return Prepared(spans, rows, keys, bare)


def _without_data(mask: Mask, key: tuple[Any, ...]) -> Prepared | None:
    try:
        _static.move_to_end(key)  # each method of the dictionary is atomic: no lock
        return _static[key]
    except KeyError:  # not there, or just evicted by another thread
        pass
    try:
        found = _by_numpy(mask, (*key[2:], 1, 1), key[0][0])
    except (ValueError, TypeError):
        return None
    with _lock.held():
        _static[key] = found
        while len(_static) > _MOST_STATIC:
            _static.popitem(last=False)
    return found
