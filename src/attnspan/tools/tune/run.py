"""One search after the other, each kept at once in the file that `attnspan.kernels.tuned` reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from attnspan.files import write_json
from attnspan.kernels.tuned import header, read
from attnspan.tools.bench.timing import Meter
from attnspan.tools.tune.cases import Case
from attnspan.tools.tune.search import search

__all__ = ["Backend", "other_seconds", "run", "save"]

_MOST_OTHERS = 0.2  # processors. Next to busy processes, fewer threads look faster than they are.


class Backend(Protocol):
    """A backend that can be tuned. Its configurations are a frozen dataclass of integers."""

    name: str
    isa: str  # instruction-set level or architecture
    device: str  # the machine that the cache belongs to

    def open(self, case: Case) -> dict[str, Any]:
        """Make the arrays of a case, and the arguments of `search`; raise if the case cannot run."""


def run(
    backend: Backend,
    cases: Iterable[Case],
    path: Path | None,
    *,
    seconds: float,
    minutes: float,
    meter: Meter | None = None,
) -> Iterator[dict[str, Any]]:
    """Search for ``seconds`` per case until ``minutes`` are over. Cases without an entry come first.

    Yields:
        The entry of each case, which is also written to ``path`` unless the case cannot run.

    Raises:
        OptionError: The file cannot be written.
    """
    meter = meter or Meter()
    end = meter.clock() + 60 * minutes
    if path:
        save(path, backend.device)  # An error now is better than one after a search.
    known = read(path, backend.device) if path else []
    dates = {str(entry["key"]): str(entry.get("date")) for entry in known}
    waiting = [(asdict(case.key(backend.name, backend.isa)), case) for case in cases]
    for key, case in sorted(waiting, key=lambda x: dates.get(str(x[0]), "")):
        if (left := end - meter.clock()) <= 0:
            return
        try:
            entry = {"key": key, **_search(backend, case, min(seconds, left), meter)}
        except Exception as error:  # of the default configuration
            yield {"key": key, "config": {}, "reason": f"cannot run: {error}"}
            continue
        if path:
            save(path, backend.device, entry)
        yield entry


def _search(backend: Backend, case: Case, seconds: float, meter: Meter) -> dict[str, Any]:
    call, start, before = backend.open(case), meter.clock(), other_seconds()
    found = search(**call, seconds=seconds, meter=meter)
    others = (other_seconds() - before) / max(meter.clock() - start, 1e-9)
    if others > _MOST_OTHERS and found.config != call["default"]:
        reason = f"not used: other processes kept {others:.1f} processors busy"
        found = replace(found, config=call["default"], reason=reason)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {**asdict(found), "call": {**asdict(case), "heads": case.heads}, "date": date}


def other_seconds() -> float:
    """Processor time that other processes have used; constant on systems without /proc/stat."""
    try:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def save(path: Path, device: str, *entries: dict[str, Any]) -> None:
    """Add entries, in place of those of the same keys. A file that cannot be read is replaced."""
    kept = [old for old in read(path, device) if all(old["key"] != x["key"] for x in entries)]
    remedy = "Set ATTNSPAN_TUNE_CACHE to another folder"
    write_json(path, {**header(device), "entries": [*kept, *entries]}, remedy=remedy)
