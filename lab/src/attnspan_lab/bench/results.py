"""Results of a measurement as dataclasses, which are stored as JSON. Derived values are properties.

Times are in seconds, sizes in bytes, rates per second. Tables and pages only format these values.
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
    """Measurements of whole training steps with one attention.

    Args:
        attention: Name of the attention, such as "attnspan" or "sdpa".
        reason: Reason why it cannot run, or None.
        seconds: Time of each step.
        tokens_per_second: Speed of each step.
        peak_memory: Peak of resident bytes in a fresh process.
        ratio: Step time over attnspan's step time. None for attnspan.
        noisy: The ratio's interval is too wide.
        note: Configuration of the job, as text.
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
    """Seconds of the same training steps on several ranks, and on one rank with the threads of all ranks.

    The steps alternate. ``losses`` and ``norms`` are the largest relative differences of the first steps from
    the same steps on one rank.
    """

    ranks: int
    losses: float
    norms: float
    all_ranks: tuple[float, ...]
    one_rank: tuple[float, ...]
    sdpa: tuple[float, ...]  # one rank, with a dense mask


@dataclass(frozen=True)
class PhaseShares:
    """Shares of a training step's time by phase, from 0 to 1. "host" is the time outside all phases."""

    data: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class MonitorRecord:
    """A monitor's record of one training step.

    Args:
        step: Number of the step.
        seconds: Wall time of the step, including data.
        tokens: Number of tokens trained on.
        phases: Shares of the time by phase.
        attention_seconds: Time inside attention operators, forward and backward.
        attention_flops: FLOPs of attention over visible pairs.
        ceiling: Measured peak FLOP/s for comparison, or None.
        compile_seconds: Time of compilation during the step.
        memory: Resident bytes of the process.
        device_memory: Bytes allocated on the accelerator, or None.
        utilisation: Busy share of the cores or of the device, from 0 to 1, or None.
        loss: Loss of the step, or None.
        steps: Number of steps up to `step` that the record averages. Memory is the maximum.
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
        """Tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def attention_flops_per_second(self) -> float | None:
        """FLOP/s inside the attention operators."""
        known = self.attention_seconds and self.attention_flops is not None
        return self.attention_flops / self.attention_seconds if known else None  # type: ignore[operator]

    @property
    def attention_share(self) -> float | None:
        """Share of the step inside attention operators, from 0 to 1."""
        return None if self.attention_seconds is None else self.attention_seconds / self.seconds

    @property
    def ceiling_share(self) -> float | None:
        """Attention FLOP/s over the ceiling."""
        rate = self.attention_flops_per_second
        return rate / self.ceiling if rate is not None and self.ceiling else None


@dataclass(frozen=True)
class Evaluation:
    """The loss on held-out data after a step. Step 0 is before the first training step."""

    step: int
    held_out: float


@dataclass(frozen=True)
class Results:
    """Results of one benchmark run, stored as a JSON file.

    Args:
        environment: Machine and versions.
        ceilings: Ceilings of the machine as the probe measured them, or None.
        cells: Single calls.
        training: Whole training steps.
        ranks: Training steps on several ranks and on one, or None.
        monitor: Recorded training steps.
        evaluations: Held-out losses of the recorded training.
        complete: False if the run was stopped before the last cell.
        schema: Version of the file format.
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
        """The ceilings, raised to the fastest sample of any run, so that no run exceeds its ceiling."""
        return self.ceilings.lifted(self.cells) if self.ceilings else None

    def save(self, path: Path) -> None:
        """Write the file atomically. It is compressed if its name ends in ``.gz``.

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
        """Read a file that `save` wrote.

        Raises:
            OptionError: The file is missing or damaged, is not JSON, or has another schema.
        """
        remedy = "Measure again with this version, or read it with the version that wrote it"
        return read_results(cls, path, "a results file", schema=SCHEMA, remedy=remedy)
