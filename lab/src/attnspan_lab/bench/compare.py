"""Comparison of two results files: significant slowdowns, and new or missing cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnspan_lab.bench.cells import Cell
from attnspan_lab.bench.environment import same_machine
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.statistics import Interval, discoveries, quotient

__all__ = ["Change", "Comparison", "compare"]

TOLERANCE = 0.02  # Changes up to this fraction are ignored.


@dataclass(frozen=True)
class Change:
    """Change of attnspan's time in one cell.

    Args:
        label: Label of the cell.
        time: New time over old time.
        peer: A peer in both files, to detect changes of the machine. None if there is none.
        relative: Ratio against the peer, old over new. Above 1, attnspan lost ground. None without a peer.
        note: Other changes, such as the loss of a backend.
        real: Whether the change of the time, and the change of the ratio, are significant among all cells.
        same_machine: Both times come from one machine. Otherwise only ratios against a peer are judged.
    """

    label: str
    time: Interval | None
    peer: str | None
    relative: Interval | None
    note: str = ""
    real: Sequence[bool] = (True, True)
    same_machine: bool = True

    @property
    def verdict(self) -> str:
        """Verdict in words. "slower", "lost ground" and "gone" are regressions."""
        if self.time is None:
            return "gone" if self.note else "not measured"
        limit, relative = 1 + TOLERANCE, self.relative if self.real[1] else None
        # A faster machine can hide a slower kernel, so the ratio is judged as well.
        has_lost = relative is not None and relative.low > limit
        if not self.same_machine:
            has_won = relative is not None and relative.high < 1 / limit
            known = "lost ground" if has_lost else "faster" if has_won else "same"
            return known if self.relative is not None else "another machine"
        if self.real[0] and self.time.low > limit:
            clear = self.relative is None or (relative is not None and relative.low > 1)
            return "slower" if clear else "slower, as the peer: the machine"
        if self.real[0] and self.time.high < 1 / limit and not has_lost:
            clear = self.relative is None or (relative is not None and relative.high < 1)
            return "faster" if clear else "faster, as the peer: the machine"
        return "lost ground" if has_lost else "same"

    @property
    def is_regression(self) -> bool:
        """Whether attnspan became slower, or can no longer run the cell."""
        return self.verdict in ("slower", "lost ground", "gone")


@dataclass(frozen=True)
class Comparison:
    """Comparison of all cells of two files.

    Args:
        changes: Changes of the cells in both files.
        appeared: Labels of cells that only the new file has.
        disappeared: Labels of cells that only the old file has.
        machine: Differences of the machines. Empty for the same machine.
    """

    changes: tuple[Change, ...]
    appeared: tuple[str, ...]
    disappeared: tuple[str, ...]
    machine: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Changes that are regressions."""
        return tuple(change for change in self.changes if change.is_regression)


def compare(old: Results, new: Results) -> Comparison:
    """Find regressions.

    A cell is a regression if its time changed, or if the ratio against a common peer changed. A change
    counts if its whole interval lies beyond the tolerance, and if it is significant among all cells
    (Benjamini and Hochberg). A change of the time does not count if the common peer slowed down equally.

    Args:
        old: The reference results.
        new: The results to judge.

    Example:
        >>> compare(Results(environment={"cpu": "a"}), Results(environment={"cpu": "b"})).machine
        ('cpu: a, then b',)
    """
    before, after = ({_key(cell): cell for cell in found.cells} for found in (old, new))
    machine = same_machine(old.environment, new.environment)
    found = [_change(before[key], cell) for key, cell in after.items() if key in before]
    times = discoveries([change.time.p if change.time else 1.0 for change in found])
    relatives = discoveries([change.relative.p if change.relative else 1.0 for change in found])
    return Comparison(
        tuple(
            replace(change, real=real, same_machine=not machine)
            for change, *real in zip(found, times, relatives, strict=True)
        ),
        tuple(cell.label for key, cell in after.items() if key not in before),
        tuple(cell.label for key, cell in before.items() if key not in after),
        tuple(machine),
    )


def _key(cell: Cell) -> tuple[object, ...]:
    """Identify a cell by its workload, not by its name: the sizes behind a name may change."""
    return (replace(cell.workload, family="", note=""), cell.mode, cell.device, cell.cold)


def _change(old: Cell, new: Cell) -> Change:
    before, after = old.timing(old.ours), new.timing(new.ours)
    if before is None or after is None:
        note = f"it ran; now: {new.ours.reason}" if before is not None else ""
        return Change(new.label, None, None, None, note)
    time = quotient(Interval.of(before.samples), Interval.of(after.samples))
    # Use the common peer with the narrowest intervals.
    relatives = [
        (run.peer, quotient(run.ratio, earlier.ratio))
        for run in new.peers
        if run.ratio is not None and (earlier := old.run(run.peer)) is not None and earlier.ratio
    ]
    peer, relative = min(relatives, key=lambda entry: entry[1].width, default=(None, None))
    return Change(new.label, time, peer, relative)
