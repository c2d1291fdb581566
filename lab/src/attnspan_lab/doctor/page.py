"""A diagnosis as a self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from attnspan_lab.doctor.coverage import checked_in, unchecked_in
from attnspan_lab.doctor.findings import Diagnosis, Finding
from attnspan_lab.doctor.show import SEVERITIES, facts_of, rows_of
from attnspan_lab.doctor.words import counted
from attnspan_lab.report.charts import Chart, Entry, Section, Table, axis, plain
from attnspan_lab.report.page import write_sections

__all__ = ["write_page"]

_LEAD = "Findings on attention and torch.compile in this model, each with its line, cause and remedy."


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write one self-contained HTML file with findings, timeline, mask and matrix.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).
    """
    counts = Counter(SEVERITIES[x.severity][1] for x in diagnosis.findings)
    cards: list[tuple[str, str, list[str]]] = [(name, str(n), []) for name, n in counts.items()]
    write_sections(
        path,
        title=f"attnspan doctor: {diagnosis.subject.rpartition(': ')[0] or diagnosis.subject}",
        lead=_LEAD,
        sections=(
            *(_section(i, x) for i, x in enumerate(diagnosis.findings, 1)),
            _covered(diagnosis),
            _measured(diagnosis),
            _timeline(diagnosis),
            _mask(diagnosis),
            _matrix(diagnosis),
        ),
        environment=diagnosis.environment,
        glance="findings by severity, and measurements.",
        cards=cards or [("findings", "none", ["in what was checked"])],
        complete=diagnosis.complete,
    )


def _section(number: int, finding: Finding) -> Section:
    caption = f"{finding.kind}, seen {finding.count} times" if finding.count > 1 else finding.kind
    table = Table(caption, ("", "finding"), rows_of(finding))
    return Section(f"finding-{number}", f"{number}. {finding.kind}", finding.what, table=table)


def _covered(diagnosis: Diagnosis) -> Section | None:
    checked, unchecked = checked_in(diagnosis.facts), unchecked_in(diagnosis.facts)
    rows = [(topic, "checked", text) for topic, text in checked.items()]
    rows += [(topic, "not checked", text) for topic, text in unchecked.items()]
    table = Table("One row per check", ("", "", "result or reason"), rows)
    lead = "A missing finding means something only if the check was made."
    return Section("checks", "Checks", lead, table=table) if rows else None


def _measured(diagnosis: Diagnosis) -> Section | None:
    table = Table("Measurements of the steps", ("", "measured"), facts_of(diagnosis))
    lead = "Attention calls, kernels and compilations."
    return Section("measured", "Measured", lead, table=table) if table.rows else None


def _timeline(diagnosis: Diagnosis) -> Section | None:
    """Timeline of compilations and steps."""
    facts = diagnosis.facts.get("compiled", {})
    events = facts.get("timeline", [])
    if not events:
        return None
    first, names = min(x[1] for x in events), [plain(f"{i}. {x[0]}") for i, x in enumerate(events, 1)]
    traces = []
    for trace, color in (("forward", "@ours"), ("backward", "@peer1")):
        own = [(name, x) for name, x in zip(names, events, strict=True) if x[3] == (trace == "forward")]
        y, base, x = [n for n, _ in own], [e[1] - first for _, e in own], [e[2] - e[1] for _, e in own]
        traces.append(_bars(trace, color, y=y, base=base, x=x, orientation="h"))
    down = {"autorange": "reversed", "categoryarray": names}
    layout = {"xaxis": axis("seconds"), "yaxis": down, "barmode": "overlay"}
    alt, height = counted(len(events), "compilation"), max(220, 26 * len(events) + 90)
    chart = Chart("Compilations", "One bar per compilation of a frame", alt, traces, layout, height)
    steps = facts.get("step seconds", [])
    traces = [_bars("step", "@ours", x=[*range(1, len(steps) + 1)], y=steps)]
    layout = {"xaxis": axis("step", dtick=1), "yaxis": axis("seconds", log=True)}
    note = "A step that takes much longer than the last step compiled something"
    again = Chart("Steps", note, counted(len(steps), "step"), traces, layout)
    lead = "Time of tracing and compilation for each frame, and time of each step."
    return Section("timeline", "Timeline", lead, (chart, again), layout="single")


def _bars(name: str, color: str, **more: Any) -> dict[str, Any]:
    return {"type": "bar", "name": name, "marker": {"color": color}, **more}


def _mask(diagnosis: Diagnosis) -> Section | None:
    rows = diagnosis.facts.get("eager", {}).get("mask")
    if not rows:
        return None
    data = _heatmap(["#80808033", "#2f86c5"], z=[[int(x) for x in row] for row in rows])
    layout = {"xaxis": axis("key"), "yaxis": axis("query", autorange="reversed", scaleanchor="x")}
    seen = sum(row.count("1") for row in rows) / max(sum(map(len, rows)), 1)
    note = f"{seen:.0%} of the pairs are visible"
    chart = Chart("Visible pairs", note, "the mask", [data], layout, height=380)
    lead = "The mask of the last attention call, for batch element 0. A pair is shown if any head sees it."
    return Section("mask", "Mask", lead, (chart,), layout="single")


def _heatmap(colors: list[str], **more: Any) -> dict[str, Any]:
    """Make a heat map of zeros and ones."""
    scale = [[0, colors[0]], [1, colors[1]]]
    return {"type": "heatmap", "zmin": 0, "zmax": 1, "showscale": False, "colorscale": scale, **more}


def _matrix(diagnosis: Diagnosis) -> Section | None:
    """Show the combinations of features as a heat map and as a table."""
    cells = diagnosis.cells
    if not cells:
        return None
    across = list(dict.fromkeys(_checkpointing(x) for x in cells))
    down = list(dict.fromkeys(x["compile"] for x in cells))
    results = {(x["compile"], _checkpointing(x)): float(not x["result"]) for x in cells}
    z = [[results.get((y, x)) for x in across] for y in down]
    labels = {"x": list(map(plain, across)), "y": list(map(plain, down))}
    data = _heatmap(["#c44601", "#009e73"], z=z, xgap=3, ygap=3, **labels)
    names, failed = tuple(cells[0]), sum(bool(x["result"]) for x in cells)
    layout = {"xaxis": axis("checkpointing"), "yaxis": axis("compile", autorange="reversed")}
    note = "Green: passes. Red: fails. Empty: not run"
    lead = f"{failed} of {len(cells)} combinations fail"
    chart = Chart("Combinations", note, lead, [data], layout)
    rows = [
        [Entry(x[n] or "ok", badge="fails" if n == "result" and x[n] else "") for n in names] for x in cells
    ]
    table = Table("One row per combination", names, rows)
    return Section("matrix", "Features", f"{lead}.", (chart,), table, layout="single")


def _checkpointing(cell: dict[str, str]) -> str:
    return cell["checkpoint"] if cell["checkpoint"] == "none" else f"{cell['checkpoint']}, {cell['order']}"
