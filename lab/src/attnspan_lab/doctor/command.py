"""``attnspan doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from attnspan.errors import expect
from attnspan_lab.console import chosen, progress, stdout
from attnspan_lab.doctor.coverage import checked_in, unchecked_in
from attnspan_lab.doctor.findings import Diagnosis, Finding, merged
from attnspan_lab.doctor.run import DEFAULT_STAGES, MORE_STAGES, diagnose, diagnose_benchmark
from attnspan_lab.doctor.words import counted
from attnspan_lab.files import check_writable, write_json

__all__ = ["doctor"]

_KNOWN = (*DEFAULT_STAGES, *MORE_STAGES)
_what, _limit, _where = (
    partial(Option, rich_help_panel=title) for title in ("Examination", "Limits for CI", "Output")
)
_JUNIT = (
    "write JUnit XML to this file, with one test case for each finding and each exceeded limit; "
    "the cases that fail are the reasons for exit status 1"
)
_TARGET = (
    "file.py:factory, pkg.module:factory, a class of transformers or diffusers, or -- python train.py ..."
)


def doctor(
    target: Annotated[list[str], Argument(help=_TARGET, metavar="TARGET")],
    stages: Annotated[str, _what(help=f"comma-separated list of {', '.join(_KNOWN)}")] = ",".join(
        DEFAULT_STAGES
    ),
    timing: Annotated[
        bool, _what("--timing", help="examine how a script measures time: --timing -- python bench.py")
    ] = False,
    quick: Annotated[
        bool, _what("--quick", help="run only the stage eager, which does not use the compiler")
    ] = False,
    backend: Annotated[
        str, _what(help="torch.compile backend of the step that is compared with eager mode")
    ] = "inductor",
    limit: Annotated[float, _what(min=5, help="time limit of each stage, in seconds")] = 300.0,
    max_breaks: Annotated[int | None, _limit(min=0, help="maximum number of graph breaks")] = None,
    max_graphs: Annotated[int | None, _limit(min=0, help="maximum number of compiled graphs")] = None,
    max_recompiles: Annotated[int | None, _limit(min=0, help="maximum number of recompilations")] = None,
    max_copies: Annotated[
        int | None, _limit(min=0, help="maximum number of lines that copy q, k or v")
    ] = None,
    try_: Annotated[
        str, _what("--try", help='"attnspan" also runs the model with attnspan\'s attention')
    ] = "",
    parity: Annotated[
        bool, _limit("--parity", help="require that compiled results equal eager results")
    ] = False,
    json: Annotated[Path | None, _where(help="write findings and measurements to this JSON file")] = None,
    junit: Annotated[Path | None, _where(help=_JUNIT)] = None,
    page: Annotated[Path | None, _where(help="write a self-contained HTML page to this file")] = None,
) -> None:
    """Find faults and costs of a model's attention in PyTorch or JAX, and suggest a fix for each."""
    from attnspan_lab.doctor.page import write_page
    from attnspan_lab.doctor.show import relative, show, write_junit

    for path in (json, junit, page):
        if path is not None:
            check_writable(path)
    expect(
        try_ in ("", "attnspan"), "--try", "attnspan", repr(try_), "Pass --try attnspan, or leave --try out"
    )
    got, remedy = f"--stages {stages} as well", "Pass one of them"
    expect(not quick or stages == ",".join(DEFAULT_STAGES), "--quick", "no other stages", got, remedy)
    asked = ("eager",) if quick else chosen("--stages", stages, _KNOWN)
    wanted = (*asked, *(["cure"] if try_ else []))
    expect(wanted, "--stages", f"some of {', '.join(_KNOWN)}", "none", "Pass at least one of these")
    is_python = target[0].rpartition("/")[2].startswith("python") and len(target) > 1
    name, *arguments = target[1:] if is_python else target
    is_script = ":" not in name and name.endswith(".py")
    got, remedy = " ".join(target), "Only scripts take arguments. Write them after --"
    expect(is_script or not arguments, "attnspan doctor", "one target", got, remedy)
    if timing:
        wanted_target = "a script: attnspan doctor --timing -- python bench.py"
        expect(is_script, "--timing", wanted_target, name, "Pass the benchmark as you would to python")
        expect(not (quick or try_), "--timing", "no other stages", got, "Pass one of them")
        wanted = ("timing",)
    console = stdout()
    shown = set[tuple[str, str]]()
    with progress(console, len(wanted), wanted[0]) as tell:

        def seen(finding: Finding) -> None:
            # A target that cannot be examined has only this finding, which is shown at once.
            if finding.label not in shown and finding.kind != "subject":
                where = f"  {relative(finding.places[0])}" if finding.places else ""
                tell(f"{finding.kind}{where}  {finding.what}")
            shown.add(finding.label)

        def after(stage: str, found: Sequence[Finding], facts: dict[str, dict[str, Any]]) -> None:
            explains = stage == "without attention"  # Its findings only explain others.
            line = "done" if explains else _outcome(found, facts)
            tell(f"{stage}: {line}", style="dim", advance=stage in wanted)

        def running(names: Sequence[str]) -> None:
            tell(description=", ".join(names))

        if timing:
            found = diagnose_benchmark(name, arguments, limit=limit, seen=seen)
        else:
            found = diagnose(
                name,
                arguments,
                stages=wanted,
                backend=backend,
                limit=limit,
                running=running,
                after=after,
                seen=seen,
            )
    limits = {"breaks": max_breaks, "graphs": max_graphs, "recompiles": max_recompiles, "copies": max_copies}
    exceeded = _exceeded(found, limits, parity=parity)
    limited = parity or any(x is not None for x in limits.values())
    show(found, console)
    for text in exceeded:
        console.print(f"over the limit: {text}", style="bold red")
    if json is not None:
        write_json(json, found)
    if junit is not None:
        write_junit(found, exceeded, junit, limited=limited)
    if page is not None:
        write_page(found, page)
        console.print(f"page: {page}")
    bad = bool(exceeded) or any(x.fails(limited=limited) for x in found.findings)
    raise Exit(130 if not found.complete else int(bad))


def _outcome(found: Sequence[Finding], facts: dict[str, dict[str, Any]]) -> str:
    """Say what a stage found. A stage that could check nothing does not say that it found nothing."""
    if found:
        return counted(len(merged(found)), "finding")
    if not unchecked_in(facts):
        return "no finding"
    return "no finding in what was checked" if checked_in(facts) else "not checked"


def _exceeded(found: Diagnosis, limits: dict[str, int | None], *, parity: bool) -> list[str]:
    """Describe the limits that a diagnosis exceeds. A missing count exceeds its limit."""
    copies = sum(y.kind in ("copy", "kv-copy") for x in found.findings for y in (x, *x.others))
    counts = {"copies": copies} if "eager" in found.facts else {}
    counts |= found.facts.get("compiled", {})
    said = [
        f"{name}: {counts.get(name, 'not counted')}, at most {most}"
        for name, most in limits.items()
        if most is not None and counts.get(name, inf) > most
    ]
    if parity and (
        "errors" not in found.facts.get("parity", {}) or any(x.kind == "parity" for x in found.findings)
    ):
        said.append("parity: compiled results differ from eager results, or were not compared")
    return said
