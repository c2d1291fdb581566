"""Recompilations: the guard that failed, and a test of the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.doctor.findings import KINDS, Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog, Recompile
from attnspan_lab.doctor.torch.recording.counters import (
    Counter,
    as_tensor,
    counters_in,
    emptied,
    filled,
    is_set_anew,
    lists_in,
)
from attnspan_lab.doctor.torch.steps import copied, outcome_of, run_compiled
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text
from attnspan_lab.zoo.step import Outcome, differences

__all__ = ["Trials", "recompiles_in"]

T = TypeVar("T")

#: Recompilations per frame that torch intends: the second size makes a dimension dynamic.
_ALLOWED = 1
_MISMATCH = re.compile(
    r"tensor '(?P<name>[^']+)' (?P<what>[\w ]+?) mismatch(?: at index (?P<dim>\d+))?\. "
    r"expected (?P<want>.+?), actual (?P<got>[^.]+)"
)
_SETTING = re.compile(r"torch\._dynamo\.config\.(\w+) = True")
_SAME = 1e-5  # Larger relative differences are no rounding: both sides run the same operators.
_ANEW = (
    "The model sets {name} to another Python number in each call. Keep it in a tensor "
    '(register_buffer("{name}", torch.tensor(n))), fill the tensor in place: {name}.fill_(n), and compute '
    "with the tensor. An argument such as scale= takes only a Python number: multiply q by the tensor instead"
)
_REMEDIES = {
    "size": "Mark the dimension with torch._dynamo.mark_dynamic(x, dim), or use torch.compile(dynamic=True)",
    "number": "Pass the number as a tensor: torch.tensor(n), or a buffer if it is an attribute",
    "length": "Keep the number of entries the same in all calls, for example in one tensor of fixed size",
    "other": "Keep the guarded value the same in all calls. If it takes few values, torch compiles once for "
    "each, up to torch._dynamo.config.recompile_limit",
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
        place = next((x.place for x in reversed(reasons) if x.place), frame)
        limit = any(frame is not None and f"{frame.file}:{frame.line})" in x for x in log.limits)
        what = f"This code is compiled {len(reasons) + 1} times"
        if limit:
            what = f"The recompilation limit is reached after {len(reasons)}, so this code runs uncompiled"
        guards = list(dict.fromkeys(x.guard for x in reversed(reasons)))[:3]
        yield Finding(
            "recompile-limit" if limit else "recompile",
            what,
            at(place, frame),
            (*(f"guard that failed: {x}" for x in guards), "TORCH_LOGS=recompiles shows each"),
            _requirement(last.guard),
            _REMEDIES[last.kind],
            count=len(reasons),
        )


def _requirement(guard: str) -> str:
    """Write a guard that failed as a sentence."""
    if found := _MISMATCH.search(guard):
        dim = f" in dim {found['dim']}" if found["dim"] else ""
        return (
            f"The compiled code requires {found['what']} {found['want']} of {found['name']}{dim}, "
            f"and a call had {found['got'].strip()}"
        )
    return f"The compiled code requires {' '.join(guard.split())[:120]}, and this changes"


@dataclass(frozen=True)
class _Change:
    """A change that may save recompilations.

    Args:
        what: The change, as part of a sentence.
        remedy: The same for the user, or "" for the finding's remedy.
        change: Changes a copy of the subject.
        dynamic: The option of torch.compile.
        config: Settings of torch._dynamo.
        shared: A number of a Python module, which copies of the model share. It is reset after each run.
    """

    what: str
    remedy: str = ""
    change: Callable[[Subject], Subject] = lambda x: x
    dynamic: bool | None = None
    config: dict[str, Any] = field(default_factory=dict)
    shared: Counter | None = None

    def run(self, subject: Subject, run: Callable[[Subject], T]) -> T:
        """Run a changed copy of the subject."""
        before = None if self.shared is None else self.shared.value(subject.model)
        try:
            return run(self.change(copied(subject)))
        finally:
            if self.shared is not None:
                self.shared.replace(subject.model, lambda _: before)


@dataclass
class Trials:
    """Trials of remedies for what the compiler reports. A remedy that does harm is not offered.

    Attributes:
        log: Log of the steps without a change.
        subject: The model before these steps.
        backend: Backend of torch.compile.
    """

    log: CompilerLog
    subject: Subject
    backend: str
    _breaks: dict[Any, Finding] = field(default_factory=dict)

    def of_recompile(self, finding: Finding) -> Finding:
        """Try remedies of a recompilation. Those that break the graph or change results do harm.

        Returns:
            The finding with the outcome of the trials, and the remedy that helped, if one did.
        """
        try:
            self.subject.copy()
        except Exception as error:  # All trials would change the model itself.
            return replace(finding, tried=f"no change: the model cannot be copied ({error_text(error)})")
        guards, said, remedy = "\n".join(finding.evidence), list[str](), finding.remedy
        numbers = [*counters_in(guards, self.subject.model)]
        anew = [x for x in numbers if _is_set_anew(x, self.subject)]
        for change in _changes(finding, self.subject, numbers, anew):
            text, helps = self._outcome(change)
            if helps:
                return replace(finding, tried=text, remedy=change.remedy or remedy)
            said.append(text)
        if anew:
            remedy = _ANEW.format(name=anew[0].name)
        elif said:
            remedy = remedy if remedy == _REMEDIES["length"] else _REMEDIES["other"]
            remedy = f"No change that the doctor tried helps. {remedy}"
        return replace(finding, tried="; ".join(said), remedy=remedy)

    def of_break(self, finding: Finding) -> Finding:
        """Try the settings of torch._dynamo that torch offers for a graph break, with the first batch.

        Returns:
            The finding with the outcome. A setting does harm if a break stays or a new one appears.
        """
        key = finding.places[:1], finding.remedy
        if key not in self._breaks:  # A line that breaks the graph in each batch is tried once.
            self._breaks[key] = self._with_settings(finding)
        return replace(finding, tried=self._breaks[key].tried, remedy=self._breaks[key].remedy)

    def _with_settings(self, finding: Finding) -> Finding:
        names = list(dict.fromkeys(_SETTING.findall(finding.remedy)))
        if not names:
            return finding
        try:
            one = copied(replace(self.subject, batches=self.subject.batches[:1]))
            with torch._dynamo.config.patch(dict.fromkeys(names, True)):
                again, error, _ = run_compiled(one, self.backend)
        except Exception:
            return finding  # This torch does not have the setting.
        known = {x.places[:1] for x in self.log.breaks} - {finding.places[:1]}
        left = [x for x in again.breaks if x.places[:1] not in known]
        said = f"with {' and '.join(f'torch._dynamo.config.{x} = True' for x in names)}: "
        if error is None and not left:
            return replace(finding, tried=f"{said}no graph break here in the first batch")
        places = ", ".join(dict.fromkeys(str(x.places[0]) for x in left if x.places))
        said += f"{counted(len(left), 'graph break')} in the first batch" if error is None else _fails(error)
        said += f", at {places}" if places and error is None else ""
        return replace(finding, tried=said, remedy=KINDS["graph-break"].remedy)

    def _outcome(self, change: _Change) -> tuple[str, bool]:
        """Run all batches with a change. Return what changes, and whether the change only helps."""
        run = partial(run_compiled, backend=self.backend, dynamic=change.dynamic)
        try:
            with torch._dynamo.config.patch(change.config):
                again, error, _ = change.run(self.subject, run)
        except Exception as failed:  # The changed model cannot be made.
            return f"with {change.what}: not possible ({error_text(failed)})", False
        if error is not None:
            return f"with {change.what}: {_fails(error)}", False
        count, before = counted(len(again.recompiles), "recompilation"), len(self.log.recompiles)
        if len(again.recompiles) >= before:
            return f"with {change.what}: no fewer recompilations", False
        text = f"with {change.what}: {count} instead of {before}"
        more = len(again.breaks) - len(self.log.breaks)
        if more > 0:
            text += f", but {counted(more, 'more graph break', 'more graph breaks')}"
        difference = _difference(change, self.subject)
        if difference > _SAME:
            text += f", but other results (relative difference {difference:.1e})"
        return text, more <= 0 and difference <= _SAME


def _fails(error: BaseException) -> str:
    return f"fails with {type(error).__name__}"


def _changes(
    finding: Finding, subject: Subject, numbers: list[Counter], anew: list[Counter]
) -> Iterator[_Change]:
    """Yield the changes to try.

    Args:
        finding: The recompilation.
        subject: The model.
        numbers: Python numbers that the guards name.
        anew: Those that the model sets to another number in each call.
    """
    if finding.remedy == _REMEDIES["size"]:
        yield _Change("all sizes dynamic", dynamic=True)
        return
    for x in numbers[:3]:
        remedy = f"Make it a tensor: {x.name} = torch.tensor(n)" if x.is_global or "[" in x.name else ""
        shared = x if x.is_global else None
        yield _Change(f"{x.name} as a tensor", remedy, partial(as_tensor, x), shared=shared)
        if x in anew:
            text = f"{x.name} as a tensor that is filled in place"
            yield _Change(text, _ANEW.format(name=x.name), partial(filled, x))
    for x in (*lists_in("\n".join(finding.evidence), subject.model),)[:3]:
        text = f"{x.name} emptied before each call"
        remedy = f"Empty {x.name} before each call, outside of the compiled code: {x.name}.clear()"
        yield _Change(text, remedy, partial(emptied, x))
    if any(map(_is_number, tree_leaves(subject.batches))):
        yield _Change("numbers of the batch as tensors", change=_with_tensors)
    if finding.remedy == _REMEDIES["number"]:
        switch = "allow_unspec_int_on_nn_module"
        text = f"torch._dynamo.config.{switch} = True"
        yield _Change(text, f"Set {text}", config={switch: True})
        yield _Change("torch.compile(dynamic=True)", "Use torch.compile(dynamic=True)", dynamic=True)


def _is_set_anew(counter: Counter, subject: Subject) -> bool:
    try:
        return counter.name.isidentifier() and not counter.is_global and is_set_anew(counter, copied(subject))
    except Exception:  # The model does not run with a tensor.
        return False


def _difference(change: _Change, subject: Subject) -> float:
    """Compare eager results of all batches with and without a change."""

    def eager(own: Subject) -> list[Outcome]:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            return [outcome_of(own, own.model, x, backward=False) for x in own.batches]

    wanted, found = (x.run(subject, eager) for x in (_Change("", shared=change.shared), change))
    return max(differences(x, y)[0] for x, y in zip(found, wanted, strict=True))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _with_tensors(subject: Subject) -> Subject:
    batches = tree_map(lambda x: torch.tensor(x) if _is_number(x) else x, subject.batches)
    return Subject(subject.model, batches, subject.expected)
