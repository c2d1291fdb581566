"""A journal with one JSON line for each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnspan.errors import expect
from attnspan_lab.files import write_whole

__all__ = ["MetricsLog"]


class MetricsLog:
    """Journal with one JSON line per step.

    Lines after ``step`` are removed, and the journal continues there.
    """

    def __init__(self, path: Path, step: int) -> None:
        # Later lines come from an interrupted run. The last line may be incomplete, without a newline.
        whole = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        kept = [line for number, line in enumerate(whole, 1) if _step(line, number, path) <= step]
        write_whole(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a")

    def write(self, figures: dict[str, Any]) -> None:
        """Append JSON values with a "step", and flush them, so that a killed process loses none."""
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: bytes, number: int, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        step = None
    remedy = "Remove that line, or move the file away. Only the log of past steps is lost"
    what = f"line {number} of {path}"
    expect(isinstance(step, int), what, "a JSON object with a step", repr(line[:80]), remedy)
    return int(step)
