"""Sick models, the findings that the doctor has to make about them, and healthy twins.

The faulty line ends in ``# sick``. A text that begins with `not_` must not be part of the finding.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

from small_models import model_of

from attnspan_lab.doctor.findings import KINDS, merged
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject


class Case(NamedTuple):
    """A sick model.

    Args:
        kind: Of the finding, which has to be the first one with its severity.
        code: Function or class with the faulty line, or this and the end of the line.
        made: Factory of the sick model.
        twins: Factories of healthy models. The first one has the remedy applied.
        right: Factory of right results, which the first twin has too. None if the sick model's inputs differ.
        severity: Of the finding.
        stage: Of the doctor.
        beside: Other kinds of wrong results that the model has too.
        says: Parts of the finding's texts, by field.
    """

    kind: str
    code: Any
    made: Any
    twins: tuple[Any, ...]
    right: Any
    severity: str
    stage: str
    beside: tuple[str, ...]
    says: dict[str, Any]


CASES: dict[str, Case] = {}


def sick(kind, code, made, *twins, name="", right=None, severity="", stage="eager", beside=(), **says):
    """Add a sick model. If it only costs, the first twin has the same results, unless `right` is False."""
    name = f"{kind}: {name or getattr(code, '__name__', '')}"
    assert name not in CASES, name
    severity = severity or KINDS[kind].severity
    if right is None and severity == "slow":
        right = made
    CASES[name] = Case(kind, code, made, twins, right or None, severity, stage, beside, says)


def attends(kind, *wells, name="", build=model_of, model=None, right=None, **given):
    """Add a model whose attention is the decorated function. Twins have other attention, or are factories.

    Args:
        kind: Of the finding.
        wells: Attention of the twins.
        name: Default: the function's.
        build: Builder of the models.
        model: Options of the builder.
        right: Attention with right results.
        given: The other arguments of `sick`.
    """

    def note(attend):
        made, *twins = (build(x, **(model or {})) for x in (attend, *wells))
        exact = build(right, **(model or {})) if callable(right) else right
        sick(kind, attend, made, *twins, name=name, right=exact, **given)
        return attend

    return note


@cache
def examined(factory, stage="eager", backend="aot_eager"):
    """Findings of a stage, and what the stage measured and checked."""
    found, facts = [], {}

    def say(**told):
        found.extend([told["finding"]] if "finding" in told else [])
        facts.update(told.get("facts", {}))

    STAGES[stage](Subject(*factory()), say, backend)
    return merged(found), facts


def found_in(factory, kind, stage="eager"):
    return next(x for x in examined(factory, stage)[0] if x.kind == kind)


def case_finding(name):
    case = CASES[name]
    return found_in(case.made, case.kind, case.stage)


def grave(found):
    """Kinds of the findings of wrong results and of failures."""
    return [x.kind for x in found if x.severity in ("wrong", "stops")]


def lines_of(code):
    """Numbers of the marked lines."""
    code, mark = code if isinstance(code, tuple) else (code, "# sick")
    lines, first = inspect.getsourcelines(getattr(code, "func", code))
    return [first + i for i, x in enumerate(lines) if x.rstrip().endswith(mark)]


def assert_says(finding, says):
    """Check that a finding's texts have these parts, and no part of `not_...`. "=" begins a whole text.

    `lines` are the lines of code that the finding names.
    """
    for name, parts in says.items():
        field = name.removeprefix("not_")
        told = [x.text for x in finding.places] if field == "lines" else getattr(finding, field)
        text = told if isinstance(told, str) else "\n".join(told)
        for part in parts if isinstance(parts, tuple) else (parts,):
            if part == "":
                assert not text, name
            elif part.startswith("="):
                assert text == part[1:], name
            else:
                assert (part in text) == (field == name), (name, part, text)
