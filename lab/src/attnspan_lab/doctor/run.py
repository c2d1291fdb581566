"""Examination of a model. Each stage has its own process, so a crash or a hang becomes a finding."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.children import Child, why_ended
from attnspan_lab.doctor.findings import Diagnosis, Finding, merged
from attnspan_lab.doctor.places import Place, is_users, lines_in
from attnspan_lab.files import from_plain

__all__ = ["DEFAULT_STAGES", "MORE_STAGES", "diagnose", "diagnose_benchmark"]

#: Default stages, in the order in which they run.
DEFAULT_STAGES = ("eager", "compiled", "parity")
#: Opt-in stages.
MORE_STAGES = ("cure", "features", "ranks")
#: What each default stage checks.
_TOPICS = {"eager": "eager steps", "compiled": "compiler", "parity": "compiled results"}
_LOOK = 0.1  # Seconds between two looks at the findings of a process.
_PERIOD = 0.05  # Seconds between two looks at the line that a process runs.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # No crash of the code itself.
_OUTERMOST = "in _run_module_as_main"  # The last line of a whole stack.
# Threads that wait actively would slow down the process that already loads torch for the next stage.
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
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
    after: Callable[[str, Sequence[Finding]], None] = lambda *_: None,
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
            the stage "without attention" runs as well.
        backend: Backend of the compiled step that "parity" compares. Tracing finds breaks and recompilations.
        limit: Time limit of each stage, in seconds.
        after: Called with the name of each stage and its findings.
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
    with _Processes() as processes:
        while todo:
            stage = todo.pop(0)
            own = backend if stage == "parity" else "aot_eager"
            told = _Stage(target, tuple(arguments), stage, own, limit, processes, seen, bool(todo))
            try:
                told.run()
            except KeyboardInterrupt:
                todo, complete = [], False
            findings += told.findings
            facts |= told.facts
            cells += told.cells
            subject = told.subject or subject
            if told.at:
                why[stage] = "its stage did not end"
            after(stage, told.findings)
            if told.at in ("starting", "loading") or any(x.kind == "subject" for x in told.findings):
                why = dict.fromkeys(DEFAULT_STAGES, "the model could not be loaded")
                break
            failed = any(x.kind in ("graph-break", "compile-error") for x in told.findings)
            if stage == "compiled" and failed and complete:
                todo.insert(0, "without attention")
    facts["stages"] = {"unchecked": _not_run(stages, why, complete=complete, facts=facts)}
    return Diagnosis(
        f"{target}: {subject}" if subject != target else target,
        merged(_completed(findings, facts)),
        facts,
        describe_environment(),
        tuple(cells),
        seconds=time.monotonic() - start,
        complete=complete,
    )


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


def _completed(findings: list[Finding], facts: dict[str, dict[str, Any]]) -> list[Finding]:
    """Add results of other stages and upstream issues to the findings."""
    isolated = _isolated(findings, facts.get("without attention"))
    ran = facts.get("parity", {})
    if "errors" in ran and ran["backend"] != "aot_eager":
        said = f"backend {ran['backend']} runs the first batch: perhaps only tracing with aot_eager fails"
        isolated = [
            replace(x, evidence=(*x.evidence, said)) if x.kind == "compile-error" else x for x in isolated
        ]
    isolated = _without_guarded_reads(isolated, facts.get("compiled", {}))
    return _with_known_issues(_cured([_in_library(x) for x in isolated], facts.get("cure", {}).get("left")))


def _without_guarded_reads(findings: list[Finding], compiled: dict[str, Any]) -> list[Finding]:
    """Leave out values that a library reads in eager mode only. Its compiled code has no break there.

    Args:
        findings: Findings of all stages.
        compiled: Facts of the compiled stage, empty if it did not end.
    """
    if "breaks" not in compiled or any(x.kind == "compile-error" for x in findings):
        return findings
    broken = {place for x in findings if x.kind == "graph-break" for place in x.places}

    def is_guarded(x: Finding) -> bool:
        return x.kind == "sync" and _is_installed_code(x) and not broken.intersection(x.places)

    return [x for x in findings if not is_guarded(x)]


def _is_installed_code(finding: Finding) -> bool:
    return bool(finding.places) and "/site-packages/" in finding.places[0].file


def _in_library(finding: Finding) -> Finding:
    """Replace the remedy of a finding in a library's attention by the library's own switch."""
    file = finding.places[0].file if finding.places else ""
    remedy = next((text for name, text in _SWITCHES.items() if f"/site-packages/{name}/" in file), "")
    if remedy and finding.kind == "leak" and "/site-packages/transformers/" in file:
        remedy = _PACKED
    of_attention = finding.kind in _OF_ATTENTION or "flex_attention" in file
    return replace(finding, remedy=remedy) if remedy and of_attention else finding


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
    found = []
    for x in findings:
        if x.stage == "compiled" and x.kind in ("graph-break", "compile-error") and alone is not None:
            if x.places and str(x.places[0]) in alone.get("lines", ()):
                said = "this line calls attention, and the call itself fails"
            elif "left" in alone:
                said = f"not tested without attention: it cannot be taken out ({alone['left']})"
            elif (x.kind, x.places[:1]) in stays:
                said = "stays if the identity replaces attention: the cause is the code around it"
            else:
                said = "gone if the identity replaces attention: attention is the cause"
            x = replace(x, evidence=(*x.evidence, said))
        if x.stage != "without attention":
            found.append(x)
    return found


def _with_known_issues(findings: Sequence[Finding]) -> list[Finding]:
    """Add upstream issues that match a finding and the installed versions."""
    issues = json.loads((Path(__file__).parent / "known.json").read_text())
    found = []
    for x in findings:
        words = " ".join((x.what, x.cause, *x.evidence, *(f"{y} {y.text}" for y in x.places)))
        known = [
            f"{issue['says']} ({issue['issue']})"
            for issue in issues
            if issue["kind"] == x.kind
            and re.search(issue["match"], words, re.DOTALL)
            and _is_installed(issue)
        ]
        found.append(replace(x, known=tuple(known)))
    return found


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
    with _Processes(_TIMING) as processes:
        told = _Stage(path, tuple(arguments), "timing", "", limit, processes, seen)
        told.run()
    findings, seconds = merged(told.findings), time.monotonic() - start
    return Diagnosis(path, findings, told.facts, describe_environment(), seconds=seconds)


class _Processes:
    """Processes of the stages. Each loads torch while the stage before it runs."""

    def __init__(self, module: str = _MODULE) -> None:
        self._module = module
        self._waiting: Child | None = None

    def __enter__(self) -> _Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.close()

    def take(self, *, more: bool) -> Child:
        """Return a process that waits for its task. If there are more stages, start the next process."""
        child = self._waiting or Child(self._module, {}, _QUIET)
        self._waiting = Child(self._module, {}, _QUIET) if more else None
        return child


@dataclass
class _Stage:
    """One stage. ``at`` is what its process was doing when it ended, or "" if it was done."""

    target: str
    arguments: tuple[str, ...]
    stage: str
    backend: str
    limit: float
    processes: _Processes
    seen: Callable[[Finding], None]
    more: bool = False
    at: str = "starting"
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    subject: str = ""
    cells: list[dict[str, str]] = field(default_factory=list)
    last_lines: tuple[Place, ...] = ()

    def run(self) -> None:
        """Run the process until it ends or reaches the time limit."""
        task = {
            "target": self.target,
            "arguments": list(self.arguments),
            "stage": self.stage,
            "backend": self.backend,
            "limit": self.limit,
            "period": _PERIOD,
        }
        with self.processes.take(more=self.more) as child:
            child.send(task)
            end, code = time.monotonic() + self.limit, None
            while code is None and time.monotonic() < end:
                code = child.wait(_LOOK)
                self._take(child.told())
            child.end()
            self._take(child.told())
            if code is None:
                self._found(_hang(child.errors, self.limit, self.stage, self.at))
            elif code != 0 or self.at != "":
                self._found(_crash(child.errors, code, self.stage, self.at, self.last_lines))

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        explains = self.stage == "without attention"  # Its findings only explain others.
        may_be_guarded = finding.kind == "sync" and _is_installed_code(finding)
        if not (explains or may_be_guarded):
            self.seen(_in_library(finding))

    def _take(self, all_told: list[dict[str, Any]]) -> None:
        """Collect the process's records."""
        for told in all_told:
            self.at = "" if told.get("end") else told.get("begin", self.at)
            self.subject = told.get("subject", self.subject)
            if "at" in told:
                self.last_lines = tuple(Place(**x) for x in told["at"])
            if "finding" in told:
                self._found(from_plain(Finding, told["finding"], "finding"))
            if "cell" in told:
                self.cells.append(told["cell"])
            if "facts" in told:
                self.facts.setdefault(told.get("stage", self.stage), {}).update(told["facts"])


