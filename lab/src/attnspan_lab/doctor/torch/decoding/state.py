"""Results that depend on earlier calls: a batch behind another batch, and the attribute that kept it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_users, place_here
from attnspan_lab.doctor.torch.decoding.own_key import SAME
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import Step, changed_tokens
from attnspan_lab.doctor.torch.recording.lineage import Lineage
from attnspan_lab.doctor.torch.recording.operators import storage
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["state_findings"]

_TOPIC = "state"
_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_OF_MODULE = {*vars(nn.Module()), "_buffers"}
_RESET = re.compile(r"^(reset|clear|empty|flush)")
#: Code behind the name of a list, a dict or a number that changes it.
_CHANGES = r"(\[[^=]*\]\s*=(?!=)|\.(append|extend|update|insert|setdefault)\(|\s*[-+*/|]=)"


#: Stands for the value of an attribute that a call makes.
_ABSENT = "not set"


@dataclass(eq=False)
class _Slot:
    """A variable that a call may change: an attribute, a buffer, a global variable or a default argument."""

    name: str
    owner: Any
    space: Any
    key: Any
    value: Any
    kept: Any

    @property
    def now(self) -> Any:
        return self.space.get(self.key, _ABSENT) if hasattr(self.space, "get") else self.space[self.key]

    def restore(self) -> None:
        """Give the variable its contents before the first call, in place where other code may hold it."""
        if self.kept is _ABSENT:
            self.space.pop(self.key, None)
            return
        kept, value = copy.deepcopy(self.kept), self.value
        if isinstance(value, Tensor) and isinstance(kept, Tensor) and value.shape == kept.shape:
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
    def results(batch: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return {k: x.detach().clone() for k, x in own.results(own.call(own.model, batch), {}).items()}

    slots = _slots(own.model)
    with _assignments() as assigned:
        _call_first(own, step.batch, results)
        again = results(step.batch)
    if not _apart(again, step.results):
        coverage.made(_TOPIC, "a batch gives the same results behind another batch")
        return
    known = {(id(x.space), x.key) for x in slots}
    made = [x for x in _variables(own.model) if (id(x[2]), x[3]) not in known and isinstance(x[1], nn.Module)]
    slots += [_Slot(*x, _ABSENT, _ABSENT) for x in made]
    changed = [x for x in slots if not _same(x.kept, x.now)]

    def restored(some: list[_Slot]) -> dict[str, Tensor]:
        for x in slots:
            x.restore()
        _call_first(own, step.batch, results)
        for x in some:
            x.restore()
        return results(step.batch)

    right = restored(slots)
    if _apart(right, restored(slots)) or not _apart(again, right):
        coverage.missed(
            _TOPIC, "results are random in evaluation mode, or depend on state that the doctor cannot see"
        )
        return
    for slot in changed:
        if not _apart(restored([slot]), right):
            coverage.made(_TOPIC, "a batch alone was compared with the batch behind another one")
            yield _finding(own.model, slot, again, right, _place(slot, lineage, assigned))
            return
    coverage.missed(_TOPIC, "results depend on earlier calls, and no single attribute explains it")


def _call_first(own: Subject, batch: Any, results: Callable[[Any], Any]) -> None:
    """Call the model with other tokens, or with the same tokens if it does not run with others."""
    found = own.tokens(batch)
    try:
        results(batch if found is None else own.with_tokens(batch, found[0], changed_tokens(found[1])))
    except Exception:
        results(batch)


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative difference of results, or 0 if it is only rounding."""
    most = 0.0
    for name, x in one.items():
        y = other.get(name)
        error = distance(x, y) if y is not None and x.shape == y.shape else float("inf")
        most = max(most, error if error > _ROUNDING.get(x.dtype, SAME) else 0.0)
    return most


def _slots(model: nn.Module) -> list[_Slot]:
    found: list[_Slot] = []
    memo: dict[int, Any] = {}
    for name, owner, space, key in _variables(model):
        value = space[key]
        try:
            found.append(_Slot(name, owner, space, key, value, copy.deepcopy(value, memo)))
        except Exception:  # The object cannot be copied, such as a generator.
            continue
    return found


def _variables(model: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the name, the owner, the namespace and the key of each variable that a call may change."""
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        own = [x for x in vars(module) if x not in _OF_MODULE and not callable(vars(module)[x])]
        yield from ((f"{start}{x}", module, vars(module), x) for x in own)
        yield from (
            (f"{start}{x}", module, module._buffers, x) for x, y in module._buffers.items() if y is not None
        )
        classes |= {x: path for x in type(module).__mro__ if _is_users(x)}
    for kind in classes:
        for key, x in list(vars(kind).items()):
            if not key.startswith("__") and isinstance(x, (Tensor, list, dict)):
                yield f"{kind.__name__}.{key}", kind, vars(kind), key
            if inspect.isfunction(x):
                defaults = x.__defaults__ or ()
                names = x.__code__.co_varnames[: x.__code__.co_argcount][-len(defaults) :]
                for i, (name, y) in enumerate(zip(names, defaults, strict=False)):
                    if isinstance(y, (Tensor, list, dict)):
                        yield f"{key}'s default argument {name}", kind, defaults, i
                used = (
                    n for n in x.__code__.co_names if isinstance(x.__globals__.get(n), (Tensor, list, dict))
                )
                yield from ((n, kind, x.__globals__, n) for n in used)


def _is_users(kind: type) -> bool:
    try:
        return is_users(inspect.getfile(kind)) and "site-packages" not in inspect.getfile(kind)
    except (TypeError, OSError):
        return False


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
    name = slot.name.split()[-1] if " " in slot.name else str(slot.key)
    written = re.compile(rf"\b{re.escape(name)}{_CHANGES}")
    for of in kind.__mro__:
        if not _is_users(of):
            continue
        lines, first = inspect.getsourcelines(of)
        number = next((i for i, line in enumerate(lines) if written.search(line)), None)
        if number is not None:
            return Place(inspect.getfile(of), first + number)
    return None


def _finding(
    model: nn.Module, slot: _Slot, again: dict[str, Tensor], right: dict[str, Tensor], place: Place | None
) -> Finding:
    what = f"Results depend on an earlier call: {slot.name} keeps data of it"
    error = _apart(again, right)
    evidence = (
        f"behind a call with other tokens, results of a batch differ by {error:.1e} (relative)",
        f"{slot.name} before the first call: {_said(slot.kept)}",
    )
    tried = f"with {slot.name} as it was before the first call, the results do not differ"
    kinds = {kind for x in model.modules() for kind in type(x).__mro__ if _is_users(kind)}
    resets = sorted(n for kind in kinds for n in vars(kind) if _RESET.match(n) and n != "reset_parameters")
    if resets:
        remedy = f"Call {resets[0]}() before each new sequence"
        return Finding("state", what, at(place), evidence, remedy=remedy, tried=tried, severity="note")
    return Finding("state", what, at(place), evidence, tried=tried)


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return value if value is _ABSENT else repr(value)[:40]
