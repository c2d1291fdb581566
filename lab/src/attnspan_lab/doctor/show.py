"""A diagnosis in the terminal, as JUnit XML, and as a page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.coverage import checked_in, unchecked_in
from attnspan_lab.doctor.findings import Diagnosis, Finding
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import counted
from attnspan_lab.files import write_whole
from attnspan_lab.report.charts import Chart, Entry, Section, Table, axis, plain
from attnspan_lab.report.page import write_sections

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["facts_of", "relative", "rows_of", "show", "write_junit", "write_page"]

# Style and heading of each severity.
_SEVERITIES = {
    "stops": ("bold red", "stop the examination"),
    "wrong": ("bold red", "wrong results"),
    "compile": ("bold yellow", "compiler"),
    "slow": ("bold cyan", "time and memory"),
    "note": ("dim", "notes"),
}
_OUTPUT_LINES = 20  # Lines of a benchmark's output that are shown.
_LEAD = "Findings on attention and torch.compile in this model, each with its line, cause and remedy."


def rows_of(finding: Finding) -> list[tuple[str, str]]:
    """List the parts of a finding, each with its heading."""
    where = [relative(x) + (f"  {x.text}" if x.text else "") for x in finding.places]
    rows = [("where" if i == 0 else "via", text) for i, text in enumerate(where)]
    rows += [("why", finding.cause), ("do", finding.remedy), ("tried", finding.tried)]
    rows += [("seen", text) for text in finding.evidence]
    for x in finding.others:
        line = " ".join(map(relative, x.places[:1]))
        rows.append(("also", f"{line}  {x.kind}: {'. '.join((x.what, *x.evidence))}"))
    rows += [("known", text) for text in finding.known]
    return [(heading, text) for heading, text in rows if text]


def relative(place: Place | str) -> str:
    """Write a place with a short path: relative to site-packages, or to the working directory if near it."""
    package = str(place).rpartition("/site-packages/")[2]
    short = os.path.relpath(str(place))
    return package if package != str(place) else short if not short.startswith("../..") else package


def facts_of(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """List measurements as headings and texts."""
    eager, compiled = diagnosis.facts.get("eager", {}), diagnosis.facts.get("compiled", {})
    found = _timed(diagnosis.facts.get("timing", {}))
    if eager:
        found.append(("attention", f"{counted(eager.get('attention calls', 0), 'call')} a step"))
        for place, kernel, count in eager.get("sites", ()):
            found.append(("  kernel", f"{relative(place)}  {kernel} x{count}"))
        found.append(("largest tensor", bytes_text(eager.get("largest tensor"))))
    if compiled:
        counts, note = _counts(compiled), compiled.get("note", "")
        text = f"{counts}, {seconds_text(compiled['compile seconds'])}"
        found.append(("compiler", f"{text} ({note}, each compiles once)" if note else text))
    parity = diagnosis.facts.get("parity", {})
    if "errors" in parity:
        names = ("results", "gradients")
        like = [f" (eager {x:.1e})" for x in parity.get("eager errors", ())] or ["", ""]
        errors = zip(names, parity["errors"], like, strict=False)  # JAX may have no gradient to compare.
        text = ", ".join(f"{name} {error:.1e}{eager}" for name, error, eager in errors)
        found.append((f"error of {parity['backend']}", text))
    cure = diagnosis.facts.get("cure", {})
    found += [(f"with {name}", _cured(cure[name])) for name in ("own", "attnspan") if name in cure]
    if "difference" in cure:
        output, gradient = cure["difference"]
        text = f"gradients {gradient:.1e}" if isfinite(gradient) else "one of them has no gradients"
        found.append(("they differ by", f"results {output:.1e}, {text}"))
    return found


def _timed(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """List what a benchmark printed, and its timed regions."""
    lines = facts.get("output", "").splitlines()[-_OUTPUT_LINES:]
    found = [("printed" if i == 0 else "", text) for i, text in enumerate(lines)]
    for region in facts.get("regions", ()):
        found.append(("timed", relative(region["place"]) if region["place"] else "unknown lines"))
        found.append(("  your samples", f"{seconds_text(region['own'])} for each call, {region['amount']}"))
        if region["in a row"] is None:
            found.append(("  again, warm", region["each"] or f"not measured: {region['why not']}"))
        else:
            found += [("  waiting each", region["each"]), ("  in a row", region["in a row"])]
    return found


def _counts(facts: dict[str, Any]) -> str:
    return ", ".join(counted(facts[f"{x}s"], x) for x in ("graph", "break", "recompile"))


def _cured(facts: dict[str, Any]) -> str:
    if facts["error"]:
        return f"fails: {facts['error'].splitlines()[0]}"
    step, peak = seconds_text(facts["step seconds"]), bytes_text(facts["peak bytes"])
    return f"{_counts(facts)}, step {step}, peak {peak}"


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print findings first, then measurements."""
    from rich.padding import Padding
    from rich.table import Table as Grid

    def rows(listed: Iterable[tuple[str, str]], indent: int, width: int) -> None:
        grid = Grid.grid(padding=(0, 1))
        grid.add_column(style="dim", min_width=width)
        grid.add_column(overflow="fold")
        for heading, text in listed:
            grid.add_row(heading, text.replace("[", "\\["))
        console.print(Padding(grid, (0, 0, 0, indent)))

    console.print(f"\n{diagnosis.subject}", style="bold", markup=False)
    if not diagnosis.findings:
        console.print("No findings in what was checked.")
    for number, finding in enumerate(diagnosis.findings, 1):
        style = _SEVERITIES[finding.severity][0]
        times = f"  x{finding.count}" if finding.count > 1 else ""
        console.print(f"\n{number}. [{style}]{finding.kind}[/{style}]{times}  ", end="")
        console.print(finding.what, markup=False)
        rows(rows_of(finding), 3, 5)
    console.print()
    for heading, text in facts_of(diagnosis):
        console.print(f"{heading:<16} {text}", markup=False)
    console.print(f"{'examined in':<16} {seconds_text(diagnosis.seconds)}")
    for title, told in (
        ("checked", checked_in(diagnosis.facts)),
        ("not checked", unchecked_in(diagnosis.facts)),
    ):
        if told:
            console.print(f"\n{title}")
            rows(told.items(), 2, 16)


