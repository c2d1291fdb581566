"""A journal: one JSON line for each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnspan.errors import expect
from attnspan_lab.files import write_whole

__all__ = ["MetricsLog"]


class MetricsLog:
    """One JSON line per step, continued after ``step`` steps as if nothing had happened."""

    def __init__(self, path: Path, step: int) -> None:
        # Later lines are of a run that was cut off. The last one may be cut short: then it has no newline.
        whole = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        kept = [line for number, line in enumerate(whole, 1) if _step(line, number, path) <= step]
        write_whole(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a")

    def write(self, figures: dict[str, Any]) -> None:
        """Append JSON values, "step" among them, and hand them to the system: a killed process keeps them."""
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _step(line: bytes, number: int, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        step = None
    remedy = "Remove that line, or move the file away; only the log of past steps is lost"
    expect(
        isinstance(step, int),
        f"line {number} of {path}",
        "a JSON object with a step",
        repr(line[:80]),
        remedy,
    )
    return int(step)
