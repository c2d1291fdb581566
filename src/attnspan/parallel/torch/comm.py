"""Exchange of rows between ranks: subgroups, collectives, reused buffers.

Every exchange is an all-to-all with uneven parts on the subgroup that communicates. In a step of a ring, all
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

from attnspan.torch import compat

from .agreement import Agreement, agreement_of, answered
from .groups import group_of, named_part

#: On the CPU, allocating fresh memory pages costs more than writing to them. Buffers of at least the first
#: size are kept for the next call, unless the buffers of one call exceed the second size.
_WORTH_KEEPING, _MOST_KEPT = 1 << 20, 1 << 29


@dataclass
class Counts:
    """Bytes that this rank exchanged with other ranks, by phase, such as "exchange" or "gradients"."""

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
    """Result of an exchange that is under way. It keeps the buffers alive."""

    def __init__(self, received: Any, sent: Any = None, work: Any = None, group: Any = None, phase: str = ""):
        self._received, self._sent, self._work = received, sent, work
        self._group, self._phase = group, phase
        self._change: Callable[[Any], Any] = lambda received: received

    def then(self, change: Callable[[Any], Any]) -> Pending:
        """Apply `change` to the result once it has arrived."""
        self._change = change
        return self

    def wait(self) -> Any:
        """Wait for the received rows, and return them, changed as `then` asked.

        Raises:
            CommunicationError: A rank did not answer.
        """
        if self._work is not None:
            with answered(self._group, self._phase):
                self._work.wait()
            # Frees the rows that were sent.
            self._work = self._sent = None
        return self._change(self._received)


def exchange(
    send: Tensor, send_rows: Sequence[int], rows: Sequence[int], group: Any, phase: str, received: Tensor
) -> Pending:
    """Start to send rows to the ranks of a group, and to receive their rows.

    Args:
        send: Shape (sum of send_rows, ...), contiguous: the rows for rank 0, for rank 1, and so on.
        send_rows: Number of rows for each rank.
        rows: Number of rows from each rank.
        group: The process group.
        phase: Name under which the bytes are counted.
        received: Buffer for the received rows, shape (sum of rows, ...), contiguous.

    Raises:
        CommunicationError: The group is broken.
    """
    width = send[:1].numel() if send.shape[0] else received[:1].numel()
    size, me = width * send.element_size(), group.rank()
    for counts in _watching:
        counts.sent[phase] += (sum(send_rows) - send_rows[me]) * size
        counts.received[phase] += (sum(rows) - rows[me]) * size
    sizes = [n * size for n in rows], [n * size for n in send_rows]
    with answered(group, phase):
        # As bytes, because not every engine supports every dtype.
        work = dist.all_to_all_single(_bytes(received), _bytes(send), *sizes, group=group, async_op=True)
    return Pending(received, send, work, group, phase)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


class Scratch:
    """Named buffers of one call, kept for the next call of the same ranks.

    Buffers on devices are not kept, because torch's allocator does that. A call may use a name again once
    nothing reads or writes its buffer any more.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def new(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised, contiguous tensor on the device of ``like``, by default in its dtype."""
        dtype = like.dtype if dtype is None else dtype
        size = math.prod(shape) * dtype.itemsize
        if like.device.type != "cpu" or size < _WORTH_KEEPING:
            return torch.empty(tuple(shape), dtype=dtype, device=like.device)
        buffer = self._kept.get(name)
        if buffer is None or buffer.numel() < size:
            # A later call outside of inference mode could not write to an inference tensor.
            with torch.inference_mode(False):
                buffer = self._kept[name] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype).view(tuple(shape))

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(x.numel() for x in self._kept.values())


def _group_named(at: int) -> Any:
    return property(lambda ranks: compat.resolve_process_group(ranks._names[at]))


class Ranks:
    """Process groups of a mesh under a strategy of u members, with their buffers.

    Groups are stored as names, so that you can destroy a process group while plans are alive.

    Attributes:
        agreement: Comparison of plans and calls of all ranks.
    """

    def __init__(self, whole: Any, members: Any, peers: Any, agreement: Agreement) -> None:
        self._is_of, self.agreement = weakref.ref(whole), agreement
        self._names = [group.group_name for group in (whole, members, peers)]
        self._free: list[Scratch] = []

    # All ranks, the members of this rank's group, and this rank's peers in all groups.
    whole, members, peers = (_group_named(at) for at in range(3))

    @classmethod
    def of(cls, mesh: DeviceMesh, members: int) -> Ranks:
        """Return the groups of a mesh. The first call makes them, on all ranks together."""
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
                del _known[name, u]  # frees its buffers
        agreement = agreement_of(whole)
        agreement.groups |= {inner.group_name, outer.group_name}
        _known[key] = cls(whole, inner, outer, agreement)
        return _known[key]

    @classmethod
    def named(cls, group: str, members: int) -> Ranks:
        """Return groups that `of` made, by the name of the group of all ranks, which operators know."""
        return _known[group, members]

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Buffers of one call. After an error they are not reused, because an exchange may still write."""
        scratch = self._free.pop() if self._free else Scratch()
        yield scratch
        if scratch.size <= _MOST_KEPT:
            self._free.append(scratch)


_known: dict[tuple[str, int], Ranks] = {}


def _subgroup(whole: Any, ranks: Sequence[int], device: str) -> Any:
    if len(ranks) == whole.size():
        return whole
    timeout = compat.timeout_of(whole, torch.device(device))
    part = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return named_part(part, whole)
