"""Recompilations: the guard that failed, and a test of the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnspan_lab.doctor.compiler import CompilerLog, Recompile
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.steps import copied, run_compiled
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.doctor.words import counted

__all__ = ["recompiles_in", "tried"]

#: Recompilations per frame that torch intends: the second size makes a dimension dynamic.
_ALLOWED = 1
_REMEDIES = {
    "size": "Mark the dimension with torch._dynamo.mark_dynamic(x, dim), or use torch.compile(dynamic=True)",
    "number": "Pass the number as a tensor: torch.tensor(n), or a buffer if it is an attribute",
    "other": "Keep the guarded value the same in all calls",
}


def recompiles_in(log: CompilerLog) -> Iterator[Finding]:
    """Yield a finding for each frame that is compiled more often than torch intends."""
    frames: dict[int, list[Recompile]] = {}
    for x in log.recompiles:
        frames.setdefault(x.frame, []).append(x)
    for number, reasons in frames.items():
        if len(reasons) <= _ALLOWED and not log.limits:
            continue
        last, frame = reasons[-1], log.frames.get(number)
        place = last.place or next((x.place for x in reversed(reasons) if x.place), None) or frame
        limit = any(frame is not None and f"{frame.file}:{frame.line})" in x for x in log.limits)
        what = f"This code is compiled {len(reasons) + 1} times"
        if limit:
            what = f"The recompilation limit is reached after {len(reasons)}, so this code runs uncompiled"
        guards = list(dict.fromkeys(x.guard for x in reversed(reasons)))[:3]
        yield Finding(
            "recompile-limit" if limit else "recompile",
            what,
            tuple(dict.fromkeys(x for x in (place, frame) if x is not None)),
            (*(f"guard that failed: {x}" for x in guards), "TORCH_LOGS=recompiles shows each"),
            f"The compiled code requires {' '.join(last.guard.split())[:120]}, and this changes",
            _REMEDIES[last.kind],
            count=len(reasons),
        )


def tried(finding: Finding, log: CompilerLog, subject: Subject, backend: str) -> str:
    """Test the remedy of a recompilation, and describe the outcome."""
    guards, before = " ".join(finding.evidence), len(log.recompiles)
    trials: list[tuple[str, Callable[[], Subject], bool | None]] = []
    if finding.remedy == _REMEDIES["size"]:
        trials = [("all sizes dynamic", lambda: copied(subject), True)]
    else:
        trials = [
            (f"{x} as a tensor", partial(_with_tensor, subject, x), None) for x in _numbers(guards, subject)
        ]
        if any(_is_number(x) for batch in subject.batches for x in _values(batch)):
            trials += [("numbers of the batch as tensors", partial(_with_tensors, subject), None)]
    for what, make, dynamic in trials:
        try:
            again, error, _ = run_compiled(make(), backend, dynamic=dynamic)
        except Exception:
            continue
        if error is None and len(again.recompiles) < before:
            return f"with {what}: {counted(len(again.recompiles), 'recompilation')} instead of {before}"
    return f"{' and '.join(x[0] for x in trials)}: no fewer recompilations" if trials else ""


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _values(batch: Any) -> list[Any]:
    return (
        list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else []
    )


def _numbers(guards: str, subject: Subject) -> list[str]:
    """List module attributes that hold numbers and that guards name."""
    names = dict.fromkeys(re.findall(r"\.(\w+) *[=!<>]=? *-?\d", guards))
    return [x for x in names if any(_is_number(m.__dict__.get(x)) for m in subject.model.modules())][:3]


def _with_tensor(subject: Subject, name: str) -> Subject:
    made = copied(subject)
    for module in made.model.modules():
        if _is_number(module.__dict__.get(name)):
            setattr(module, name, torch.tensor(module.__dict__[name]))
    return made


def _with_tensors(subject: Subject) -> Subject:
    def wide(x: Any) -> Any:
        return torch.tensor(x) if _is_number(x) else x

    def changed(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {k: wide(x) for k, x in batch.items()}
        return type(batch)(map(wide, batch)) if isinstance(batch, (tuple, list)) else batch

    made = copied(subject)
    return Subject(made.model, [changed(x) for x in made.batches], made.expected)
