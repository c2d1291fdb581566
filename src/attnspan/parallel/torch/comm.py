"""Exchange of rows between ranks, and comparison of what they do: subgroups, collectives, kept buffers.

Every exchange is an all-to-all with uneven parts on the subgroup that talks: a step of a ring is one whose
parts but one are empty. So there is one kind of collective, in the same order on all ranks.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from attnspan.errors import DtypeError, expect
from attnspan.parallel.errors import CommunicationError, PlanMismatchError

__all__ = [
    "Agreement",
    "Counts",
    "Pending",
    "Ranks",
    "Scratch",
    "compare",
    "counted_bytes",
    "exchange",
    "group_of",
    "moved",
    "raise_broken",
]

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


def raise_broken(group: Any, phase: str, error: Exception) -> NoReturn:
    """Say which exchange failed, and what to do.

    Raises:
        PlanMismatchError: The ranks have different plans.
        CommunicationError: Otherwise.
    """
    for known in _known.values():
        if group.group_name in known._names:
            known.agreement.settle()
    raise CommunicationError(
        f"context parallelism, {phase}, rank {group.rank()} of {group.size()} ({group.group_name})",
        expected="an answer from every rank",
        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        remedy="A rank has died, hangs or runs another program: look at the first one that failed, and "
        "resume from a checkpoint",
    ) from error


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


class _Check(NamedTuple):
    """A comparison under way: names of facts, those of all ranks, what to wait for, calls before it."""

    names: list[str]
    found: Tensor
    done: Any
    calls: int


def compare(group: Any, what: str, facts: Mapping[str, object]) -> None:
    """Raise, on all ranks, unless they have the same facts; only where the host waits anyway.

    Under gloo sizes that do not meet end the process, with no word of which. Other engines would make the
    host wait for the device here.

    Raises:
        PlanMismatchError: The ranks differ; it names them and what differs.
        CommunicationError: A rank did not answer.
    """
    if group.size() == 1 or not _is_driven_by_host(group):
        return
    mine = torch.tensor([zlib.crc32(repr(x).encode()) for x in facts.values()])
    every = mine.new_empty((group.size(), len(facts)))
    try:
        dist.all_gather(list(every.unbind()), mine, group=group)
    except RuntimeError as error:
        raise_broken(group, f"comparison of {what}", error)
    for name, rows in zip(facts, every.T.tolist(), strict=True):
        _expect_alike(group.size(), group.group_name, name, rows)


def _is_driven_by_host(group: Any) -> bool:
    return "gloo" in str(dist.get_backend(group))


def _expect_alike(ranks: int, group: str, name: str, rows: list[int]) -> None:
    odd = [str(rank) for rank, value in enumerate(rows) if value != rows[0]]
    wanted, plural = f"the same {name} on every rank", "s"[: len(odd) - 1]
    got = f"another one on rank{plural} {', '.join(odd)} than on rank 0"
    what, remedy = f"context parallelism on {ranks} ranks ({group})", _REMEDY.get(name, _SAME_MASK)
    expect(not odd, what, wanted, got, remedy, error=PlanMismatchError)


class Agreement:
    """Whether all ranks of a group have the same plans and make the same calls, asked one step late.

    Each plan starts an all-gather of its fingerprints when it is put on the mesh. The answer is read when a
    later step's plans come; where the host drives the collectives anyway (gloo), before the first exchange,
    and there each call is compared before its first exchange.

    Attributes:
        compares: Whether the last plan that was put on the mesh is compared, and the calls after it.
        early: Whether answers are read before the first exchange.
    """

    compares = False

    def __init__(self, group: Any) -> None:
        self._name, self._ranks = group.group_name, group.size()
        self._pending: list[_Check] = []
        self._calls = self._count = 0
        self.early = _is_driven_by_host(group)

    def start(self, facts: Mapping[str, int], device: str) -> None:
        """Compare facts of a plan, and the calls since the last plan.

        Raises:
            PlanMismatchError: An earlier step's plans or calls differed; on all ranks.
        """
        if any(check.calls < self._count for check in self._pending):
            self.settle()
        if self._ranks == 1:
            return
        group = _resolve_process_group(self._name)
        facts = {**facts, "sequence of calls": self._calls}
        mine = moved(np.array(list(facts.values())), device)
        every = mine.new_empty((self._ranks, len(facts)))
        try:
            work = dist.all_gather(list(every.unbind()), mine, group=group, async_op=True)
        except RuntimeError as error:
            raise_broken(group, "comparison of plans", error)
        found, done = _brought_home(every, work) if every.is_cuda else (every, work.wait)
        self._pending.append(_Check(list(facts), found, done, self._count))

    def note(self, facts: Mapping[str, object]) -> None:
        """Remember a call, which the next comparison includes; compare now what costs little to compare.

        Raises:
            PlanMismatchError: The ranks' plans or calls differ.
        """
        self._calls = zlib.crc32(repr(facts).encode(), self._calls)
        self._count += 1
        if not self.early:
            return
        self.settle()
        if self.compares:
            try:
                compare(_resolve_process_group(self._name), "calls", facts)
            except PlanMismatchError:
                self._forget()
                raise

    def settle(self) -> None:
        """Read the answers.

        Raises:
            PlanMismatchError: The ranks differ.
        """
        pending, self._pending = self._pending, []
        for check in pending:
            try:
                check.done()
            except RuntimeError as error:
                raise_broken(_resolve_process_group(self._name), "comparison of plans", error)
            for name, rows in zip(check.names, check.found.T.tolist(), strict=True):
                try:
                    _expect_alike(self._ranks, self._name, name, rows)
                except PlanMismatchError:
                    self._forget()
                    raise

    def _forget(self) -> None:
        self._calls = self._count = 0  # On all ranks alike: whoever goes on begins anew.


def _brought_home(every: Tensor, work: Any) -> tuple[Tensor, Any]:
    """A tensor on the host, filled once what `work` stands for is done; nobody waits before it is read."""
    stream = torch.cuda.Stream(every.device)  # type: ignore[no-untyped-call]
    home = torch.empty_like(every, device="cpu", pin_memory=True)
    with torch.cuda.stream(stream):
        work.wait()
        home.copy_(every, non_blocking=True)
    every.record_stream(stream)
    return home, stream.record_event().synchronize


def moved(x: Any, device: str) -> Tensor:
    """A copy of an array of NumPy on a device; the host does not wait."""
    found = torch.from_numpy(x.copy())
    return found if device == "cpu" else found.pin_memory().to(device, non_blocking=True)


_SAME_MASK = "Give every rank the same mask, with global ids, and the same options"
_SAME_CALLS = (
    "Ranks hold parts of one problem: every rank makes the same calls, with the same sizes and options, in "
    "the same order"
)
_REMEDY = {
    **dict.fromkeys(
        ("sequence of calls", "call", "batch rows", "head dims", "dtype", "options", "shape"), _SAME_CALLS
    ),
    "backend": "Ranks differ in their devices or packages, so name one that all have: backend=",
    "layout": "Make it of the same mask, method and rows_per_chunk on every rank",
    "strategy and heads": "Pass the same strategy and heads, and for 'auto' the same machine, on every rank",
}


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
            inner, outer = mesh.get_group(1), mesh.get_group(0)
        else:
            first = rank // members * members
            inner = _subgroup(whole, ranks[first : first + members], mesh.device_type)
            outer = _subgroup(whole, ranks[rank % members :: members], mesh.device_type)
        for name, u in list(_known):
            of = _known[name, u]._is_of()
            if of is None or (name == whole.group_name and of is not whole):
                del _known[name, u]  # With its buffers.
        agreement = next((x.agreement for x in _known.values() if x._is_of() is whole), None)
        _known[key] = cls(whole, inner, outer, agreement or Agreement(whole))
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
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def group_of(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of a mesh of one dimension, or of two: nodes, and the ranks of a node.

    Raises:
        DtypeError: It is no DeviceMesh.
        OptionError: It has more dimensions, or two without names.
    """
    remedy = "Make one by torch.distributed.device_mesh.init_device_mesh"
    is_mesh = isinstance(mesh, DeviceMesh)
    expect(is_mesh, "mesh", "a DeviceMesh, such as mesh['cp']", type(mesh).__name__, remedy, error=DtypeError)
    remedy, wanted = "Call it on the ranks of the mesh alone", "this rank, {}, among its ranks"
    expect(mesh.get_coordinate() is not None, "mesh", wanted, repr(mesh), remedy, dist.get_rank())
    if mesh.ndim == 1:
        return mesh.get_group()
    wanted, remedy = (
        "one dimension, or two: nodes and the ranks of a node",
        "Take a part of it, as mesh['cp']",
    )
    expect(mesh.ndim == 2, "mesh", wanted, str(mesh.ndim), remedy)
    remedy = "Make it with mesh_dim_names=('inter', 'intra')"
    expect(mesh.mesh_dim_names is not None, "mesh of two dimensions", "names of both", repr(mesh), remedy)
    return mesh._flatten().get_group()
