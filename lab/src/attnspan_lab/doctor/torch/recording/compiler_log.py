"""Record of torch.compile's work while a model runs, read from torch's structured log."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnspan_lab.doctor.findings import KINDS, Finding
from attnspan_lab.doctor.places import Place, is_installed, is_users, lines_in, lines_of_error
from attnspan_lab.doctor.words import whole_sentences

__all__ = ["CompilerLog", "Graph", "Recompile", "compile_error"]

_BREAK = re.compile(r"Graph [Bb]reak in user code at (?P<file>.*):(?P<line>\d+)")
_GUARD_PLACE = re.compile(r"# \(?(?P<file>[^#\s(][^#]*?):(?P<line>\d+) in (?P<function>\w+)")
_LAYOUT = re.compile(r"expected size (?P<want>\d+)==(?P<got>\d+), stride \d+==\d+")
_CONTEXTS = (
    "torch.compile takes only a function or a functools.partial as context_fn of a checkpoint. A function "
    "must be made outside of compiled code. A method or another callable object fails",
    "Pass a function of a module, or functools.partial(create_selective_checkpoint_contexts, policy)",
)
_LIMIT = "Dynamo recompile limit exceeded"
_READ_ERRORS = "TORCHDYNAMO_VERBOSE=1 TORCH_LOGS=+dynamo shows the trace. Read the lines before the error"
_READ_BREAKS = (
    "TORCH_LOGS=graph_breaks,recompiles shows the same. TORCHDYNAMO_VERBOSE=1 adds the compiler's stack"
)


@dataclass(frozen=True)
class Graph:
    """One compilation of one frame.

    Args:
        function, place: Function and line of the frame.
        start, end: Begin and end, in seconds of `time.time`.
        forward: False for the graph of a backward pass.
        operators: Number of operators in the graph.
        failed: The error, or "".
    """

    function: str
    place: Place | None
    start: float
    end: float
    forward: bool = True
    operators: int = 0
    failed: str = ""


@dataclass(frozen=True)
class Recompile:
    """Reason of a recompilation.

    Args:
        guard: The condition that failed, with the frame's names.
        place: The line that the condition comes from, if the compiler reports it.
        frame: The frame's number. The first compilation of a frame is no recompilation.
    """

    guard: str
    place: Place | None
    frame: int

    @property
    def kind(self) -> str:
        """One of "size", "length" (of a list), "number" (a Python number or an attribute) and "other"."""
        if "size mismatch" in self.guard or ".size()" in self.guard or "shape[" in self.guard:
            return "size"
        if "___check_global_state" in self.guard or "rank mismatch" in self.guard:
            return "other"
        if re.search(r"\blen\(|___dict_contains|^not [\w.\[\]']+$", self.guard):
            return "length"
        return "number" if re.search(r"(==|!=|<=|>=|<|>) *-?\d+(\.\d*)?\b", self.guard) else "other"


@dataclass
class CompilerLog(logging.Handler):
    """Collects graph breaks, recompilations and compilations within a ``with`` block."""

    breaks: list[Finding] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    frames: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._log = logging.getLogger("torch.__trace")
        self._warnings = logging.getLogger("torch._dynamo.convert_frame")

    __hash__ = object.__hash__  # Loggers keep handlers in sets, so a handler must be hashable.

    def __enter__(self) -> CompilerLog:
        self._log.addHandler(self)
        self._warnings.addFilter(self._is_no_limit)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._warnings.removeFilter(self._is_no_limit)

    def _is_no_limit(self, record: logging.LogRecord) -> bool:
        """Record torch's warning about the recompilation limit, and do not show it: a finding reports it."""
        text = record.getMessage()
        if "torch._dynamo hit config." not in text:
            return True
        self.limits.append(text)
        return False

    def emit(self, record: logging.LogRecord) -> None:
        """Record one entry of the log."""
        about: dict[str, Any] = getattr(record, "metadata", None) or {}
        payload = str(getattr(record, "payload", None) or "")
        name = about.get("artifact", {}).get("name", "") if isinstance(about.get("artifact"), dict) else ""
        if name == "dynamo_graph_break_reason":
            self._break(payload)
        elif name == "recompile_reasons":
            self.recompiles.append(_recompile(payload, about.get("frame_id", -1)))
        elif "compilation_metrics" in about:
            self._compiled(about["compilation_metrics"], forward=True)
            if self.graphs[-1].place is not None:
                self.frames.setdefault(about.get("frame_id", -1), self.graphs[-1].place)
        elif "bwd_compilation_metrics" in about:
            self._compiled(about["bwd_compilation_metrics"], forward=False)

    def _break(self, text: str) -> None:
        reason = _part(text, "Graph Break Reason:", "User code traceback:") or text
        kind, explanation, hints, link = _explained(reason)
        if kind == _LIMIT:
            return
        user = _part(text, "User code traceback:", "\nTraceback (most recent call last)")
        found = lines_in(user or _part(text, "The graph break occurred in the following user code:"))
        if (said := _BREAK.search(text)) and is_users(said["file"]):
            function = found[0].function if found else ""
            # A library's line may be in a helper that the first line calls.
            found.insert(is_installed(said["file"]), Place(said["file"], int(said["line"]), function))
        places = tuple({(x.file, x.line): x for x in found}.values())[:4]
        if all(x.places[:1] == places[:1] for x in self.breaks):  # No other break came before.
            hints = [x for x in hints if "earlier graph break" not in x]
        remedy = KINDS["operator"].remedy if "fake tensors" in kind else _joined(hints)
        what, evidence = f"The graph breaks here: {_first_line(kind)}", (*link, _READ_BREAKS)
        self.breaks.append(Finding("graph-break", what, places, evidence, explanation, remedy))

    def _compiled(self, found: dict[str, Any], *, forward: bool) -> None:
        start, end = (found.get(x) or 0 for x in ("start_time_us", "end_time_us"))
        end = end or start + (found.get("duration_us") or 0)
        name, file, line = (found.get(x) for x in ("co_name", "co_filename", "co_firstlineno"))
        place = Place(file, line, name or "") if file and line else None
        operators, failed = found.get("graph_op_count") or 0, found.get("fail_type") or ""
        times = start / 1e6, end / 1e6
        self.graphs.append(Graph(name or "backward", place, *times, forward, operators, failed))

    @property
    def forward_graphs(self) -> int:
        """Compilations that produced a graph with operators."""
        return sum(x.forward and x.operators > 0 and not x.failed for x in self.graphs)

    @property
    def compile_seconds(self) -> float:
        """Total time of all compilations, forward and backward."""
        return sum(max(x.end - x.start, 0.0) for x in self.graphs)


