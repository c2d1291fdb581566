"""One stage of an examination, which runs in a child process. Crashes and hangs are findings."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnspan_lab.children import Child, why_ended
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, is_users, lines_in, raised_by_doctor
from attnspan_lab.files import from_plain

__all__ = ["Stage", "run_together"]

_START = 60.0  # Seconds in which torch must be loaded, in addition to the time limit.
_LOOK = 0.05  # Seconds between two looks at the findings of a process.
_PERIOD = 0.05  # Seconds between two looks at the line that a process runs.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # No crash of the code itself.
# A traceback at the end of stderr.
_RAISED = re.compile(r"Traceback \(most recent call last\):\n(?:.*\n)*?[A-Za-z_][\w.]*(?:: .*)?\s*\Z")
_OUTERMOST = "in _run_module_as_main"  # The last line of a whole stack.


@dataclass(eq=False)
class Stage:
    """One stage.

    Attributes:
        target, arguments, stage, backend, limit: The task.
        seen: Called with each finding as soon as it is known.
        at: What the process was doing when it ended, or "" if it was done.
        findings, facts, cells, subject: What the process reported.
        loads: Modules that the next stages of this subject need.
        on_cpu: No device holds the subject. Two processes may be too much for a device's memory.
        last_lines: The lines that the process ran when it was last seen.
    """

    target: str
    arguments: tuple[str, ...]
    stage: str
    backend: str
    limit: float
    seen: Callable[[Finding], None]
    at: str = "starting"
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    subject: str = ""
    loads: tuple[str, ...] = ()
    on_cpu: bool = False
    cells: list[dict[str, str]] = field(default_factory=list)
    last_lines: tuple[Place, ...] = ()
    _end: float = 0.0

    @property
    def task(self) -> dict[str, Any]:
        """The task of the process."""
        names = ("target", "arguments", "stage", "backend", "limit")
        return {name: getattr(self, name) for name in names} | {"period": _PERIOD}

    @property
    def is_unloaded(self) -> bool:
        """Whether the process has no subject."""
        return self.at in ("starting", "loading") or any(x.kind == "subject" for x in self.findings)

    def look(self, child: Child) -> bool:
        """Collect findings. Return whether the process has ended. A process over its time limit is ended."""
        self._end = self._end or time.monotonic() + _START + self.limit
        code = child.code
        self._take(child.told())
        if code is None and time.monotonic() < self._end:
            return False
        child.end()
        self._take(child.told())
        if code is None:
            self._found(_hang(child.errors, self.limit, self.at))
        elif code != 0 or self.at != "":
            self._found(_crash(child.errors, code, self.at, self.last_lines))
        return True

    def _found(self, finding: Finding) -> None:
        finding = replace(finding, stage=finding.stage or self.stage)
        self.findings.append(finding)
        self.seen(finding)

    def _take(self, all_told: list[dict[str, Any]]) -> None:
        """Collect the process's records."""
        for told in all_told:
            if "begin" in told and self.at == "starting":
                self._end = time.monotonic() + self.limit  # The limit does not count the loading of torch.
            self.at = "" if told.get("end") else told.get("begin", self.at)
            self.subject = told.get("subject", self.subject)
            self.loads = tuple(told.get("loads", self.loads))
            self.on_cpu = told.get("on_cpu", self.on_cpu)
            if "at" in told:
                self.last_lines = tuple(Place(**x) for x in told["at"])
            if "finding" in told:
                self._found(from_plain(Finding, told["finding"], "finding"))
            if "cell" in told:
                self.cells.append(told["cell"])
            if "facts" in told:
                self.facts.setdefault(told.get("stage", self.stage), {}).update(told["facts"])


def run_together(
    stages: Iterable[tuple[Stage, Callable[[], Child]]],
    running: Callable[[Sequence[Stage]], None] = lambda _: None,
    after: Callable[[Stage], None] = lambda _: None,
) -> None:
    """Run stages at the same time. An exception, also Ctrl-C, ends all processes.

    Args:
        stages: Each stage, and a function that starts its process.
        running: Called with the stages that run, whenever they change.
        after: Called with each stage when it ends.
    """
    with ExitStack() as stack:
        left = {stage: stack.enter_context(start()) for stage, start in stages}
        running(list(left))
        while left:
            time.sleep(_LOOK)
            for stage, child in [*left.items()]:
                if stage.look(child):
                    del left[stage]
                    after(stage)
                    running(list(left))


def _hang(errors: str, limit: float, at: str) -> Finding:
    what = f"Not finished after {limit:.0f} s: the process was {at or 'ending'}"
    return Finding("hang", what, _dumped(errors))


def _crash(errors: str, code: int, at: str, last: tuple[Place, ...]) -> Finding:
    if code == 1 and _RAISED.search(errors):
        return _raised(errors, at)
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
    return Finding("crash", what, places, evidence, cause, remedy)


def _raised(errors: str, at: str) -> Finding:
    """Write the finding for a process that an exception ended, and say whose code raised it."""
    trace = errors[errors.rindex("Traceback (most recent call last):") :]
    error, places = trace.strip().splitlines()[-1][:300], tuple(lines_in(trace)[:3])
    doctors = raised_by_doctor(trace)
    if doctors is not None:
        what = f"The doctor raised an error while {at or 'ending'}: {error}"
        cause = f"The doctor's own code raised it, at {doctors}. This says nothing about your model"
        remedy = "Report this error. The other stages still run: choose them with --stages"
    else:
        what = f"This line raised an error while the doctor ran the model again: {error}"
        cause = "The doctor repeats steps, also in copies and with other inputs. The first step did not raise"
        remedy = "Call the model twice with the same batch. A step that changes its own state may raise then"
    return Finding("crash", what, places, (), cause, remedy)


def _dumped(errors: str) -> tuple[Place, ...]:
    """Find the user's lines in a traceback or a dump of faulthandler, the innermost first."""
    # Read the thread that failed. If it runs no Python code, read the main thread, which is dumped last.
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", errors, flags=re.MULTILINE)
    failed = next((x for x in threads if x.startswith("Current") and 'File "' in x), threads[-1])
    found = re.findall(r'^  File "([^"\n]+)", line (\d+) in (\S+)$', failed, re.MULTILINE)
    # A dump of overwritten frames contains pieces of other names.
    places = [Place(file, int(line), name) for file, line, name in found if Path(file).is_file()]
    return tuple([x for x in places if is_users(x.file)][:3] or lines_in(errors)[:3])
