"""Results that depend on earlier calls: a batch behind another batch, and the attribute that kept it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_installed, is_users_class, line_of_class, place_here
from attnspan_lab.doctor.torch.recording.calls import Step, changed_tokens
from attnspan_lab.doctor.torch.recording.differences import difference
from attnspan_lab.doctor.torch.recording.lineage import Lineage
from attnspan_lab.doctor.torch.recording.operators import storage
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["state_findings"]

_TOPIC = "state"
_OF_MODULE = {*vars(nn.Module()), "_buffers"}
_RESET = re.compile(r"^(reset|clear|empty|flush)")
#: Code behind the name of a list, a dict or a number that changes it.
_CHANGES = r"(\[[^=]*\]\s*=(?!=)|\.(append|extend|update|insert|setdefault)\(|\s*[-+*/|]=)"
#: Stands for the value of an attribute that a call makes.
_ABSENT = "not set"
_KEEPERS = (Tensor, list, dict)


@dataclass(eq=False)
class _Slot:
    """A variable that a call may change: an attribute, a buffer, a global variable or a default argument."""

    name: str
    owner: Any
    space: Any
    key: Any
    value: Any = _ABSENT
    kept: Any = _ABSENT

    @property
    def now(self) -> Any:
        return self.space.get(self.key, _ABSENT) if hasattr(self.space, "get") else self.space[self.key]

    def restore(self) -> None:
        """Give the variable its contents before the first call, in place where other code may hold it."""
        if self.kept is _ABSENT:
            self.space.pop(self.key, None)
            return
        kept, value = copy.deepcopy(self.kept), self.value
        if isinstance(value, Tensor) and value.shape == kept.shape:
            value.copy_(kept)
        elif isinstance(value, list):
            value[:] = kept
        elif isinstance(value, dict):
            value.clear()
            value.update(kept)
        else:
            value = kept
        if isinstance(self.space, dict):
            self.space[self.key] = value
        elif isinstance(self.key, str):
            setattr(self.owner, self.key, value)


def state_findings(step: Step, coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding if results of a batch change behind another batch, in evaluation mode.

    Args:
        step: The step.
        coverage: Collects the checks.
    """
    found: list[Finding] = []
    lineage = Lineage(step.lines)

    def run(own: Subject) -> dict[str, Tensor]:
        found.extend(_examined(own, step, lineage, coverage))
        return {}

    step.again(run=run, mode=lineage)
    yield from found


def _examined(own: Subject, step: Step, lineage: Lineage, coverage: Coverage) -> Iterator[Finding]:
    def behind_others(slots: list[_Slot], restored: list[_Slot]) -> dict[str, Tensor]:
        """Run the batch behind other tokens. Restore variables before the two calls, and between them."""
        for x in slots:
            x.restore()
        _run_others(own, step.batch)
        for x in restored:
            x.restore()
        return _results(own, step.batch)

    slots = _slots(own.model)
    with _assignments() as assigned:
        again = behind_others([], [])
    if not _apart(again, step.results):
        coverage.made(_TOPIC, "a batch gives the same results behind another batch")
        return
    slots |= {k: x for k, x in _variables(own.model) if k not in slots and isinstance(x.owner, nn.Module)}
    every = list(slots.values())
    changed = [x for x in every if not _same(x.kept, x.now)]
    right = behind_others(every, every)
    if _apart(right, behind_others(every, every)) or not _apart(again, right):
        why = "results are random in evaluation mode, or depend on state that the doctor cannot see"
        coverage.missed(_TOPIC, why)
        return
    slot = next((x for x in changed if not _apart(behind_others(every, [x]), right)), None)
    if slot is None:
        coverage.missed(_TOPIC, "results depend on earlier calls, and no single attribute explains it")
        return
    coverage.made(_TOPIC, "a batch alone was compared with the batch behind another one")
    yield _finding(own.model, slot, _apart(again, right), _place(slot, lineage, assigned))