def _part(text: str, after: str, before: str = "\0") -> str:
    """Cut the part of a text between two others."""
    return text.partition(after)[2].partition(before)[0]


def _joined(hints: Sequence[str]) -> str:
    return " ".join(x if x.endswith(".") or x is hints[-1] else f"{x}." for x in hints)


def _first_line(text: str) -> str:
    """Return the first line of an error, behind a line that only names the compiler's part that raised it."""
    lines = (x.strip() for x in text.splitlines())
    return next((x for x in lines if x and not x.endswith(" raised:")), "no reason was given")


def _explained(reason: str) -> tuple[str, str, list[str], tuple[str, ...]]:
    """Parse kind, explanation, hints and page of a graph break, as torch's registry has them."""
    head, _, rest = reason.partition("\n  Explanation:")
    kind = head.strip().splitlines()[-1].strip() if head.strip() else "an exception of the compiler"
    explanation = re.split(r"\n  Hint:|\n\s*Developer debug context:", rest)[0]
    found = re.findall(r"\n  Hint:(.*?)(?=\n  Hint:|\n\s*Developer debug context:|\Z)", rest, re.DOTALL)
    hints = [" ".join(x.split()) for x in found]
    link = re.search(r"https://\S*graph-break-site\S*", reason)
    plain = [x for x in hints if "report an issue" not in x] or hints
    return kind, " ".join(explanation.split()), plain, (link[0],) if link else ()


def _recompile(payload: str, frame: int) -> Recompile:
    """Parse one reason, or a JSON list with the newest first, and take the newest: it changed last."""
    text = payload.strip()
    if text.startswith("["):
        text = json.loads(text)[0]
    guard = text.partition("#")[0].partition("\nUser stack")[0].strip()
    guard = re.sub(r"^\d+/\d+: *", "", guard)
    said = _GUARD_PLACE.search(text)
    stack = lines_in(_part(text, "User stack trace:"))
    place = stack[0] if stack else None
    file = _full(said["file"]) if said else ""
    if place is None and said and file and is_users(file):
        place = Place(file, int(said["line"]), said["function"])
    return Recompile(guard, place, frame)


def _full(file: str) -> str:
    """Complete the path of a file that a guard shortens, or return ""."""
    if Path(file).is_absolute():
        return file
    known = (getattr(x, "__file__", None) or "" for x in list(sys.modules.values()))
    return next((x for x in known if x.endswith(f"/{file}")), "")


def compile_error(error: BaseException) -> Finding:
    """Make a finding from an error that the compiler or compiled code raised."""
    text = str(error)
    user = lines_in(_part(text, "from user code:")) or lines_of_error(error)
    kind, cause, hints, link = _explained("\n" + text)
    said = whole_sentences(_first_line(kind if "Explanation:" in text else text), 300)
    what = f"torch.compile fails: {said}"
    remedy = _joined(hints)
    if "Explanation:" not in text:
        cause = f"{type(error).__name__} while compiling or in compiled code"
    if layout := _LAYOUT.search(text):
        what_differs = "strides" if layout["want"] == layout["got"] else "shapes"
        cause = f"An operator's fake kernel and its real kernel return different {what_differs}"
        remedy = KINDS["operator"].remedy
    elif "checkpoint not implemented for" in text:
        cause, remedy = _CONTEXTS
    return Finding("compile-error", what, tuple(user[:3]), (*link, _READ_ERRORS), cause, remedy)
