"""Examination of a model. Each stage has its own process, so a crash or a hang becomes a finding."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnspan_lab.bench.environment import describe_environment, usable_cores
from attnspan_lab.children import Child, Loaded
from attnspan_lab.doctor.findings import Diagnosis, Finding, merged
from attnspan_lab.doctor.places import is_installed
from attnspan_lab.doctor.process import Stage, run_together

__all__ = ["DEFAULT_STAGES", "MORE_STAGES", "diagnose", "diagnose_benchmark"]

#: Default stages, in the order in which they run.
DEFAULT_STAGES = ("eager", "compiled", "parity")
#: Opt-in stages.
MORE_STAGES = ("cure", "features", "ranks")
#: What each default stage checks.
_TOPICS = {"eager": "eager steps", "compiled": "compiler", "parity": "compiled results"}
# Stages that run alone: they measure time, or have several processes.
_ALONE = ("eager", "compiled", "cure", "ranks")
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # Threads that wait actively would slow down a stage at the same time.
    "TORCH_WARM_POOL": "0",  # Inductor's import must start no process: forks would share its pipes.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Otherwise a look for GPUs starts CUDA before the fork.
}
#: Remedies for findings in a library's own lines, which its user cannot edit.
_SWITCHES = {
    "transformers": 'The line is transformers\' own. Make the model with attn_implementation="attnspan", '
    "after import attnspan.integrations.transformers",
    "diffusers": "The line is diffusers' own. Call attnspan.integrations.diffusers.enable(model)",
}
#: Remedy for leaks between documents in transformers, which finds documents only in the batch.
_PACKED = (
    "Pass position_ids that start again at each document, use_cache=False and no attention_mask. "
    'With attn_implementation="attnspan", you can leave out use_cache=False'
)
_OF_ATTENTION = ("unfused", "dense-mask", "kv-copy", "copy", "upcast", "leak", "mask-lost", "causality-lost")
_MODULE = "attnspan_lab.doctor.child"
_TIMING = "attnspan_lab.doctor.timing.child"


def diagnose(
    target: str,
    arguments: Sequence[str] = (),
    *,
    stages: Sequence[str] = DEFAULT_STAGES,
    backend: str = "inductor",
    limit: float = 300.0,
    running: Callable[[Sequence[str]], None] = lambda _: None,
    after: Callable[[str, Sequence[Finding], dict[str, dict[str, Any]]], None] = lambda *_: None,
    seen: Callable[[Finding], None] = lambda _: None,
) -> Diagnosis:
    """Find problems of a model's attention: in the compiler, in memory, in copies and in masks.

    Args:
        target: One of: ``pkg.module:factory``, with a factory that returns a model and an iterable of
            batches; a model type or class of transformers or diffusers, which is built tiny; a script that
            compiles a model.
        arguments: Arguments of the script.
        stages: Stages to run. "eager", "compiled" and "parity" are the default. "cure" repeats them with
            attnspan's attention. "features" combines compiler and checkpointing, and finds the smallest
            combination that fails. "ranks" compares a step on two ranks with one rank. If the compiler fails,
            the stage "without attention" runs as well. On CPU, stages that measure no time run at the same
            time, at most one for each core.
        backend: Backend of the compiled step that "parity" compares. Tracing finds breaks and recompilations.
        limit: Time limit of each stage, in seconds.
        running: Called with the names of the stages that run, whenever they change.
        after: Called with the name of each stage, its findings and its facts, as soon as the stage ends.
        seen: Called with each finding as soon as it is known.

    Example:
        >>> from attnspan_lab.doctor import diagnose
        >>> diagnose("no_such_module:factory", stages=["eager"]).findings[0].kind
        'subject'
    """
    start, subject, findings = time.monotonic(), target, list[Finding]()
    facts: dict[str, dict[str, Any]] = {}
    cells: list[dict[str, str]] = []
    todo, complete, why = list(stages), True, dict[str, str]()
    most, loads = 1, tuple[str, ...]()

    def is_seen(finding: Finding) -> None:
        explains = finding.stage == "without attention"  # Its findings only explain others.
        if not (explains or _may_be_guarded(finding)):
            seen(_in_library(finding))

    with Loaded(_MODULE, {}, _QUIET) as loaded:
        environment = describe_environment()  # Both processes load torch at the same time.
        while todo:
            together = [
                Stage(target, tuple(arguments), x, backend if x == "parity" else "aot_eager", limit, is_seen)
                for x in _together(todo, most)
            ]
            try:
                run_together(
                    [(x, partial(loaded.fork, x.task, loads)) for x in together],
                    lambda left: running([x.stage for x in left]),
                    lambda told: after(told.stage, told.findings, told.facts),
                )
            except KeyboardInterrupt:
                todo, complete = [], False
            for told in together:
                findings += told.findings
                facts |= told.facts
                cells += told.cells
                subject = told.subject or subject
                loads, most = told.loads, (usable_cores() or os.cpu_count() or 1) if told.on_cpu else 1
                if told.at:
                    why[told.stage] = "its stage did not end"
            if complete and any(x.is_unloaded for x in together):
                why = dict.fromkeys(DEFAULT_STAGES, "the model could not be loaded")
                break
            failed = any(x.kind in ("graph-break", "compile-error") for x in together[0].findings)
            if together[0].stage == "compiled" and failed and complete:
                todo.insert(0, "without attention")
    facts["stages"] = {"unchecked": _not_run(stages, why, complete=complete, facts=facts)}
    return Diagnosis(
        f"{target}: {subject}" if subject != target else target,
        _completed(findings, facts),
        facts,
        environment,
        tuple(cells),
        seconds=time.monotonic() - start,
        complete=complete,
    )


def _together(todo: list[str], most: int) -> list[str]:
    """Take the next stages that run side by side."""
    taken = [todo.pop(0)]
    while todo and len(taken) < most and not {taken[0], todo[0]}.intersection(_ALONE):
        taken.append(todo.pop(0))
    return taken


def _not_run(
    stages: Sequence[str], why: dict[str, str], *, complete: bool, facts: dict[str, dict[str, Any]]
) -> dict[str, str]:
    """Find the reason for each default stage without a result, by the topic that it checks."""
    found = {}
    for stage, topic in _TOPICS.items():
        if stage in why:
            found[topic] = why[stage]
        elif stage not in stages:
            found[topic] = f"the stage {stage} was not requested"
        elif not complete and stage not in facts:
            found[topic] = "the examination was interrupted"
    return found


def _completed(findings: list[Finding], facts: dict[str, dict[str, Any]]) -> tuple[Finding, ...]:
    """Add results of other stages and upstream issues to the findings, and join findings."""
    isolated = _isolated(findings, facts.get("without attention"))
    ran = facts.get("parity", {})
    if "errors" in ran and ran["backend"] != "aot_eager":
        said = f"backend {ran['backend']} runs the first batch: perhaps only tracing with aot_eager fails"
        isolated = [
            replace(x, evidence=(*x.evidence, said)) if x.kind == "compile-error" else x for x in isolated
        ]
    isolated = _without_guarded_reads(isolated, facts.get("compiled", {}))
    cured = _cured([_in_library(x) for x in isolated], facts.get("cure", {}).get("left"))
    return _joined(merged(_with_known_issues(cured)))


def _joined(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Join costs in a library's own lines that have one remedy, such as an option of the library."""
    alike = dict[Any, list[Finding]]()
    for x in findings:
        joins = x.severity == "slow" and x.remedy and _is_in_library(x)
        alike.setdefault(x.remedy if joins else id(x), []).append(x)
    found = (sorted(own, key=lambda x: -x.cost) for own in alike.values())
    return tuple(replace(first, others=tuple(others)) for first, *others in found)