def _results(own: Subject, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {k: x.detach().clone() for k, x in own.results(own.call(own.model, batch), {}).items()}


def _run_others(own: Subject, batch: Any) -> None:
    """Call the model with other tokens, or with the same tokens if it does not run with others."""
    found = own.tokens(batch)
    try:
        _results(own, batch if found is None else own.with_tokens(batch, found[0], changed_tokens(found[1])))
    except Exception:
        _results(own, batch)


def _apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return difference(wanted, found, beyond_rounding=True)


def _slots(model: nn.Module) -> dict[tuple[int, Any], _Slot]:
    """Keep the contents of all variables."""
    found: dict[tuple[int, Any], _Slot] = {}
    memo: dict[int, Any] = {}
    for where, slot in _variables(model):
        value = slot.space[slot.key]
        try:
            found[where] = replace(slot, value=value, kept=copy.deepcopy(value, memo))
        except Exception:  # The object cannot be copied, such as a generator.
            continue
    return found


def _variables(model: nn.Module) -> Iterator[tuple[tuple[int, Any], _Slot]]:
    """Yield each variable that a call may change, without its contents, and its place in memory."""
    for x in (*_of_modules(model), *_of_classes(model)):
        yield (id(x.space), x.key), x


def _of_modules(model: nn.Module) -> Iterator[_Slot]:
    for path, module in model.named_modules():
        own = [k for k, x in vars(module).items() if k not in _OF_MODULE and not callable(x)]
        buffers = [k for k, x in module._buffers.items() if x is not None]
        for space, names in ((vars(module), own), (module._buffers, buffers)):
            yield from (_Slot(f"{path}.{x}".lstrip("."), module, space, x) for x in names)


def _of_classes(model: nn.Module) -> Iterator[_Slot]:
    """Yield attributes of the user's classes, and default arguments and global variables of their methods."""
    for kind in _users_classes(model):
        for key, x in list(vars(kind).items()):
            if not key.startswith("__") and isinstance(x, _KEEPERS):
                yield _Slot(f"{kind.__name__}.{key}", kind, vars(kind), key)
            if not inspect.isfunction(x):
                continue
            values, code = x.__defaults__ or (), x.__code__
            names = code.co_varnames[: code.co_argcount][-len(values) :]
            for i, (name, value) in enumerate(zip(names, values, strict=False)):
                if isinstance(value, _KEEPERS):
                    yield _Slot(f"{key}'s default argument {name}", kind, values, i)
            used = (n for n in code.co_names if isinstance(x.__globals__.get(n), _KEEPERS))
            yield from (_Slot(n, kind, x.__globals__, n) for n in used)


def _users_classes(model: nn.Module) -> dict[type, None]:
    """List the classes of a model's modules that are the user's, without installed libraries."""
    kinds = dict.fromkeys(kind for x in model.modules() for kind in type(x).__mro__ if is_users_class(kind))
    return {x: None for x in kinds if not is_installed(inspect.getfile(x))}


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(_same, x, y))
    if hasattr(x, "__dict__") and hasattr(y, "__dict__") and not callable(x):
        return type(x) is type(y) and _same(vars(x), vars(y))
    return x is y or bool(x == y)


@contextmanager
def _assignments() -> Iterator[dict[tuple[int, str], Place | None]]:
    """Record the lines that set attributes of modules."""
    before: Any = nn.Module.__setattr__
    found: dict[tuple[int, str], Place | None] = {}

    def note(self: nn.Module, name: str, value: Any) -> None:
        found[id(self), name] = place_here()
        before(self, name, value)

    nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        nn.Module.__setattr__ = before  # type: ignore[method-assign]


def _place(slot: _Slot, lineage: Lineage, assigned: dict[tuple[int, str], Place | None]) -> Place | None:
    """Find the line that wrote a variable: an assignment, a change in place, or a line that names it."""
    if (place := assigned.get((id(slot.owner), str(slot.key)))) is not None:
        return place
    if isinstance(slot.value, Tensor):
        write = lineage.writes.get(storage(slot.value))
        return None if write is None else write.place
    kind = slot.owner if inspect.isclass(slot.owner) else type(slot.owner)
    name = re.escape(slot.name.split()[-1] if " " in slot.name else str(slot.key))
    return line_of_class(kind, rf"\b{name}{_CHANGES}")


def _finding(model: nn.Module, slot: _Slot, error: float, place: Place | None) -> Finding:
    what = f"Results depend on an earlier call: {slot.name} keeps data of it"
    evidence = (
        f"behind a call with other tokens, results of a batch differ by {error:.1e} (relative)",
        f"{slot.name} before the first call: {_said(slot.kept)}",
    )
    tried = f"with {slot.name} as it was before the first call, the results do not differ"
    names = sorted(x for kind in _users_classes(model) for x in vars(kind) if _RESET.match(x))
    resets = [x for x in names if x != "reset_parameters"]
    remedy, severity = (f"Call {resets[0]}() before each new sequence", "note") if resets else ("", "")
    return Finding("state", what, at(place), evidence, remedy=remedy, tried=tried, severity=severity)


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return value if value is _ABSENT else repr(value)[:40]
