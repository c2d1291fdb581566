"""Exchange of rows between ranks: subgroups, collectives, kept buffers.

Every exchange is an all-to-all with uneven parts on the subgroup that talks: a step of a ring is one whose
parts but one are empty. So there is one kind of collective, in the same order on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from .agreement import Agreement, agreement_of, raise_broken
from .groups import group_of, named_part

__all__ = ["Counts", "Pending", "Ranks", "Scratch", "counted_bytes", "exchange"]

#: On the CPU fresh pages cost more than what is written to them: buffers from this size on are kept for the
#: next call, unless those of one call exceed the second figure.
_WORTH_KEEPING, _MOST_KEPT = 1 << 20, 1 << 29


@dataclass
class Counts:
    """Bytes that this rank exchanged with others by phase, such as "exchange" or "gradients"."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


_watching: list[Counts] = []


@contextmanager
def counted_bytes() -> Iterator[Counts]:
    """Count the bytes of all exchanges until the block ends.

    Example:
        >>> with counted_bytes() as counts:
        ...     pass
        >>> sum(counts.sent.values())
        0
    """
    counts = Counts()
    _watching.append(counts)
    try:
        yield counts
    finally:
        _watching[:] = [x for x in _watching if x is not counts]


class Pending:
    """Result of an exchange under way; its buffers live as long as it does."""

    def __init__(self, received: Any, sent: Any = None, work: Any = None, group: Any = None, phase: str = ""):
        self._received, self._sent, self._work = received, sent, work
        self._group, self._phase = group, phase
        self._change: Callable[[Any], Any] = lambda received: received

    def then(self, change: Callable[[Any], Any]) -> Pending:
        """The same, changed once it is there."""
        self._change = change
        return self

    def wait(self) -> Any:
        """The received rows, once they are there, or what they were to be changed to.

        Raises:
            CommunicationError: A rank did not answer.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise_broken(self._group, self._phase, error)
            # The rows that were sent are no longer needed.
            self._work = self._sent = None
        return self._change(self._received)


def exchange(
    send: Tensor, send_rows: Sequence[int], rows: Sequence[int], group: Any, phase: str, received: Tensor
) -> Pending:
    """Start to send rows to the ranks of a group, and to receive theirs.

    Args:
        send: Shape (sum of send_rows, ...), contiguous: the rows for rank 0, for rank 1, ...
        send_rows: How many go to each rank.
        rows: How many come from each rank.
        group: The process group.
        phase: Under which name bytes are counted.
        received: Where they go, shape (sum of rows, ...), contiguous.

    Raises:
        CommunicationError: The group is broken.
    """
    width = send[:1].numel() if send.shape[0] else received[:1].numel()
    size, me = width * send.element_size(), group.rank()
    for counts in _watching:
        counts.sent[phase] += (sum(send_rows) - send_rows[me]) * size
        counts.received[phase] += (sum(rows) - rows[me]) * size
    sizes = [n * size for n in rows], [n * size for n in send_rows]
    try:
        # As bytes: not every engine knows every dtype.
        work = dist.all_to_all_single(_bytes(received), _bytes(send), *sizes, group=group, async_op=True)
    except RuntimeError as error:
        raise_broken(group, phase, error)
    return Pending(received, send, work, group, phase)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


class Scratch:
    """Buffers of one call by name, kept for the next call of the same ranks.

    Devices have an allocator that does so.

    A name may be used again in a call once nothing reads or writes what it stood for.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def new(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised, contiguous tensor on the device of ``like``, in its dtype or another one."""
        dtype = like.dtype if dtype is None else dtype
        size = math.prod(shape) * dtype.itemsize
        if like.device.type != "cpu" or size < _WORTH_KEEPING:
            return torch.empty(tuple(shape), dtype=dtype, device=like.device)
        buffer = self._kept.get(name)
        if buffer is None or buffer.numel() < size:
            # An inference tensor could not be written to by a later call outside of that mode.
            with torch.inference_mode(False):
                buffer = self._kept[name] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype).view(tuple(shape))

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(x.numel() for x in self._kept.values())


def _group_named(at: int) -> Any:
    return property(lambda ranks: _resolve_process_group(ranks._names[at]))


class Ranks:
    """The process groups of a mesh under a strategy of u members, and what is kept for them.

    It refers to groups by name: whoever destroys a process group may do so while plans are alive.

    Attributes:
        agreement: Of all ranks.
    """

    def __init__(self, whole: Any, members: Any, peers: Any, agreement: Agreement) -> None:
        self._is_of, self.agreement = weakref.ref(whole), agreement
        self._names = [group.group_name for group in (whole, members, peers)]
        self._free: list[Scratch] = []

    # All ranks; those that share heads, rank p // u * u and those after it; one of each group.
    whole, members, peers = (_group_named(at) for at in range(3))

    @classmethod
    def of(cls, mesh: DeviceMesh, members: int) -> Ranks:
        """The groups of a mesh; the first call makes them, on all ranks together."""
        whole = group_of(mesh)
        known = _known.get(key := (whole.group_name, members))
        if known is not None and known._is_of() is whole:
            return known
        ranks, rank = dist.get_process_group_ranks(whole), whole.rank()
        if mesh.ndim == 2 and mesh.size(1) == members:
            inner, outer = (group_of(mesh[name]) for name in reversed(mesh.mesh_dim_names or ()))
        else:
            first = rank // members * members
            inner = _subgroup(whole, ranks[first : first + members], mesh.device_type)
            outer = _subgroup(whole, ranks[rank % members :: members], mesh.device_type)
        for name, u in list(_known):
            of = _known[name, u]._is_of()
            if of is None or (name == whole.group_name and of is not whole):
                del _known[name, u]  # With its buffers.
        agreement = agreement_of(whole)
        agreement.groups |= {inner.group_name, outer.group_name}
        _known[key] = cls(whole, inner, outer, agreement)
        return _known[key]

    @classmethod
    def named(cls, group: str, members: int) -> Ranks:
        """The groups that `of` made, for an operator, which knows the name of all ranks' group."""
        return _known[group, members]

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Buffers of one call. After an error nobody else gets them: an exchange may still be writing."""
        scratch = self._free.pop() if self._free else Scratch()
        yield scratch
        if scratch.size <= _MOST_KEPT:
            self._free.append(scratch)


_known: dict[tuple[str, int], Ranks] = {}


def _subgroup(whole: Any, ranks: Sequence[int], device: str) -> Any:
    if len(ranks) == whole.size():
        return whole
    timeout = getattr(whole._get_backend(torch.device(device)).options, "_timeout", None)
    part = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return named_part(part, whole)
