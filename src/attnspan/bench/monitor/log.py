"""Where a monitor's records go: a journal line per step, TensorBoard now and then, a results file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from attnspan.bench._plain import from_plain, to_plain
from attnspan.bench.monitor.steps import mean_record
from attnspan.bench.results import MonitorRecord, Results
from attnspan.train.progress import MetricsLog

__all__ = ["RecordLog", "Thinned", "scalars"]

_MOST_RECORDS = 2048
_BOARD_SECONDS = 30


class Thinned:
    """Records of a run of any length in bounded memory: when there are too many, neighbours are averaged.

    Args:
        most: Largest number kept.

    Example:
        >>> from attnspan.bench.results import PhaseShares
        >>> records = Thinned(most=4)
        >>> for step in range(1, 8):
        ...     records.add(MonitorRecord(step, seconds=1.0, tokens=1, phases=PhaseShares()))
        >>> [(record.step, record.steps) for record in records.all()]
        [(2, 2), (4, 2), (6, 2), (7, 1)]
    """

    def __init__(self, most: int = _MOST_RECORDS) -> None:
        self._most, self._stride = most, 1
        self._kept: list[MonitorRecord] = []
        self._open: list[MonitorRecord] = []

    def add(self, record: MonitorRecord) -> None:
        """Take one more step.

        Args:
            record: Of the step after the last one.
        """
        self._open.append(record)
        if len(self._open) < self._stride:
            return
        self._kept.append(mean_record(self._open))
        self._open = []
        if len(self._kept) >= self._most:
            pairs = range(0, len(self._kept), 2)
            self._kept = [mean_record(self._kept[first : first + 2]) for first in pairs]
            self._stride *= 2

    def all(self) -> tuple[MonitorRecord, ...]:
        """All steps so far; the last record may stand for fewer steps than the others."""
        return (*self._kept, *([mean_record(self._open)] if self._open else []))


def scalars(record: MonitorRecord) -> dict[str, float]:
    """TensorBoard's view of a record: tag to figure, in the units that people read.

    Args:
        record: One step, or the mean of several.

    Returns:
        Only figures that are known: a machine without counters has no attention scalars.

    Example:
        >>> from attnspan.bench.results import PhaseShares
        >>> record = MonitorRecord(1, 0.5, 100, PhaseShares(forward=1.0), 0.1, 2e11, ceiling=4e12)
        >>> figures = scalars(record)
        >>> figures["attention/tflops"], figures["attention/share_of_ceiling"], figures["phases/forward"]
        (2.0, 0.5, 1.0)
    """
    rate = record.attention_flops_per_second
    known: dict[str, float | None] = {
        "attention/tflops": None if rate is None else rate / 1e12,
        "attention/share_of_ceiling": record.ceiling_share,
        "attention/share_of_step": record.attention_share,
        "step/seconds": record.seconds,
        "step/tokens_per_second": record.tokens_per_second,
        "step/compile_seconds": record.compile_seconds,
        "machine/memory_gib": None if record.memory is None else record.memory / 2**30,
        "machine/device_memory_gib": None if record.device_memory is None else record.device_memory / 2**30,
        "machine/utilisation": record.utilisation,
        **{f"phases/{name}": share for name, share in to_plain(record.phases).items()},
    }
    return {tag: figure for tag, figure in known.items() if figure is not None}


class RecordLog:
    """Records of a run, on disk so that a process which dies loses none of them.

    ``monitor.jsonl`` gets a line per step as soon as it is known. ``tensorboard/monitor/`` gets scalars,
    means over the steps since the last ones. ``monitor.json`` is a results file, replaced as a whole now and
    then.

    Args:
        folder: Where the files go; made when missing.
        taken: Steps that were taken before. Their records stay; those of later steps belong to a run that
            was cut off, and are removed.
        every: Steps between two sets of scalars.
        save_seconds: Time between two writings of ``monitor.json``, s.
        environment: The machine, for ``monitor.json``.

    Example:
        >>> import tempfile
        >>> from attnspan.bench.results import PhaseShares
        >>> folder = Path(tempfile.mkdtemp())
        >>> log = RecordLog(folder, taken=0, every=1, save_seconds=60.0, environment={})
        >>> log.write(MonitorRecord(1, 0.5, 100, PhaseShares(forward=1.0)))
        >>> log.close()
        >>> Results.load(folder / "monitor.json").monitor[0].tokens
        100
    """

    def __init__(
        self, folder: Path, *, taken: int, every: int, save_seconds: float, environment: dict[str, Any]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "monitor.json"
        self._journal = MetricsLog(folder / "monitor.jsonl", taken)
        self._records = Thinned()
        for number, line in enumerate((folder / "monitor.jsonl").read_text().splitlines(), 1):
            where = f"{folder / 'monitor.jsonl'} line {number}"
            self._records.add(from_plain(MonitorRecord, json.loads(line), where))
        self._board = FileWriter(str(folder / "tensorboard" / "monitor"), flush_secs=_BOARD_SECONDS)
        # TensorBoard drops what an earlier process wrote from this step on.
        self._board.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step=taken + 1)
        self._every, self._unshown = every, list[MonitorRecord]()
        self._save_seconds, self._saved = save_seconds, time.monotonic()
        self._environment = environment

    def write(self, record: MonitorRecord) -> None:
        """Take the record of the next step.

        Args:
            record: Its figures.
        """
        self._journal.write(to_plain(record))
        self._records.add(record)
        self._unshown.append(record)
        if len(self._unshown) >= self._every:
            self._show()
        if time.monotonic() - self._saved >= self._save_seconds:
            self.save()

    def results(self) -> Results:
        """The records so far, as the page and other readers take them."""
        return Results(environment=self._environment, monitor=self._records.all())

    def save(self) -> None:
        """Replace ``monitor.json``."""
        self.results().save(self._path)
        self._saved = time.monotonic()

    def close(self) -> None:
        """Write what is left, and let go of the files."""
        if self._unshown:
            self._show()
        self.save()
        self._board.close()
        self._journal.close()

    def _show(self) -> None:
        mean = mean_record(self._unshown)
        # One event for all of them: each one wakes the writer's thread.
        values = [Summary.Value(tag=tag, simple_value=figure) for tag, figure in scalars(mean).items()]
        self._board.add_summary(Summary(value=values), mean.step)
        self._unshown = []
