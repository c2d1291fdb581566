"""Masks lowered once: what layers share that are given one mask, or masks without data that mean the same.

Lowering is arithmetic on small arrays. On the CPU NumPy does it, whose calls cost a fraction of torch's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import stored
from attnspan.call import lower_mask
from attnspan.call.options import Given
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans
from attnspan.masks.memory import Memory, UnknowableError, by_numpy

from . import compat
from ._watched import is_transformed


class _Memory(Memory):
    """Compares CPU tensors with a copy, and other tensors by their version counter, without synchronizing."""

    def evidence(self, x: Any) -> tuple[Any, Any]:
        if type(x) is not Tensor:
            raise UnknowableError
        if x.is_cpu:
            copy = np.array(stored(x).numpy())
            return partial(_equal, ref(x), torch.from_numpy(copy)), copy
        if x.is_inference():  # it has no version counter
            raise UnknowableError
        return partial(_is_unwritten, ref(x), compat.version_of(x)), None


# What is remembered keeps no tensor alive: a mask keeps its tensors, and a tensor may be the key itself.
def _equal(of: "ref[Tensor]", copy: Tensor) -> bool:
    x = of()
    return x is not None and x.is_cpu and x.dtype == copy.dtype and torch.equal(x, copy)


def _is_unwritten(of: "ref[Tensor]", version: int) -> bool:
    x = of()
    return x is not None and compat.version_of(x) == version


# Masks without arrays are lowered on the host and copied once. A device would launch many kernels per call.
_memory = _Memory()


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
    k_len = k.shape[2]
    if isinstance(mask, Mask) and (key := mask.static_key()) is not None:
        # Another stream might still read what this memory has let go.
        where = (q.device, stream_of(q))
        return _memory.without_arrays(
            (where, key, q_len, k_len),
            lambda: _as_tensors(q.device, *by_numpy(mask, q_len, k_len, 1, 1)),
        )
    place: tuple[Any, ...] = (q_len, k_len, batch, heads, q.device)
    if isinstance(mask, Prepared):
        if type(mask.lowered.bounds) is not np.ndarray:
            return mask
        place = (q.device,)
    elif not isinstance(mask, Mask):
        return None
    return _memory.lowered(mask, place, partial(_lower, mask, q, k))


def lowered_from(x: Any, place: Any, make: Callable[[Any], Prepared]) -> Prepared:
    """Result of a function of a tensor, remembered as long as the tensor lives and is unchanged.

    Args:
        x: The tensor, from which each layer makes a mask.
        place: The sizes, the device and the options that the function depends on.
        make: Function of the tensor, or of a copy that no other thread changes.
    """
    if is_transformed():
        return make(x)
    found = _memory.lowered(x, place, lambda twin, _: make(x if twin is None else torch.from_numpy(twin)))
    return make(x) if found is None else found


def stream_of(q: Tensor) -> int:
    """Identity of CUDA's current stream."""
    return torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0


def _lower(mask: Mask, q: Tensor, k: Tensor, twin: Any, arrays: tuple[Any, ...]) -> Prepared:
    if [x for x in arrays if isinstance(x, Tensor) and x.device != q.device]:
        raise UnknowableError  # The ordinary path raises the error.
    if isinstance(twin, Prepared):
        spans = twin.lowered
        return _as_tensors(q.device, spans.bounds, spans.k_len, twin.q_index, twin.k_index, twin.bare)
    if not q.is_cpu:
        return lower_mask(mask, q, k, Given(), like=q)
    return _as_tensors(q.device, *by_numpy(twin, q.shape[2], k.shape[2], q.shape[0], q.shape[1]))


def _as_tensors(
    device: Any, bounds: Any, k_len: int, rows: Any, keys: Any = None, bare: bool = False
) -> Prepared:
    """Return a mask that was lowered by NumPy as a mask of tensors on a device."""
    with torch.inference_mode(False):  # Autograd could not save a tensor of that mode.
        spans = Spans._checked(torch.from_numpy(bounds).to(device), k_len)
        rows = rows if rows is None else torch.tensor(rows, device=device)
        keys = keys if keys is None else torch.tensor(keys, device=device)
        return Prepared(spans, rows, keys, bare)
