"""What is known of one step while it runs, and the record that becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from attnspan.bench.monitor.clocks import Clock
from attnspan.bench.monitor.probes import AttentionTotals
from attnspan.bench.results import MonitorRecord, PhaseShares

__all__ = ["PHASES", "Interval", "WatchedStep", "mean_record"]

PHASES = ("forward", "backward", "optimizer", "communication")


@dataclass
class Interval:
    """One passage through a phase.

    Args:
        phase: Its name.
        inside: The phase around it, or None.
        start: Mark at its beginning.
        stop: Mark at its end.
        compiling: Seconds of it in which torch.compile worked.

    Example:
        >>> Interval("forward", None, 0.0).compiling
        0.0
    """

    phase: str
    inside: str | None
    start: Any
    stop: Any = None
    compiling: float = 0.0


@dataclass
class WatchedStep:
    """Marks and readings of a step, in the order in which they come.

    Args:
        number: Number of the step.
        tokens: Learned from in the step.
        begin: Mark at the end of the step before.
        attention_before: Totals of the attention operators when the step began, or None.
        intervals: Phases gone through.
        end: Mark at the end of the step.
        waited: Seconds that the host waited for data.
        attention: What the operators did in the step, or None.
        compiling: Seconds of compilation.
        memory: Resident bytes.
        device_memory: Bytes on the accelerator, or None.

    Example:
        >>> from attnspan.bench.monitor.clocks import HostClock
        >>> step = WatchedStep(7, 100, begin=0.0, end=2.0, waited=0.5)
        >>> step.intervals.append(Interval("forward", None, 0.5, 1.5))
        >>> step.record(HostClock(), ceiling=None, utilisation=None).phases
        PhaseShares(data=0.25, host=0.25, forward=0.5, backward=0.0, optimizer=0.0, communication=0.0)
    """

    number: int
    tokens: int
    begin: Any
    attention_before: AttentionTotals | None = None
    intervals: list[Interval] = field(default_factory=list)
    end: Any = None
    waited: float = 0.0
    attention: AttentionTotals | None = None
    compiling: float = 0.0
    memory: int | None = None
    device_memory: int | None = None

    def seconds(self, clock: Clock) -> float:
        """Time from the end of the step before to the end of this one, s.

        Args:
            clock: The one that made the marks.
        """
        return clock.seconds(self.begin, self.end)

    def spent(self, clock: Clock) -> dict[str, float]:
        """Seconds in each phase, compilation and inner phases taken out.

        Args:
            clock: The one that made the marks.
        """
        spent = dict.fromkeys(PHASES, 0.0)
        for interval in self.intervals:
            working = clock.seconds(interval.start, interval.stop) - interval.compiling
            spent[interval.phase] += working
            if interval.inside is not None:
                spent[interval.inside] -= working
        # A device's events may see less of a phase than the host spent compiling in it.
        return {phase: max(0.0, seconds) for phase, seconds in spent.items()}

    def record(self, clock: Clock, ceiling: float | None, utilisation: float | None) -> MonitorRecord:
        """The step as plain data; its marks must be known.

        Args:
            clock: The one that made the marks.
            ceiling: Measured FLOP/s, or None.
            utilisation: Busy share of the device, or None.
        """
        seconds, spent = self.seconds(clock), self.spent(clock)
        rest = max(0.0, seconds - sum(spent.values()))
        # On a device that has work queued, the host's wait for data costs only the time left over.
        data = min(self.waited, rest)
        parts = {"data": data, "host": rest - data} | spent
        shares = {name: part / seconds if seconds > 0 else 0.0 for name, part in parts.items()}
        return MonitorRecord(
            step=self.number,
            seconds=seconds,
            tokens=self.tokens,
            phases=PhaseShares(**shares),
            attention_seconds=None if self.attention is None else self.attention.seconds,
            attention_flops=None if self.attention is None else self.attention.flops,
            ceiling=ceiling,
            compile_seconds=self.compiling,
            memory=self.memory,
            device_memory=self.device_memory,
            utilisation=utilisation,
        )


def mean_record(records: Sequence[MonitorRecord]) -> MonitorRecord:
    """One record for several neighbouring ones: means per step, shares and utilisation weighted by time.

    Args:
        records: One or more, in order; each may itself stand for several steps.

    Returns:
        A record with the number of the last step, the largest memory, and as many steps as all together.

    Example:
        >>> a = MonitorRecord(1, seconds=1.0, tokens=10, phases=PhaseShares(forward=1.0))
        >>> b = MonitorRecord(2, seconds=3.0, tokens=30, phases=PhaseShares(backward=1.0))
        >>> mean = mean_record([a, b])
        >>> mean.steps, mean.seconds, mean.tokens_per_second, mean.phases.backward
        (2, 2.0, 10.0, 0.75)
    """
    if len(records) == 1:
        return records[0]
    steps = sum(record.steps for record in records)
    whole = sum(record.steps * record.seconds for record in records)

    def per_step(name: str) -> float | None:
        values: list[float | None] = [getattr(record, name) for record in records]
        if None in values:
            return None
        pairs = zip(values, records, strict=True)
        return sum((value or 0.0) * record.steps for value, record in pairs) / steps

    def over_time(values: list[float | None]) -> float | None:
        if None in values or not whole:
            return None
        pairs = zip(values, records, strict=True)
        return sum((value or 0.0) * record.steps * record.seconds for value, record in pairs) / whole

    def largest(name: str) -> int | None:
        return max(
            (value for record in records if (value := getattr(record, name)) is not None), default=None
        )

    shares = {
        share.name: over_time([getattr(record.phases, share.name) for record in records]) or 0.0
        for share in fields(PhaseShares)
    }
    return MonitorRecord(
        step=records[-1].step,
        seconds=whole / steps,
        tokens=round(per_step("tokens") or 0.0),
        phases=PhaseShares(**shares),
        attention_seconds=per_step("attention_seconds"),
        attention_flops=per_step("attention_flops"),
        ceiling=records[-1].ceiling,
        compile_seconds=per_step("compile_seconds") or 0.0,
        memory=largest("memory"),
        device_memory=largest("device_memory"),
        utilisation=over_time([record.utilisation for record in records]),
        steps=steps,
    )