def _without_guarded_reads(findings: list[Finding], compiled: dict[str, Any]) -> list[Finding]:
    """Leave out values that a library reads in eager mode only. Its compiled code has no break there.

    Args:
        findings: Findings of all stages.
        compiled: Facts of the compiled stage, empty if it did not end.
    """
    if "breaks" not in compiled or any(x.kind == "compile-error" for x in findings):
        return findings
    broken = {place for x in findings if x.kind == "graph-break" for place in x.places}
    return [x for x in findings if not _may_be_guarded(x) or broken.intersection(x.places)]


def _may_be_guarded(finding: Finding) -> bool:
    """Whether a library reads a value, which it may do in eager mode only."""
    return finding.kind == "sync" and _is_in_library(finding)


def _is_in_library(finding: Finding) -> bool:
    return any(is_installed(x.file) for x in finding.places[:1])


def _in_library(finding: Finding) -> Finding:
    """Replace the remedy of a finding in a library's attention by the library's own switch."""
    file = finding.places[0].file if finding.places else ""
    remedy = next((text for name, text in _SWITCHES.items() if f"/site-packages/{name}/" in file), "")
    if remedy and finding.kind == "leak" and "/site-packages/transformers/" in file:
        remedy = _PACKED
    of_attention = finding.kind in _OF_ATTENTION or "flex_attention" in file
    # The doctor tried another remedy.
    return replace(finding, remedy=remedy, tried="") if remedy and of_attention else finding


