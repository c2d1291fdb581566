"""Files of a monitor's records: a journal, TensorBoard scalars and a results file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from attnspan_lab.bench.monitor.lines import MetricsLog
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results
from attnspan_lab.files import from_plain, to_plain

__all__ = ["RecordLog", "Thinned"]

_MOST_RECORDS = 2048
_BOARD_SECONDS = 30


def _mean(records: Sequence[MonitorRecord]) -> MonitorRecord:
    """Merge neighbouring records: means per step, time-weighted shares, and the maximum memory."""
    if len(records) == 1:
        return records[0]

    steps = [record.steps for record in records]
    times = [record.steps * record.seconds for record in records]

    def average(name: str, weights: Sequence[float] = steps) -> float | None:
        values = list(map(attrgetter(name), records))
        return None if None in values or not any(weights) else float(np.average(values, weights=weights))

    phases = {x.name: average(f"phases.{x.name}", times) or 0.0 for x in fields(PhaseShares)}
    memory = ([x for x in map(attrgetter(name), records) if x] for name in ("memory", "device_memory"))
    largest, on_device = (max(found, default=None) for found in memory)
    return replace(
        records[-1],
        seconds=average("seconds") or 0.0,
        tokens=round(average("tokens") or 0.0),
        phases=PhaseShares(**phases),
        compile_seconds=average("compile_seconds") or 0.0,
        memory=largest,
        device_memory=on_device,
        utilisation=average("utilisation", times),
        steps=sum(steps),
        attention_seconds=average("attention_seconds"),
        attention_flops=average("attention_flops"),
        loss=average("loss"),
    )


class Thinned:
    """Records of a run of any length in bounded memory. If there are too many, neighbours are averaged.

    Args:
        most: Maximum number of records.

    Example:
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
        """Add the record of a step."""
        self._open.append(record)
        if len(self._open) < self._stride:
            return
        self._kept.append(_mean(self._open))
        self._open = []
        if len(self._kept) >= self._most:
            self._kept = [_mean(self._kept[i : i + 2]) for i in range(0, len(self._kept), 2)]
            self._stride *= 2

    def all(self) -> tuple[MonitorRecord, ...]:
        """Return the records so far. The last record may cover fewer steps than the others."""
        return (*self._kept, *([_mean(self._open)] if self._open else []))


def _scalars(record: MonitorRecord) -> dict[str, float]:
    """Convert a record to TensorBoard scalars by tag, in common units. Unknown values are left out."""

    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else value / unit

    known = {
        "attention/tflops": scaled(record.attention_flops_per_second, 1e12),
        "attention/share_of_ceiling": record.ceiling_share,
        "attention/share_of_step": record.attention_share,
        "step/seconds": record.seconds,
        "step/tokens_per_second": record.tokens_per_second,
        "step/compile_seconds": record.compile_seconds,
        "machine/memory_gib": scaled(record.memory, 2**30),
        "machine/device_memory_gib": scaled(record.device_memory, 2**30),
        "machine/utilisation": record.utilisation,
        **{f"phases/{name}": share for name, share in to_plain(record.phases).items()},
    }
    return {tag: figure for tag, figure in known.items() if figure is not None}


class RecordLog:
    """Records of a run, stored on disk, so that a process that crashes loses none.

    ``monitor.jsonl`` gets a line for each finished step. ``tensorboard/monitor/`` gets scalars, which are
    means over the steps since the previous scalars. ``monitor.json`` is a results file, which is replaced
    periodically.

    Args:
        folder: Folder of the files. It is created if it is missing.
        taken: Number of steps taken before. Their records stay. Records of later steps belong to an
            interrupted run and are removed.
        every: Number of steps between two sets of scalars.
        save_seconds: Seconds between two writes of ``monitor.json``.
        environment: The machine, for ``monitor.json``.
    """

    def __init__(
        self, folder: Path, *, taken: int, every: int, save_seconds: float, environment: dict[str, Any]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, journal = folder / "monitor.json", folder / "monitor.jsonl"
        self._journal = MetricsLog(journal, taken)
        self._records, self._evaluations = Thinned(), list[Evaluation]()
        for number, line in enumerate(journal.read_text().splitlines(), 1):
            self._take(json.loads(line), f"{journal} line {number}")
        self._board = FileWriter(str(folder / "tensorboard" / "monitor"), flush_secs=_BOARD_SECONDS)
        # TensorBoard drops scalars that an earlier process wrote from this step on.
        self._board.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step=taken + 1)
        self._every, self._unshown = every, list[MonitorRecord]()
        self._save_seconds, self._saved = save_seconds, time.monotonic()
        self._environment = environment

    def write(self, record: MonitorRecord) -> None:
        """Add the record of the next step."""
        self._journal.write(to_plain(record))
        self._records.add(record)
        self._unshown.append(record)
        if len(self._unshown) >= self._every:
            self._show()
        if time.monotonic() - self._saved >= self._save_seconds:
            self.save()

    def evaluate(self, evaluation: Evaluation) -> None:
        """Add a held-out loss."""
        self._journal.write(to_plain(evaluation))
        self._evaluations.append(evaluation)

    def results(self) -> Results:
        """The records so far, as results."""
        evaluations = tuple(self._evaluations)
        return Results(environment=self._environment, monitor=self._records.all(), evaluations=evaluations)

    def _take(self, line: dict[str, Any], where: str) -> None:
        if "held_out" in line:
            self._evaluations.append(from_plain(Evaluation, line, where))
        else:
            self._records.add(from_plain(MonitorRecord, line, where))

    def save(self) -> None:
        """Replace ``monitor.json``."""
        self.results().save(self._path)
        self._saved = time.monotonic()

    def close(self) -> None:
        """Write the remaining records, and close the files."""
        if self._unshown:
            self._show()
        self.save()
        self._board.close()
        self._journal.close()

    def _show(self) -> None:
        mean = _mean(self._unshown)
        # One event for all scalars, because each event wakes the writer's thread.
        values = [Summary.Value(tag=tag, simple_value=figure) for tag, figure in _scalars(mean).items()]
        self._board.add_summary(Summary(value=values), mean.step)
        self._unshown = []
