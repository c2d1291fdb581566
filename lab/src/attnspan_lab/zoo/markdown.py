"""Writer of the tables in docs/zoo.md, between two marks, from a results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnspan.errors import expect
from attnspan_lab.files import write_whole
from attnspan_lab.zoo.results import ZooResults
from attnspan_lab.zoo.table import (
    COLUMNS,
    SPEED_COLUMNS,
    headlines,
    line_of,
    median_line,
    speed_line,
    total_lines,
)
from attnspan_lab.zoo.verdicts import JUDGED, complaints, summary_of

__all__ = ["BEGIN", "END", "markdown_of", "write_markdown"]

#: `write_markdown` writes between these two lines.
BEGIN, END = "<!-- figures of attnspan zoo: begin -->", "<!-- figures of attnspan zoo: end -->"


def write_markdown(results: ZooResults, path: Path) -> None:
    """Write the tables into a file, between its marks. A missing file is created.

    Raises:
        OptionError: The file has no marks, or cannot be written.
    """
    text = f"{BEGIN}\n"
    before, after = text, f"{END}\n"
    if path.exists():
        old = path.read_text(encoding="utf-8")
        fits = old.count(BEGIN) == 1 and old.count(END) == 1 and old.index(BEGIN) < old.index(END)
        wanted, remedy = f"the lines {BEGIN} and {END}", "Add these lines, or pass a new file"
        expect(fits, str(path), wanted, "a file without", remedy)
        before = old[: old.index(BEGIN)] + before
        after = old[old.index(END) :]
    write_whole(path, f"{before}\n{markdown_of(results)}\n{after}")


def markdown_of(results: ZooResults) -> str:
    """Make all tables as Markdown."""
    parts = [_measured("Measured", results.environment)]
    if not results.complete:
        parts.append("**The run was stopped before its last architecture.**")
    if results.rows:
        summary = summary_of(results.rows)
        parts.append("\n".join(f"- {x}" for x in headlines(summary)))
        parts.append(_table(("", *JUDGED), total_lines(summary)))
        wrong = [f"- {row.name}, {x}" for row in results.rows for x in complaints(row)]
        parts.append("attnspan fails these checks:\n\n" + "\n".join(wrong) if wrong else "")
    if results.speed:
        parts.append(_measured("Training steps, measured", results.speed_environment))
        lines = [*map(speed_line, results.speed), _bold(results)]
        parts.append(_table([x.name for x in SPEED_COLUMNS], lines))
    if results.rows:
        table = _table([x.name for x in COLUMNS], [line_of(row) for row in results.rows])
        parts.append(_folded("All architectures", table))
    if results.left_out:
        parts.append(_folded("Left out", _table(("family", "reason"), list(results.left_out.items()))))
    return "\n\n".join(x for x in parts if x)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _measured(how: str, where: Mapping[str, Any]) -> str:
    if not where:
        return ""
    versions = {k: v for k, v in where.get("versions", {}).items() if v and k in ("torch", "transformers")}
    shown = [str(where.get("cpu")), *(f"{k} {v}" for k, v in versions.items())]
    return f"{how} on {', '.join(shown)}, {str(where.get('date'))[:10]}."


def _bold(results: ZooResults) -> list[str]:
    return [f"**{x}**" if x else "" for x in median_line(results.speed)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |" for line in lines)