def _cured(findings: list[Finding], left: Sequence[Sequence[str]] | None) -> list[Finding]:
    """Mark each finding as gone or not with attnspan's attention.

    Args:
        findings: Findings of all stages.
        left: Kind and line of the findings that stay, or None if this was not tried.
    """
    if left is None:
        return findings
    stays = {tuple(x) for x in left}

    def marked(x: Finding) -> Finding:
        said = f"{'stays' if x.label in stays else 'gone'} with attnspan's attention"
        # A switch that does not help is no remedy, so the kind's remedy returns.
        remedy = "" if said.startswith("stays") and x.remedy in _SWITCHES.values() else x.remedy
        return replace(x, tried="; ".join(filter(None, (x.tried, said))), remedy=remedy)

    return [marked(x) if x.stage in ("eager", "compiled") else x for x in findings]


def _isolated(findings: list[Finding], alone: dict[str, Any] | None) -> list[Finding]:
    """Mark each finding of the compiler as gone or not without attention.

    Args:
        findings: Findings of all stages.
        alone: Facts of the stage without attention, or None if it did not end.
    """
    stays = {(x.kind, x.places[:1]) for x in findings if x.stage == "without attention"}
    kept = [x for x in findings if x.stage != "without attention"]
    if alone is None:
        return kept

    def said_of(x: Finding) -> str:
        if any(str(place) in alone.get("lines", ()) for place in x.places[:1]):
            return "this line calls attention, and the call itself fails"
        if "left" in alone:
            return f"not tested without attention: it cannot be taken out ({alone['left']})"
        if (x.kind, x.places[:1]) in stays:
            return "stays if the identity replaces attention: the cause is the code around it"
        return "gone if the identity replaces attention: attention is the cause"

    return [
        replace(x, evidence=(*x.evidence, said_of(x)))
        if x.stage == "compiled" and x.kind in ("graph-break", "compile-error")
        else x
        for x in kept
    ]


def _with_known_issues(findings: Sequence[Finding]) -> list[Finding]:
    """Add upstream issues that match a finding and the installed versions."""
    path = Path(__file__).parent / "known.json"
    issues = [x for x in json.loads(path.read_text()) if _is_installed(x)]

    def known(finding: Finding) -> Iterator[str]:
        lines = (f"{y} {y.text}" for y in finding.places)
        words = " ".join((finding.what, finding.cause, *finding.evidence, *lines))
        for issue in issues:
            if issue["kind"] == finding.kind and re.search(issue["match"], words, re.DOTALL):
                yield f"{issue['says']} ({issue['issue']})"

    return [replace(x, known=tuple(known(x))) for x in findings]


def _is_installed(issue: dict[str, str]) -> bool:
    """Whether the installed version of a package is in the range of an issue."""
    try:
        own = _numbers(version(issue["package"]))
    except PackageNotFoundError:
        return False
    return _numbers(issue["from"]) <= own and (not issue["below"] or own < _numbers(issue["below"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", text.partition("+")[0])[:3])


def diagnose_benchmark(
    path: str,
    arguments: Sequence[str] = (),
    *,
    limit: float = 300.0,
    seen: Callable[[Finding], None] = lambda _: None,
) -> Diagnosis:
    """Find out how a script measures time, and measure its timed statements again.

    Args:
        path: A script that takes the difference of two readings of a clock.
        arguments: Arguments of the script.
        limit: Time limit in seconds.
        seen: Called with each finding.

    Example:
        >>> from attnspan_lab.doctor import diagnose_benchmark
        >>> diagnose_benchmark("no_such_script.py").findings[0].kind
        'subject'
    """
    start = time.monotonic()
    told = Stage(path, tuple(arguments), "timing", "", limit, seen)
    run_together([(told, partial(Child, _TIMING, told.task, _QUIET))])
    findings, seconds = merged(told.findings), time.monotonic() - start
    return Diagnosis(path, findings, told.facts, describe_environment(), seconds=seconds)
