"""Masks lowered once: what layers share that are given one mask, or masks without data that mean the same.

Lowering is arithmetic on small arrays. On the CPU NumPy does it, whose calls cost a fraction of torch's.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .._pytrees import static_key
from ..arrays import NUMPY
from ..call import lower_mask
from ..expression import And, Combined, Mask, Or, Prepared
from ..lowering import begin
from ..masks import causal, full, global_keys, window
from ..options import Given
from ..spans import Spans

_STATIC = (bool, int, str, type(None))
# Sizes for which one mask is remembered: kinds of layers, prefill and decoding.
_MOST_SIZES = 4
# Masks without arrays, of few spans: bounds take 8 bytes for a row and span, 16 masks of 65,536 rows 8 MiB.
_WITHOUT_DATA = frozenset({And, Or, causal, full, global_keys, window})
_MOST_STATIC = 16


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    """One lowering, and what the mask's arrays held then."""

    sizes: tuple[int, ...]
    device: torch.device
    lowered: Prepared
    tensors: list[Tensor] = field(default_factory=list)
    tensor_values: list[Any] = field(default_factory=list)  # copies on the host, version counters elsewhere
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    array_values: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def holds(self, sizes: tuple[int, ...], device: torch.device) -> bool:
        """Whether this is the lowering for these sizes, and nobody has written into the arrays since."""
        return (
            self.sizes == sizes
            and self.device == device
            and all(map(_unchanged, self.tensors, self.tensor_values))
            and all(map(np.array_equal, self.arrays, self.array_values))
        )


_memory: WeakKeyDictionary[Mask, list[_Known]] = WeakKeyDictionary()
_static: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
_lock = Lock()


def lowered(mask: Any, q: Tensor, k: Tensor) -> Prepared | None:
    """The mask lowered for a call with the default indices, from memory where it was lowered before.

    Values decide for arrays on the host: a copy of them is kept. For tensors on a device, their version
    counters do, which writes through ``.data`` do not advance.

    Args:
        mask: What `attention` was given.
        q: Shape (B, H, Sq, D), a plain tensor.
        k: Shape (B, Hkv, Sk, D), likewise.

    Returns:
        The lowered mask, or None for one that cannot be remembered (a function, a subclass of tensors), is
        lowered already, or is wrong, which the general way reports.

    Example:
        >>> from attnspan import causal, segments
        >>> mask, q = causal() & segments(torch.tensor([0, 0, 1])), torch.ones(1, 1, 3, 8)
        >>> lowered(mask, q, q) is lowered(mask, q, q)
        True
    """
    sizes = q.shape[2], k.shape[2], q.shape[0], q.shape[1]
    known = _memory.get(mask) if isinstance(mask, Mask) else None
    if known is None:
        if (key := static_key(mask, _WITHOUT_DATA)) is not None:
            return _without_data(mask, (key, *sizes[:2])) if q.is_cpu else None
        return _remember(mask, q, k, sizes, [])
    for one in known:
        if one.holds(sizes, q.device):
            return one.lowered
    return _remember(mask, q, k, sizes, known)


def as_tensors(mask: Prepared, device: torch.device) -> Prepared:
    """A mask that was prepared in NumPy, for calls on a device: converted once.

    Example:
        >>> from attnspan import causal
        >>> mask = causal().prepare(3, 3)
        >>> as_tensors(mask, torch.device("cpu")).lowered.bounds.dtype
        torch.int32
    """
    known = _memory.get(mask, [])
    for one in known:
        if one.holds((), device):
            return one.lowered
    arrays = [x for x in (mask.lowered.bounds, mask.q_index, mask.k_index) if x is not None]
    # Tensors are made of the copies: another thread may write into the arrays meanwhile.
    copies = [np.array(x) for x in arrays]
    with torch.inference_mode(False):
        found = {id(x): torch.tensor(copy, device=device) for x, copy in zip(arrays, copies, strict=True)}
        spans = Spans._checked(found[id(mask.lowered.bounds)], mask.lowered.k_len)
        q_index, k_index = found.get(id(mask.q_index)), found.get(id(mask.k_index))
        lowered = Prepared(spans, q_index, k_index, mask.bare)
    others = [x for x in known if x.device != device]
    _memory[mask] = [_Known((), device, lowered, arrays=arrays, array_values=copies), *others]
    return lowered