def _hang(errors: str, limit: float, stage: str, at: str) -> Finding:
    what = f"Not finished after {limit:.0f} s: the process was {at or 'ending'}"
    return Finding("hang", what, _dumped(errors), stage=stage)


def _crash(errors: str, code: int, stage: str, at: str, last: tuple[Place, ...]) -> Finding:
    killed, places = -code in _FROM_OUTSIDE, _dumped(errors)
    native = code < 0 and not killed
    evidence: tuple[str, ...] = ()
    # Native code that overwrites memory may also overwrite Python's stack, which the dump is made from.
    if _OUTERMOST not in errors:
        places = last or places
    elif last and last[0] not in places:
        evidence = (f"at most {_PERIOD * 1e3:.0f} ms before, it was seen at {last[0]}: {last[0].text}",)
    cause = "Native code crashed" if native else "The code ended its process"
    remedy = "" if native else "Remove the call that ends the process, such as sys.exit() or os._exit()"
    if killed:
        cause = "Another process or the system ended it. Linux does so if memory runs out"
        remedy = "Use fewer layers, shorter sequences or a smaller batch. sudo dmesg shows if memory ran out"
    if native and any("flex_attention" in x.text for x in (*places, *last)):
        cause = f"{cause}. FlexAttention's compiled CPU kernel does so with score_mods like s + x[b][h][i][j]"
        remedy = "Index captured tensors in one step, x[b, h, i, j], or run without the score_mod"
    what = f"The process ended while {at or 'ending'}: {why_ended(code, errors)}"
    return Finding("crash", what, places, evidence, cause, remedy, stage=stage)


def _dumped(errors: str) -> tuple[Place, ...]:
    """Find the user's lines in a traceback or a dump of faulthandler, the innermost first."""
    # Read the thread that failed. If it runs no Python code, read the main thread, which is dumped last.
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", errors, flags=re.MULTILINE)
    failed = next((x for x in threads if x.startswith("Current") and 'File "' in x), threads[-1])
    found = re.findall(r'^  File "([^"\n]+)", line (\d+) in (\S+)$', failed, re.MULTILINE)
    # A dump of overwritten frames contains pieces of other names.
    places = [Place(file, int(line), name) for file, line, name in found if Path(file).is_file()]
    return tuple([x for x in places if is_users(x.file)][:3] or lines_in(errors)[:3])
