"""Runner of tests of the doctor in JAX: faults, their remedies, and right models that could look sick.

A fault is a function whose first argument is 0 for the fault, or the number of the remedy to apply. Its line
ends in ``# sick``. If a helper has the line, the line ends in ``# sick: name``, and ``at`` is this name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax_samples import LENGTH, step_of, tokens, variables

from attnspan_lab.doctor.findings import KINDS, merged
from attnspan_lab.doctor.jax import STAGES, JaxSubject
from attnspan_lab.doctor.jax.float64_reference import reference
from attnspan_lab.doctor.jax.subject import Traced, floats, jax_subject

#: Stage that finds a kind. Others are found in eager mode.
STAGE_OF = {
    **dict.fromkeys(("recompile", "compile-error", "constant", "copy"), "compiled"),
    **dict.fromkeys(("rank-rows", "rank-gather", "rank-replicated"), "ranks"),
    "parity": "parity",
}
#: Kinds whose results the stage compares itself, or whose remedy gives arrays of other shapes.
NOT_COMPARED = ("recompile", "compile-error", "copy", "parity", "rank-rows", "rank-gather", "rank-replicated")
SEVERE = ("stops", "wrong", "compile")


@dataclass(frozen=True)
class Fault:
    """A fault, and what the doctor says about it.

    Args:
        kind: Kind of the finding.
        cause: Words of its cause.
        remedies: Words of its remedy: one text for each remedy that the function applies.
        made: The function.
        at: Function or class that has the line, or name of a line.
        stage: The stage to run.
        tried: Words about what the doctor tried.
        evidence: Words of its evidence.
        also: Kinds of other wrong findings that the fault causes.
        count: Times in a step.
        applied: Whether the function applies the remedies.
        parity: Whether gradients with the remedy are compared with float64.
    """

    kind: str
    cause: str
    remedies: tuple[str, ...]
    made: Callable[[int], Any]
    at: Any
    stage: str
    tried: str = ""
    evidence: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    count: int | None = None
    applied: bool = True
    parity: bool = False

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines of the fault."""
        if isinstance(self.at, str):
            return marked(self.made, self.at)
        source, first = inspect.getsourcelines(self.at)
        return {first + i for i, line in enumerate(source) if line.rstrip().endswith("# sick")}


def marked(made: Any, name: str) -> set[int]:
    """Find marks in the file of a function, or else in the file of samples."""
    for path in (inspect.getfile(inspect.unwrap(made)), Path(__file__).with_name("jax_samples.py")):
        lines = Path(path).read_text().splitlines()
        if found := {i for i, line in enumerate(lines, 1) if line.endswith(f"# sick: {name}")}:
            return found
    return set()


FAULTS: dict[str, Fault] = {}
#: Factories of right models, with their names.
RIGHT: dict[str, Callable[[], Any]] = {}


def fault(kind: str, cause: str = "", *remedies: str, at: Any = None, **options: Any) -> Any:
    """Note a factory."""

    def note(made: Any) -> Any:
        stage = options.pop("stage", STAGE_OF.get(kind, "eager"))
        FAULTS[made.__name__] = Fault(kind, cause, remedies, made, at or made, stage, **options)
        return made

    return note


def attends(kind: str, cause: str = "", *remedies: str, at: Any = None, **options: Any) -> Any:
    """Note a model whose attention is the function (number, q, k, v)."""
    own = {k: options.pop(k) for k in ("causal", "length", "given", "weights") if k in options}

    def note(attend: Any) -> Any:
        def made(well: int = 0) -> JaxSubject:
            return of_attention(partial(attend, well), **own)

        made.__name__, made.__wrapped__ = attend.__name__, attend  # type: ignore[attr-defined]
        fault(kind, cause, *remedies, at=at or attend, **options)(made)
        return attend

    return note


def of_attention(
    attend: Any, causal: bool | None = True, length: int = LENGTH, given: Any = None, weights: Any = None
) -> JaxSubject:
    return step_of(attend, causal, variables(**(weights or {})), **{"tokens": tokens(length)} | (given or {}))


def right(attend: Any = None, **options: Any) -> Any:
    """Note a right model whose attention is the function."""
    if attend is None:
        return partial(right, **options)
    RIGHT[attend.__name__] = partial(of_attention, attend, **options)
    return attend


def factory(made: Any) -> Any:
    """Note the factory of a right model."""
    RIGHT[made.__name__] = made
    return made


