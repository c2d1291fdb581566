"""What a measurement found: plain data that goes to JSON and back, with every derived figure beside it.

Times are seconds, sizes bytes, rates per second. Tables and pages format these figures and compute none.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnspan.bench._plain import from_plain, to_plain
from attnspan.bench.cells import Ceilings, Cell, Run, Workload
from attnspan.bench.samples import Rate, Ratio, Samples, Timing
from attnspan.errors import OptionError

__all__ = [
    "SCHEMA",
    "Ceilings",
    "Cell",
    "MonitorRecord",
    "PhaseShares",
    "Rate",
    "Ratio",
    "Results",
    "Run",
    "Samples",
    "Timing",
    "TrainingCell",
    "Workload",
]

SCHEMA = 2


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

    Example:
        >>> TrainingCell("sdpa", tokens_per_second=Rate((1000.0,))).tokens_per_second.median
        1000.0
    """

    attention: str
    reason: str | None = None
    seconds: Timing | None = None
    tokens_per_second: Rate | None = None
    peak_memory: int | None = None
    ratio: Ratio | None = None
    noisy: bool = False
    note: str = ""


@dataclass(frozen=True)
class PhaseShares:
    """Where the time of a training step went, as fractions of it.

    Args:
        data: Waiting for the next batch.
        host: Outside of all phases: tracing, Python, logging.
        forward: The forward pass.
        backward: The backward pass.
        optimizer: The update.
        communication: Collectives.

    Example:
        >>> PhaseShares(forward=0.3, backward=0.5).total
        0.8
    """

    data: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the fractions; 1 when every moment was accounted for."""
        return self.data + self.host + self.forward + self.backward + self.optimizer + self.communication


@dataclass(frozen=True)
class MonitorRecord:
    """One step of a watched training.

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
        steps: Steps up to `step` that the other figures are means of (memory: the largest). Long runs are
            thinned.

    Example:
        >>> MonitorRecord(1, seconds=0.5, tokens=1000, phases=PhaseShares()).tokens_per_second
        2000.0
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
    steps: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step over its wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def attention_flops_per_second(self) -> float | None:
        """FLOP/s inside the attention operators."""
        if not self.attention_seconds or self.attention_flops is None:
            return None
        return self.attention_flops / self.attention_seconds

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
class Results:
    """All that one run of the benchmark found; the JSON file.

    Args:
        environment: Machine and versions.
        ceilings: Of this machine, or None.
        cells: Single calls.
        training: Whole training steps.
        monitor: Steps of a watched training.
        complete: False when it was stopped before the last cell.
        schema: Version of this layout.

    Example:
        >>> Results(environment={"cpu": "a machine"}).cells
        ()
    """

    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    cells: tuple[Cell, ...] = ()
    training: tuple[TrainingCell, ...] = ()
    monitor: tuple[MonitorRecord, ...] = ()
    complete: bool = True
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write the JSON file; a reader sees the old file or the whole new one.

        Args:
            path: The file; its folder is made.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "results.json"
            >>> Results(environment={"cpu": "a machine"}).save(path)
            >>> Results.load(path).environment["cpu"]
            'a machine'
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(to_plain(self)) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read the JSON file.

        Args:
            path: What `save` wrote.

        Raises:
            OptionError: The file is missing, no JSON, of another schema, or damaged.

        Example:
            >>> Results.load(Path("nowhere.json"))
            Traceback (most recent call last):
            attnspan.errors.OptionError: nowhere.json: expected a results file, got no such \
file. Check the path.
        """
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise _unreadable(path, "no such file", "Check the path") from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, str(error), "Measure again") from None
        found = data.get("schema") if isinstance(data, dict) else None
        if found != SCHEMA:
            raise OptionError(
                str(path),
                expected=f"results of schema {SCHEMA}",
                got=f"schema {found}" if found is not None else "a file without a schema",
                remedy="Measure again with this version, or read it with the version that wrote it",
            )
        return from_plain(cls, data, str(path))


def _unreadable(path: Path, got: str, remedy: str) -> OptionError:
    return OptionError(str(path), expected="a results file", got=got, remedy=remedy)
