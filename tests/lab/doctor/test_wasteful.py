"""Loops of attention and needless padding are found at their lines. Their remedies keep the results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import wasteful
from test_masked import examined

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.cost.loops import loop_findings
from attnspan_lab.doctor.torch.isolation.needless_padding import needless_findings
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.recording.watch import watching
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.zoo.step import in_float64

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def of_kind(made: Any, kind: str) -> list[Finding]:
    return [x for x in examined(made)[0] if x.kind == kind]


def left(made: Any, kind: str) -> list[Finding]:
    """The findings of one kind, without the other checks of a stage."""
    subject, coverage = Subject(*made), Coverage()
    batch = subject.batches[0]
    with watching(subject.rows(batch), subject.named(batch)) as watcher, torch.no_grad():
        subject.step(subject.model, batch, backward=False)
    step = recorded(subject, batch, {x.place for x in watcher.calls if not x.kernel and x.place is not None})
    assert watcher.calls
    if kind == "loop":
        return list(loop_findings(step, watcher.calls, set()))
    return list(needless_findings(step, watcher.calls, coverage, set()))


def results(made: Any) -> dict[str, torch.Tensor]:
    """Results of the first batch in float64, at real tokens."""
    with in_float64():
        subject = Subject(*made)
        subject.model.double()
        batch = {k: x.double() if x.is_floating_point() else x for k, x in subject.batches[0].items()}
        with torch.no_grad():
            (out,) = subject.results(subject.call(subject.model, batch), {}).values()
    valid = batch.get("attention_mask")
    return out[valid.bool()] if valid is not None and valid.shape == out.shape[:2] else out


@pytest.mark.parametrize("name", wasteful.PAIRS)
def test_waste_is_found_and_the_remedy_keeps_results(name: str) -> None:
    kind, code, sick, words, right = wasteful.PAIRS[name]
    (found,) = of_kind(sick(), kind)
    source, first = inspect.getsourcelines(code)
    assert found.severity == "slow"
    assert found.places[0].line == next(
        first + i for i, x in enumerate(source) if x.rstrip().endswith("# sick")
    )
    assert words in found.remedy
    assert "differ by" in found.tried or "written out" in name
    assert left(right(), kind) == []
    assert torch.allclose(results(sick()), results(right()), atol=1e-9)


@pytest.mark.parametrize("name", wasteful.WELL)
def test_work_that_is_needed_is_not_waste(name: str) -> None:
    kind, made = wasteful.WELL[name]
    assert left(made(), kind) == []


def test_the_line_with_the_loop_over_modules_is_named() -> None:
    (found,) = of_kind(wasteful.PAIRS["heads"][2](), "loop")
    assert found.count == 4
    assert found.places[1].text.endswith("# the loop")
    assert found.evidence[0] == "4 calls with q of shape (4, 24, 8)"


def test_the_share_of_padding_is_counted() -> None:
    (found,) = of_kind(wasteful.PAIRS["padding in front"][2](), "padding")
    assert found.what.startswith("At least 69% of the columns")
    assert found.evidence[0] == "columns that a sample needs: 20 of 64, 16 of 64"
    assert "lie in front of these. In this batch, they have 68.8% of the tokens" in found.evidence[1]
    assert "90.2% of the pairs" in found.evidence[1]