@contextmanager
def as_users_do() -> Iterator[None]:
    """The suite's own settings are stricter than a user's settings."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def facts_of(made: Any, *stages: str) -> dict[str, Any]:
    """Examine a subject or its factory: facts, findings, and what was checked or could not be checked."""
    facts: dict[str, Any] = {"checked": {}, "unchecked": {}}
    found = []

    def say(**what: Any) -> None:
        found.extend([what["finding"]] if "finding" in what else [])
        for name, value in what.get("facts", {}).items():
            facts[name] = facts[name] | value if name in ("checked", "unchecked") else value

    with as_users_do():
        subject = jax_subject(made() if callable(made) else made, "made")
        for stage in stages:
            STAGES[stage](subject, say, "")
    return facts | {"findings": list(merged(found))}


def examined(made: Any, *stages: str) -> tuple[list[Any], dict[str, str]]:
    """List the findings, and what could not be checked."""
    facts = facts_of(made, *stages)
    return facts["findings"], facts["unchecked"]


def sick(name: str) -> Callable[[], Any]:
    """Return the factory of a fault."""
    return partial(FAULTS[name].made, 0)


def of_kind(made: Any, kind: str, stage: str = "eager") -> Any:
    """Return the one finding of a kind."""
    (found,) = [x for x in examined(made, stage)[0] if x.kind == kind]
    return found


def check_fault(name: str) -> None:
    """Look for the right finding, at the right line. No other finding may be severe."""
    fault = FAULTS[name]
    found, unchecked = examined(partial(fault.made, 0), fault.stage)
    assert {x.kind for x in found if x.severity in SEVERE} <= {fault.kind, *fault.also}, found
    first = next((x for x in found if x.kind == fault.kind), None)
    assert first is not None, found
    assert first == found[0] or first.severity not in SEVERE, found
    assert first.severity == KINDS[fault.kind].severity
    # A helper's line comes before the line that calls it.
    lines = [x.line for x in first.places]
    inner = marked(check_fault, "helper")
    assert lines[0] in fault.lines or (lines[0] in inner and fault.lines & set(lines[1:])), first
    assert first.cause
    assert first.remedy
    assert fault.cause in first.cause, first
    assert all(any(said in x.remedy for x in found if x.kind == fault.kind) for said in fault.remedies), first
    assert fault.tried in first.tried, first
    assert ("are equal" in first.tried) == ("are equal" in fault.tried), first
    assert all(any(said in x for x in first.evidence) for said in fault.evidence), first
    assert fault.count in (None, first.count), first
    assert not any("the doctor failed" in x for x in unchecked.values()), unchecked


def check_remedy(name: str, number: int) -> None:
    """With the remedy, the finding is gone, and the results are right."""
    fault = FAULTS[name]
    stages = dict.fromkeys((fault.stage, *(["parity"] if fault.parity else [])))
    found, unchecked = examined(partial(fault.made, number), *stages)
    assert [x.what for x in found if x.severity in SEVERE or x.kind == fault.kind] == []
    assert not {"attention", "the mesh against one device"} & set(unchecked), unchecked
    if fault.kind not in NOT_COMPARED:
        with as_users_do():
            compare(fault, *(fault.made(x) for x in (number, 0)))


def compare(fault: Fault, well: Any, sick: Any) -> None:
    """Compare results of the remedy with float64. A wrong step has others, a slow step has the same."""
    subjects = [jax_subject(x, "made") for x in (well, sick)]
    traced = [Traced.of(x, x.batches[0]) for x in subjects]
    exact = reference(traced[0], gradients=False).results
    right, before = (floats(x.run(*x.leaves)) for x in traced)
    near = {"float16": 5e-3, "bfloat16": 3e-2}.get(str(right[0].dtype), 1e-5)
    assert error_of(right, exact) < near, error_of(right, exact)
    wrong = fault.kind == "reused-key" or (KINDS[fault.kind].severity == "wrong" and fault.kind != "nan")
    # A step with NaN is right elsewhere, and has few digits if it nearly overflows.
    nan = fault.kind == "nan"
    error = error_of(before, exact, only_finite=nan) / (30 if nan else 1)
    assert (error < near) != wrong, error


def error_of(found: list[Any], exact: list[np.ndarray], only_finite: bool = False) -> float:
    """Largest relative error of arrays, or infinity if one has NaN."""
    errors = []
    for x, y in zip((np.asarray(x, np.float64) for x in found), exact, strict=True):
        known = np.isfinite(x) if only_finite else np.ones(x.shape, bool)
        errors.append(float(np.linalg.norm((x - y)[known]) / (np.linalg.norm(y) + 1e-30)))
    return float("inf") if np.isnan(errors).any() else max(errors)
