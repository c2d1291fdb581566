"""Padding that no sample needs: columns at the end or in front that no sample of a batch uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.isolation.cutting import Sample, sample_of
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import CannotRun, Step, awake
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import listed

__all__ = ["needless_findings"]

_SHARE = 0.25  # of the columns, in every batch
_TOPIC = "padding that no sample needs"


def needless_findings(
    step: Step, calls: list[Attention], coverage: Coverage, done: set[Place]
) -> Iterator[Finding]:
    """Yield a finding if all batches can be cut to their longest sample, and this batch has the same results.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    subject, place = step.subject, next((x.place for x in calls), None)
    if place is None or done:
        return
    parts = [_part(subject, x) for x in (step.batch, *subject.batches)]
    known = [x for x in parts if x is not None]
    if len(known) < len(parts) or any(stop - start > (1 - _SHARE) * size for start, stop, size in known):
        return
    start, stop, length = known[0]
    try:
        step = awake(step)
        whole, index = sample_of(subject, step.batch), torch.arange(start, stop)
        change = _change(step, step.again(whole.cut(step.batch, index)), whole, index)
    except (CannotRun, RuntimeError, ValueError) as error:
        coverage.missed(_TOPIC, f"the shorter batch cannot be run: {error}"[:160])
        return
    coverage.made(_TOPIC, f"cut to tokens {start} to {stop - 1}, results change by {change:.1e}")
    dtype = next((x.dtype for x in step.results.values()), torch.float32)
    if change > ROUNDING.get(dtype, 1e-4):
        return
    done.add(place)
    used, sizes = [(b - a) / n for a, b, n in known], [f"{b - a} of {n}" for a, b, n in known[1:]]
    where = "behind" if not start else "in front of" if stop == length else "around"
    what = f"At least {1 - max(used):.0%} of the columns of each batch are padding that no sample needs"
    evidence = (
        f"columns that a sample needs: {listed(sizes, 6)}",
        f"the other columns lie {where} these. In this batch, they have {1 - used[0]:.1%} of the tokens, and "
        f"{1 - used[0] ** 2:.1%} of the pairs",
    )
    tried = f"cut to the longest sample, results of real tokens differ by {change:.1e} (relative)"
    yield Finding("padding", what, at(place), evidence, tried=tried)


def _part(subject: Subject, batch: Any) -> tuple[int, int, int] | None:
    """Find begin and end of the columns that a sample needs, and the number of columns."""
    valid = subject.declared(batch).valid
    if valid is None or not bool(valid.any()):
        return None
    columns = valid.any(0).nonzero().flatten().tolist()
    return columns[0], columns[-1] + 1, valid.shape[1]


def _change(step: Step, other: Step, whole: Sample, index: Tensor) -> float:
    """Compare results: at the real tokens, or whole if they have no row for each token."""
    valid, found = step.subject.declared(step.batch).valid, 0.0
    assert valid is not None
    if not step.results or step.results.keys() != other.results.keys():
        raise ValueError("the results have other names")
    for name, x in step.results.items():
        y = other.results[name]
        if x.shape[:2] == valid.shape:
            x, y = x[valid], y[valid[:, index]]
        elif whole.length in x.shape:
            x = whole.cut(x, index)
        if x.shape != y.shape:
            raise ValueError(f"{name} has another shape")
        found = max(found, distance(y, x))
    return found
