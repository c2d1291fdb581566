"""A diagnosis in the terminal and as JUnit XML."""

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

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SEVERITIES", "facts_of", "relative", "rows_of", "show", "write_junit"]

#: Style and heading of each severity.
SEVERITIES = {
    "stops": ("bold red", "stop the examination"),
    "wrong": ("bold red", "wrong results"),
    "compile": ("bold yellow", "compiler"),
    "slow": ("bold cyan", "time and memory"),
    "note": ("dim", "notes"),
}
_OUTPUT_LINES = 20  # Lines of a benchmark's output that are shown.


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
        style = SEVERITIES[finding.severity][0]
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