def write_junit(diagnosis: Diagnosis, exceeded: Sequence[str], path: Path, *, limited: bool) -> None:
    """Write JUnit XML with one test case for each finding and each exceeded limit.

    The cases that fail are the reasons for the exit status 1: findings that fail, exceeded limits, and an
    interruption. All other findings pass, with their text as output. Without findings and exceeded limits,
    the file has one case that passes. A check that was not possible is a skipped case.
    """
    cases = [
        (
            f"{x.kind}: {x.what}",
            "failure" if x.fails(limited=limited) else "system-out",
            x.what,
            "\n".join(f"{heading}: {text}" for heading, text in rows_of(x)),
        )
        for x in diagnosis.findings
    ]
    cases += [(f"limit: {x}", "failure", x, x) for x in exceeded]
    if not diagnosis.complete:
        what = "the examination did not end"
        cases.append((f"interrupted: {what}", "failure", what, ""))
    cases = cases or [("healthy: no finding", "system-out", "", "")]
    cases += [(f"check: {topic}", "skipped", why, "") for topic, why in unchecked_in(diagnosis.facts).items()]
    counts = Counter(result for _, result, *_ in cases)
    numbers = {"tests": len(cases), "failures": counts["failure"], "skipped": counts["skipped"]}
    suite = ElementTree.Element(
        "testsuite", {"name": "attnspan doctor"} | {k: str(n) for k, n in numbers.items()}
    )
    for name, result, what, text in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=diagnosis.subject, name=name)
        about = {} if result == "system-out" else {"message": what}
        ElementTree.SubElement(case, result, about).text = text
    write_whole(path, ElementTree.tostring(suite, encoding="unicode", xml_declaration=True))


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write one self-contained HTML file with findings, timeline, mask and matrix.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).
    """
    counts = Counter(_SEVERITIES[x.severity][1] for x in diagnosis.findings)
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
