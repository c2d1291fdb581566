"""Buffers of a call, kept for the next one: on the CPU, fresh pages cost more than what is written to them.

Devices have an allocator that keeps memory itself; there, and for small buffers, this is that allocator.
"""

import math
import threading
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

#: Bytes that a process keeps at most, and from which on a buffer is worth keeping.
MOST_KEPT = 1 << 29
LEAST_KEPT = 1 << 20

_free: list[Tensor] = []  # the latest one last
_lock = threading.Lock()


class Workspace:
    """The buffers of one call; when it ends well, they are free for others.

    Example:
        >>> with Workspace() as workspace:
        ...     workspace.new((2, 3), torch.zeros(1)).shape
        torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self._taken: dict[int, Tensor] = {}

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error an exchange may still be writing: then nobody else may have its buffers.
        if kind is None:
            _keep(list(self._taken.values()))
        self._taken.clear()

    def new(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised, contiguous tensor on the device of ``like``, in its dtype or another one."""
        dtype = like.dtype if dtype is None else dtype
        size = math.prod(shape) * dtype.itemsize
        if like.device.type != "cpu" or size < LEAST_KEPT:
            return torch.empty(tuple(shape), dtype=dtype, device=like.device)
        buffer = _take(size)
        self._taken[buffer.data_ptr()] = buffer
        return buffer[:size].view(dtype).view(tuple(shape))

    def give(self, x: Tensor) -> None:
        """Say that a tensor of `new`, or one that begins where it does, is no longer used."""
        buffer = self._taken.pop(x.data_ptr(), None)
        if buffer is not None:
            _keep([buffer])


def _take(size: int) -> Tensor:
    with _lock:
        fitting = [x for x in _free if size <= x.numel() <= 2 * size]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            _free[:] = [x for x in _free if x is not best]
            return best
    # An inference tensor could not be written to by a later call outside of that mode.
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8)


def _keep(buffers: list[Tensor]) -> None:
    with _lock:
        _free.extend(buffers)
        total = sum(x.numel() for x in _free)
        while total > MOST_KEPT:
            total -= _free.pop(0).numel()
