"""Two results files side by side: what became slower beyond the noise, and what came or went."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnspan.bench.cells import Cell
from attnspan.bench.environment import same_machine
from attnspan.bench.results import Results
from attnspan.bench.samples import Ratio
from attnspan.bench.statistics import bootstrap_medians

__all__ = ["Change", "Comparison", "compare"]

# An interval of 95 % is this many standard errors wide.
_ERRORS_PER_INTERVAL = 2 * 1.96
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Change:
    """attnspan in one cell, then and now.

    Args:
        label: Of the cell.
        time: New time over old time, with its interval.
        peer: Peer that both files have, whose ratio says whether the machine changed; None without one.
        relative: Ratio against that peer, old over new: above 1, ours lost ground. None without a peer.
        tolerance: Change that does not matter, as a fraction.
        note: What else changed, like the loss of a back end.

    Example:
        >>> Change("cell", Ratio(1.2, 1.1, 1.3, 9), None, None).verdict
        'slower'
        >>> Change("cell", Ratio(1.2, 1.1, 1.3, 9), "sdpa-flash", Ratio(1.0, 0.9, 1.1, 9)).verdict
        'slower, as the peer: the machine'
    """

    label: str
    time: Ratio | None
    peer: str | None
    relative: Ratio | None
    tolerance: float = _TOLERANCE
    note: str = ""

    @property
    def verdict(self) -> str:
        """In words; "slower" and "gone" are regressions."""
        if self.time is None:
            return "gone" if self.note else "not measured"
        if self.time.low > 1 + self.tolerance:
            return self._unless_the_machine("slower", lost=True)
        if self.time.high < 1 / (1 + self.tolerance):
            return self._unless_the_machine("faster", lost=False)
        # A faster machine can hide a slower kernel.
        if self.relative is not None and self.relative.low > 1 + self.tolerance:
            return "slower"
        return "same"

    def _unless_the_machine(self, verdict: str, lost: bool) -> str:
        if self.relative is None:
            return verdict
        clear = self.relative.low > 1 if lost else self.relative.high < 1
        if clear:
            return verdict
        if not lost and self.relative.low > 1 + self.tolerance:
            return "slower"
        return f"{verdict}, as the peer: the machine"

    @property
    def is_regression(self) -> bool:
        """Whether ours became slower, or cannot do it any more."""
        return self.verdict in ("slower", "gone")


@dataclass(frozen=True)
class Comparison:
    """All cells of two files.

    Args:
        changes: Of the cells that both have.
        appeared: Labels of cells that only the new file has.
        disappeared: Labels of cells that only the old file has.
        machine: How the machines differ; empty for one machine.

    Example:
        >>> compare(Results(), Results()).has_regressed
        False
    """

    changes: tuple[Change, ...]
    appeared: tuple[str, ...]
    disappeared: tuple[str, ...]
    machine: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(change for change in self.changes if change.is_regression)

    @property
    def has_regressed(self) -> bool:
        """Whether there is one."""
        return bool(self.regressions)


def compare(old: Results, new: Results, tolerance: float = _TOLERANCE) -> Comparison:
    """Find regressions.

    A cell regressed when the whole interval of its time's change lies beyond the tolerance and a peer that
    both files have did not slow down alike. The time's interval is a bootstrap over the raw samples of both
    files; the relative one combines the intervals of the two paired ratios.

    Args:
        old: The reference.
        new: What is judged.
        tolerance: Change that does not matter, as a fraction.

    Example:
        >>> compare(Results(environment={"cpu": "a"}), Results(environment={"cpu": "b"})).machine
        ('cpu: a, then b',)
    """
    before = {_key(cell): cell for cell in old.cells}
    after = {_key(cell): cell for cell in new.cells}
    return Comparison(
        tuple(_change(before[key], cell, tolerance) for key, cell in after.items() if key in before),
        tuple(cell.label for key, cell in after.items() if key not in before),
        tuple(cell.label for key, cell in before.items() if key not in after),
        tuple(same_machine(old.environment, new.environment)),
    )


def _key(cell: Cell) -> tuple[object, ...]:
    """Equal workloads are compared, not equal names: a name may have got other sizes."""
    work = cell.workload
    sizes = (work.batch, work.q_heads, work.kv_heads, work.q_len, work.k_len, work.head_dim, work.v_dim)
    return (work.name, work.dtype, work.mask, *sizes, cell.mode, cell.device)


def _change(old: Cell, new: Cell, tolerance: float) -> Change:
    before, after = old.timing(old.ours), new.timing(new.ours)
    if before is None or after is None:
        lost = before is not None and after is None
        reason = f"it ran; now: {new.ours.reason}" if lost else ""
        return Change(new.label, None, None, None, tolerance, reason)
    time = Ratio(*bootstrap_medians(before.samples, after.samples), pairs=len(after.samples))
    peer, relative = _relative(old, new)
    return Change(new.label, time, peer, relative, tolerance)


def _relative(old: Cell, new: Cell) -> tuple[str | None, Ratio | None]:
    """Against the common peer whose two ratios leave the least open."""
    found = [
        (run.peer, _quotient(earlier.ratio, run.ratio))
        for run in new.peers
        if run.ratio is not None and (earlier := old.run(run.peer)) is not None and earlier.ratio
    ]
    return min(found, key=lambda entry: entry[1].width, default=(None, None))


def _quotient(old: Ratio, new: Ratio) -> Ratio:
    """old / new with the interval of two independent errors, on the scale of logarithms."""
    middle = math.log(old.median / new.median)
    errors = [math.log(ratio.high / ratio.low) / _ERRORS_PER_INTERVAL for ratio in (old, new)]
    reach = _ERRORS_PER_INTERVAL / 2 * math.hypot(*errors)
    return Ratio(
        math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), min(old.pairs, new.pairs)
    )
