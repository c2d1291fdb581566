"""Results of a measurement: plain data that goes to JSON and back, with every derived figure next to it.

Times are seconds, sizes bytes, rates per second. Tables and pages format these figures and compute none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnspan_lab.bench.cells import Ceilings, Cell, Timing
from attnspan_lab.bench.statistics import Interval, Samples
from attnspan_lab.files import read_results, write_json

__all__ = ["SCHEMA", "Evaluation", "MonitorRecord", "PhaseShares", "RankTimes", "Results", "TrainingCell"]

SCHEMA = 3


@dataclass(frozen=True)
class TrainingCell:
    """Whole training steps with one kind of attention.

    Args:
        attention: Name, like "attnspan" or "sdpa".
        reason: Why it cannot run, or None.
        seconds: Of each step.
        tokens_per_second: Of each step.
        peak_memory: Resident bytes at the peak of a fresh process.
        ratio: Its step time over attnspan's; None for attnspan.
        noisy: The ratio is uncertain.
        note: Configuration of the job, for people.
    """

    attention: str
    reason: str | None = None
    seconds: Timing | None = None
    tokens_per_second: Samples | None = None
    peak_memory: int | None = None
    ratio: Interval | None = None
    noisy: bool = False
    note: str = ""


@dataclass(frozen=True)
class RankTimes:
    """Seconds of the same training steps, taken in turn: by all ranks, and by one with the threads of all.

    ``losses`` and ``norms`` are the largest relative differences of the first steps from those of one rank.
    """

    ranks: int
    losses: float
    norms: float
    all_ranks: tuple[float, ...]
    one_rank: tuple[float, ...]
    sdpa: tuple[float, ...]  # of one rank, under a dense mask


@dataclass(frozen=True)
class PhaseShares:
    """Shares of a training step's time by phase, as fractions of 1; "host" is outside all phases."""

    data: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class MonitorRecord:
    """One step of a training that a monitor records.

    Args:
        step: Number of the step.
        seconds: Wall time of the step, data included.
        tokens: Learned from in the step.
        phases: Where the time went.
        attention_seconds: Inside attention operators, forward and backward.
        attention_flops: Of attention over visible pairs.
        ceiling: Measured FLOP/s that the attention is held against, or None.
        compile_seconds: Compilation during the step.
        memory: Resident bytes of the process.
        device_memory: Bytes allocated on the accelerator, or None.
        utilisation: Busy share of the cores or of the device, 0..1, or None.
        loss: Of the step, or None.
        steps: Steps up to `step` that the other figures are means of (memory: the largest).
    """

    step: int
    seconds: float
    tokens: int
    phases: PhaseShares
    attention_seconds: float | None = None
    attention_flops: float | None = None
    ceiling: float | None = None
    compile_seconds: float = 0.0
    memory: int | None = None
    device_memory: int | None = None
    utilisation: float | None = None
    loss: float | None = None
    steps: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step over its wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def attention_flops_per_second(self) -> float | None:
        """FLOP/s inside the attention operators."""
        known = self.attention_seconds and self.attention_flops is not None
        return self.attention_flops / self.attention_seconds if known else None  # type: ignore[operator]

    @property
    def attention_share(self) -> float | None:
        """Part of the step spent inside attention operators, 0..1."""
        return None if self.attention_seconds is None else self.attention_seconds / self.seconds

    @property
    def ceiling_share(self) -> float | None:
        """Attention FLOP/s over the ceiling."""
        rate = self.attention_flops_per_second
        return rate / self.ceiling if rate is not None and self.ceiling else None


@dataclass(frozen=True)
class Evaluation:
    """The loss on held-out data after a step; step 0 is before the first one."""

    step: int
    held_out: float


@dataclass(frozen=True)
class Results:
    """All that one run of the benchmark found; the JSON file.

    Args:
        environment: Machine and versions.
        ceilings: Of this machine, as the probe measured them, or None.
        cells: Single calls.
        training: Whole training steps.
        ranks: The same on several ranks and on one, or None.
        monitor: Steps of a training.
        evaluations: Its held-out losses.
        complete: False when it was stopped before the last cell.
        schema: Version of this layout.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    cells: tuple[Cell, ...] = ()
    training: tuple[TrainingCell, ...] = ()
    ranks: RankTimes | None = None
    monitor: tuple[MonitorRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    complete: bool = True
    schema: int = SCHEMA

    @property
    def roof(self) -> Ceilings | None:
        """The ceilings, raised to the fastest sample of any run: no run stands above its ceiling."""
        return self.ceilings.lifted(self.cells) if self.ceilings else None

    def save(self, path: Path) -> None:
        """Write the file, compressed if its name ends in ``.gz``; a reader sees the old one or the new one.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "results.json.gz"
            >>> Results(environment={"cpu": "a machine"}).save(path)
            >>> Results.load(path).environment["cpu"]
            'a machine'
        """
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote.

        Raises:
            OptionError: The file is missing, not JSON, of another schema, or damaged.
        """
        remedy = "Measure again with this version, or read it with the version that wrote it"
        return read_results(cls, path, "a results file", schema=SCHEMA, remedy=remedy)
