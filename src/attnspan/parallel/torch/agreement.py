"""Comparison of plans, calls and options between the ranks of a group, by small all-gathers.

Every comparison is a message of the same size. Ranks at different places of a program can therefore detect
this, whereas messages of different sizes would make gloo end the process.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attnspan.call.schema import OPTIONS, Array
from attnspan.parallel.errors import CommunicationError, PlanMismatchError
from attnspan.torch import compat

from .groups import announce, shown_group, silence_of

_SAME_MASK = "Give every rank the same mask, with global ids, and the same options"
_SAME_CALLS = "Make the same calls on every rank, with the same sizes and options, in the same order"
_SAME_VALUES = (
    "Pass the values of all heads of q, bit-identical on every rank of the group: broadcast them once, and "
    "sum the gradients of parameters over ranks"
)
_SAME_SEED = "Draw one seed and broadcast it, or draw it from generators with the same seed on all ranks"
_SAME_PLAN = "Pass the plan that plan.on(mesh, rows=rows) returned at this step"
_SAME_LAYOUT = "Make it from the same mask, method and rows_per_chunk on every rank"
#: Compared facts and their remedies, in the order of the numbers of a message.
_REMEDIES = {
    "step of the program": "Call plan.on(...), attention and sums in the same order on every rank",
    "mask": _SAME_MASK,
    "layout": _SAME_LAYOUT,
    "layout of the keys": _SAME_LAYOUT,
    "strategy and heads": "Pass the same strategy and heads, and for 'auto' the same machine, on every rank",
    "call": _SAME_CALLS,
    "plan of the call": _SAME_PLAN,
    "batch size": _SAME_CALLS,
    "head dims": _SAME_CALLS,
    "shape": _SAME_CALLS,
    "dtype": _SAME_CALLS,
    "backend": "Ranks have different devices or packages, so pass a backend= that all of them have",
    "layout of the rows": _SAME_LAYOUT,
    "scale": _SAME_CALLS,
    **{row.name: _SAME_VALUES if isinstance(row, Array) else _SAME_CALLS for row in OPTIONS},
    "dropout_seed": _SAME_SEED,
    "mask of the cache": _SAME_MASK,
    "order of batch elements": "Choose the rows once and broadcast them",
}
_PLACES = {name: at for at, name in enumerate(_REMEDIES)}
#: Kinds of messages, which are the first numbers of messages.
_OF_A_PLAN, _OF_A_CALL = 1, 2
#: Named facts of a call, and named tensors whose values must be the same.
Facts = Mapping[str, object]
Values = Mapping[str, Sequence[Tensor]]


class _Check(NamedTuple):
    """Comparison under way: its name, the numbers of all ranks, a function that waits, calls before it."""

    what: str
    found: Tensor
    done: Any
    calls: int


class Agreement:
    """Comparison of the plans and calls of all ranks of a group, whose answers are read one step late.

    When a plan is put on the mesh, it starts an all-gather of its fingerprints, and of fingerprints of the
    calls before it. The answer is read when the next step's plan is put on the mesh. With gloo the host
    drives the collectives anyway. There the answer is read before the first exchange, and each call is
    compared before its first exchange.

    Attributes:
        compares: Whether calls are compared, which the last plan on the mesh decides.
        early: Whether answers are read before the first exchange.
        groups: Names of the group and of its subgroups that communicate.
    """

    def __init__(self, group: Any) -> None:
        self._is_of = weakref.ref(group)
        self._name, self._ranks = group.group_name, group.size()
        self._pending: list[_Check] = []
        self._forget()
        self.compares = True
        self.early = "gloo" in str(dist.get_backend(group))
        self.groups = {group.group_name}
        announce()

    def start(self, facts: Mapping[str, int], device: str) -> None:
        """Start to compare facts of a plan, and the calls since the last plan. The host does not wait.

        Raises:
            PlanMismatchError: Plans or calls of an earlier step differed. All ranks raise it.
        """
        if any(check.calls < self._count for check in self._pending):
            self.settle()
        if self._ranks == 1:
            return
        mine = moved(_message(_OF_A_PLAN, {**facts, **self._chains}), device)
        for name, x in self._on_device.items():
            mine[_PLACES[name]] += x
        self._pending.append(self._gather("comparison of plans", mine))

    def note(self, facts: Facts, values: Values | None = None) -> None:
        """Record a call for the next comparison. With gloo, compare it now.

        Values on the host join the facts. Values on a device are never read by the host. They are folded to
        numbers on the device, and travel with the numbers of the next plan.

        Raises:
            PlanMismatchError: The ranks' plans or calls differ.
        """
        if self._ranks == 1:
            return
        what = f"comparison of the calls: {facts['call']}"
        numbers = {name: zlib.crc32(repr(x).encode()) for name, x in facts.items()}
        for name, tensors in (values or {}).items() if self.compares else ():
            self._fold(name, tensors, numbers)
        for name, number in numbers.items():
            self._chains[name] = zlib.crc32(str(number).encode(), self._chains.get(name, 0))
        self._count += 1
        if not self.early:
            return
        self.settle()
        if self.compares:
            self._read(self._gather(what, torch.from_numpy(_message(_OF_A_CALL, numbers))))

    def _fold(self, name: str, tensors: Sequence[Tensor], numbers: dict[str, int]) -> None:
        """Add the values of tensors to the compared fact `name`."""
        for x in tensors:
            known = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode(), numbers.get(name, 0))
            if _on_host(x):
                numbers[name] = zlib.crc32(_bits(x, torch.uint8).numpy(), known)
            else:
                numbers[name] = known
                self._on_device[name] = self._on_device.get(name, 0) * _ODD + digest_of(x)

    def _gather(self, what: str, mine: Tensor) -> _Check:
        """Start to gather the numbers of all ranks."""
        group = compat.resolve_process_group(self._name)
        every = mine.new_empty((self._ranks, len(mine)))
        with answered(group, what):
            work = dist.all_gather(list(every.unbind()), mine, group=group, async_op=True)
        found, done = _brought_home(every, work) if every.is_cuda else (every, work.wait)
        return _Check(what, found, done, self._count)

    def settle(self) -> None:
        """Read the answers.

        Raises:
            PlanMismatchError: The ranks differ.
        """
        pending, self._pending = self._pending, []
        for check in pending:
            self._read(check)

    def _read(self, check: _Check) -> None:
        group = compat.resolve_process_group(self._name)
        with answered(group, check.what):
            check.done()
        kinds, *rest = check.found.T.tolist()
        late = {"call": "sequence of calls"} if kinds[0] == _OF_A_PLAN else {}
        for name, numbers in zip(_REMEDIES, (kinds, *rest), strict=True):
            if any(x != numbers[0] for x in numbers):
                self._forget()
                _refuse(group, late.get(name, name), numbers, _REMEDIES[name])

    def _forget(self) -> None:
        # All ranks forget alike, so that a program that catches the error can go on.
        self._chains: dict[str, int] = {}
        self._on_device: dict[str, Any] = {}
        self._count = 0


def _message(kind: int, facts: Mapping[str, int]) -> np.ndarray[Any, Any]:
    found = np.zeros(len(_REMEDIES), np.int64)
    found[0] = kind
    for name, x in facts.items():
        found[_PLACES[name]] = x
    return found


def _refuse(group: Any, name: str, numbers: list[int], remedy: str) -> NoReturn:
    ranks = dist.get_process_group_ranks(group)
    odd = [str(rank) for rank, x in zip(ranks, numbers, strict=True) if x != numbers[0]]
    raise PlanMismatchError(
        f"context parallelism on {shown_group(group)}",
        expected=f"the same {name} on every rank",
        got=f"a different one on rank{'s'[: len(odd) - 1]} {', '.join(odd)} than on rank {ranks[0]}",
        remedy=remedy,
    )


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C1  # Odd, so that multiplying 64 bits by it loses nothing.


def digest_of(x: Tensor) -> Tensor:
    """Hash the bits of a tensor and their order, int64 (), on its device, without synchronizing."""
    bits = _bits(x, _INTEGERS[x.element_size()]).long()
    weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    return (bits * weights * _ODD).sum()


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().reshape(-1).contiguous().view(dtype)


def _brought_home(every: Tensor, work: Any) -> tuple[Tensor, Any]:
    """Start to copy a tensor to the host after `work`. Return the copy and a function that waits for it."""
    stream = torch.cuda.Stream(every.device)  # type: ignore[no-untyped-call]
    home = torch.empty_like(every, device="cpu", pin_memory=True)
    with torch.cuda.stream(stream):
        work.wait()
        home.copy_(every, non_blocking=True)
    every.record_stream(stream)
    return home, stream.record_event().synchronize


def moved(x: Any, device: str) -> Tensor:
    """Copy a NumPy array to a device, without synchronizing."""
    found = torch.from_numpy(x.copy())
    return found if device == "cpu" else found.pin_memory().to(device, non_blocking=True)


_known: dict[str, Agreement] = {}


def agreement_of(group: Any) -> Agreement:
    """Return the agreement of a process group. The first call makes it."""
    known = _known.get(group.group_name)
    if known is None or known._is_of() is not group:
        for name in [name for name, x in _known.items() if x._is_of() is None]:
            del _known[name]
        known = _known[group.group_name] = Agreement(group)
    return known


@contextmanager
def answered(group: Any, what: str) -> Iterator[None]:
    """A block with a collective. Its error names the collective and the ranks that do not answer."""
    try:
        yield
    except RuntimeError as error:
        _raise_broken(group, what, error)


def gathered(x: Tensor, group: Any, what: str) -> Tensor:
    """Gather the tensors of all ranks, (P, ...)."""
    every = x.new_empty((group.size(), *x.shape))
    with answered(group, what):
        dist.all_gather(list(every.unbind()), x.contiguous(), group=group)
    return every


def _raise_broken(group: Any, what: str, error: Exception) -> NoReturn:
    """Raise an error that names the exchange that failed and the silent ranks.

    Raises:
        PlanMismatchError: The ranks have different plans.
        CommunicationError: The ranks have the same plans.
    """
    for known in list(_known.values()):
        if group.group_name in known.groups:
            known.settle()
    silent, cause = silence_of(group), f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise CommunicationError(
        f"context parallelism, {what}, rank {dist.get_rank()} of {shown_group(group)}",
        expected="an answer from every rank",
        got=f"none from {silent} ({cause})" if silent else cause,
        remedy="A rank has died, hangs or runs another program: look at the first rank that failed, and "
        "resume from a checkpoint",
    ) from error
