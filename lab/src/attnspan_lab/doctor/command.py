"""``attnspan doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument, Exit, Option

from attnspan.errors import expect
from attnspan_lab.console import stdout, words
from attnspan_lab.doctor.findings import Diagnosis, Finding
from attnspan_lab.doctor.run import DEFAULT_STAGES, MORE_STAGES, diagnose
from attnspan_lab.files import check_writable, write_json

__all__ = ["doctor"]

_WHAT, _LIMITS, _WHERE = "What is examined", "Limits for CI", "Where results go"


def doctor(
    target: Annotated[
        list[str],
        Argument(
            help="pkg.module:factory, a class of transformers or diffusers, or -- python train.py ...",
            metavar="TARGET",
        ),
    ],
    stages: Annotated[
        str, Option(help=f"some of {', '.join((*DEFAULT_STAGES, *MORE_STAGES))}", rich_help_panel=_WHAT)
    ] = ",".join(DEFAULT_STAGES),
    backend: Annotated[
        str, Option(help="of the compiled step that is compared with eager", rich_help_panel=_WHAT)
    ] = "inductor",
    limit: Annotated[float, Option(min=5, help="seconds for each stage", rich_help_panel=_WHAT)] = 300.0,
    max_breaks: Annotated[
        int | None, Option(min=0, help="most graph breaks", rich_help_panel=_LIMITS)
    ] = None,
    max_graphs: Annotated[
        int | None, Option(min=0, help="most compiled graphs", rich_help_panel=_LIMITS)
    ] = None,
    max_recompiles: Annotated[
        int | None, Option(min=0, help="most recompilations", rich_help_panel=_LIMITS)
    ] = None,
    max_copies: Annotated[
        int | None, Option(min=0, help="most lines that copy q, k or v", rich_help_panel=_LIMITS)
    ] = None,
    try_: Annotated[
        str, Option("--try", help="attnspan: also run the model with its attention", rich_help_panel=_WHAT)
    ] = "",
    parity: Annotated[
        bool, Option("--parity", help="compiled results have to equal eager ones", rich_help_panel=_LIMITS)
    ] = False,
    json: Annotated[Path | None, Option(help="all findings and figures", rich_help_panel=_WHERE)] = None,
    junit: Annotated[Path | None, Option(help="findings as failed tests", rich_help_panel=_WHERE)] = None,
    page: Annotated[
        Path | None, Option(help="a page that needs nothing else", rich_help_panel=_WHERE)
    ] = None,
) -> None:
    """Say what is wrong with a model's attention under torch.compile."""
    from attnspan_lab.doctor.show import show, write_junit, write_page

    for path in (json, junit, page):
        if path is not None:
            check_writable(path)
    expect(try_ in ("", "attnspan"), "--try", "attnspan", repr(try_), "There is one cure")
    chosen = (*words(stages), *(["cure"] if try_ else []))
    known = (*DEFAULT_STAGES, *MORE_STAGES)
    wanted = f"some of {', '.join(known)}"
    expect(chosen, "--stages", wanted, "none", "Name one of these")
    for stage in chosen:
        expect(stage in known, "--stages", wanted, repr(stage), "Name one of these")
    is_python = target[0].rpartition("/")[2].startswith("python") and len(target) > 1
    name, *arguments = target[1:] if is_python else target
    is_script = ":" not in name and name.endswith(".py")
    got, remedy = " ".join(target), "Only a script has arguments; write them after --"
    expect(is_script or not arguments, "attnspan doctor", "one target", got, remedy)
    console = stdout()
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(chosen[0], total=len(chosen))

        def after(stage: str, found: Sequence[Finding]) -> None:
            step = chosen.index(stage) + 1 if stage in chosen else None
            next_ = chosen[step] if step is not None and step < len(chosen) else "done"
            progress.update(task, completed=step, description=next_)
            progress.console.print(
                f"{stage}: {len(found)} findings" if found else f"{stage}: ok", style="dim"
            )

        found = diagnose(name, arguments, stages=chosen, backend=backend, limit=limit, after=after)
    limits = {"breaks": max_breaks, "graphs": max_graphs, "recompiles": max_recompiles, "copies": max_copies}
    exceeded = _exceeded(found, limits, parity=parity)
    show(found, console)
    for text in exceeded:
        console.print(f"over the limit: {text}", style="bold red")
    if json is not None:
        write_json(json, found)
    if junit is not None:
        write_junit(found, exceeded, junit)
    if page is not None:
        write_page(found, page)
        console.print(f"page: {page}")
    given = parity or any(x is not None for x in limits.values())
    stopped = any(x.severity == "stops" for x in found.findings)
    bad = any(x.fails for x in found.findings)
    raise Exit(130 if not found.complete else 1 if exceeded or stopped or (bad and not given) else 0)


def _exceeded(found: Diagnosis, limits: dict[str, int | None], *, parity: bool) -> list[str]:
    """The limits that a diagnosis does not keep; a count that could not be taken keeps none."""
    counts = {name: found.facts.get("compiled", {}).get(name) for name in ("breaks", "graphs", "recompiles")}
    copies = [x for x in found.findings if x.kind in ("copy", "kv-copy")]
    counts["copies"] = len(copies) if "eager" in found.facts else None
    said = []
    for name, most in limits.items():
        count = counts[name]
        if most is not None and (count is None or count > most):
            said.append(f"{name}: {'not counted' if count is None else count}, at most {most}")
    if parity and (
        "errors" not in found.facts.get("parity", {}) or any(x.kind == "parity" for x in found.findings)
    ):
        said.append("parity: compiled results are not those of eager mode, or were not compared")
    return said