def _unchanged(x: Tensor, value: Any) -> bool:
    return torch.equal(x, value) if x.is_cpu else x._version == value


class _UnknowableError(Exception):
    """Values cannot tell whether a part of the mask has changed: a function, or an array of another kind."""


def _remember(
    mask: Any, q: Tensor, k: Tensor, sizes: tuple[int, ...], known: list[_Known]
) -> Prepared | None:
    sources: dict[int, tuple[Any, Any]] = {}
    leaves: list[Mask] = []
    try:
        twin = _twin(mask, sources, leaves)
    except _UnknowableError:
        return None
    tensors, tensor_values, arrays, array_values = [], [], [], []
    host = q.is_cpu
    for x, copy in sources.values():
        host = host and copy is not None
        if isinstance(x, np.ndarray):
            arrays.append(x)
            array_values.append(copy)
        elif x.device != q.device or (x.is_inference() and copy is None):
            return None  # for the general way to refuse, or without a version counter
        else:
            tensors.append(x)
            tensor_values.append(x._version if copy is None else torch.from_numpy(copy))
    try:
        found = _by_numpy(twin, leaves, sizes) if host else lower_mask(mask, q, k, Given(), like=q)
    except (ValueError, TypeError):
        return None
    entry = _Known(sizes, q.device, found, tensors, tensor_values, arrays, array_values)
    # Those whose arrays were written into are of no more use.
    others = [x for x in known if x.sizes != sizes or x.device != q.device] if known else ()
    _memory[mask] = [entry, *others[: _MOST_SIZES - 1]]
    return found


def _twin(mask: Any, sources: dict[int, tuple[Any, Any]], leaves: list[Mask] | None) -> Any:
    """The expression with NumPy copies of its arrays. Gathers its leaves, and by id each array and its copy.

    The copies are what is lowered: another thread may write into the arrays meanwhile. A tensor on a device
    has None for a copy. An array that stands in two places stays one, as it must: the lowering knows arrays
    by identity.
    """
    if not isinstance(mask, Mask) or isinstance(mask, Prepared):
        raise _UnknowableError
    twin = object.__new__(type(mask))
    if not isinstance(mask, Combined):
        if leaves is not None:
            leaves.append(twin)
        leaves = None  # what a leaf holds is its own affair
    for name, x in vars(mask).items():
        if type(x) is Tensor or type(x) is np.ndarray:
            if id(x) not in sources:
                host = x if isinstance(x, np.ndarray) else x.numpy() if x.is_cpu else None
                sources[id(x)] = x, None if host is None else np.array(host)
            x = sources[id(x)][1]
        elif isinstance(x, Mask):
            x = _twin(x, sources, leaves)
        elif type(x) is tuple:
            parts = []
            for part in x:
                parts.append(part if type(part) in _STATIC else _twin(part, sources, leaves))  # noqa: PERF401  (a frame less)
            x = tuple(parts)
        elif type(x) not in _STATIC:
            raise _UnknowableError
        vars(twin)[name] = x
    return twin


def _by_numpy(mask: Mask, leaves: list[Mask], sizes: tuple[int, ...]) -> Prepared:
    low = begin(NUMPY, leaves, *sizes)
    bounds = low.bounds(mask)
    if bounds.shape[3] > 1:
        bounds = Spans._checked(bounds, low.top).compact().bounds
    with torch.inference_mode(False):  # Autograd could not save a tensor of that mode.
        q_index = None if low.counted_back else torch.from_numpy(np.array(low.q_index[:, 0]))
        return Prepared(Spans._checked(torch.from_numpy(bounds), low.top), q_index)


def _without_data(mask: Mask, key: tuple[Any, ...]) -> Prepared | None:
    with _lock:
        found = _static.get(key)
        if found is not None:
            _static.move_to_end(key)
            return found
    try:
        found = _by_numpy(mask, mask._leaves(), (*key[1:], 1, 1))
    except (ValueError, TypeError):
        return None
    with _lock:
        _static[key] = found
        while len(_static) > _MOST_STATIC:
            _static.popitem(last=False)
    return found
