"""Scales of scores that are probably mistakes are asked about, and scales that may be a choice are not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import scales
import torch
from test_masked import examined
from wired import latents

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.numbers.scale_factors import scale_findings
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.recording.watch import watching
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def of_scale(made: Any) -> list[Finding]:
    """Follow factors through a model, without the other checks of a stage."""
    subject, coverage = Subject(*made), Coverage()
    (batch,) = subject.batches
    with watching(subject.rows(batch), subject.named(batch)) as watcher, torch.no_grad():
        subject.step(subject.model, batch, backward=False)
    lines = {x.place for x in watcher.calls if not x.kernel and x.place is not None}
    found = list(scale_findings(recorded(subject, batch, lines), coverage, set()))
    facts = coverage.facts
    assert "scale of scores" in (*facts["checked"], *facts["unchecked"])
    return found


def lines_of(block: Any) -> list[int]:
    source, first = inspect.getsourcelines(block)
    return [first + i for i, x in enumerate(source) if x.rstrip().endswith("# sick")]


@pytest.mark.parametrize("name", scales.PAIRS)
def test_a_scale_that_is_probably_a_mistake_is_asked_about(name: str) -> None:
    fault, block, right = scales.PAIRS[name]
    (found,) = of_scale(latents(block)())
    assert found.severity == "note"
    assert [x.line for x in found.places] == lines_of(block)
    total = {"twice": "0.125", "none": "1,", "width": "0.1768"}[fault]
    assert f"the effective scale is {total}" in found.evidence[0]
    assert "1/sqrt(head dim 8) is 0.3536" in found.evidence[0]
    words = {"twice": "Keep one", "none": "Multiply the scores by 0.3536", "width": "use head_dim**-0.5"}
    assert words[fault] in found.remedy
    if name not in ("module", "before the heads"):
        assert "results of the model change by" in found.tried
        assert "does not show which scale is right" in found.tried
    assert of_scale(latents(right)()) == []


@pytest.mark.parametrize("block", scales.CHOICES)
def test_a_scale_that_may_be_a_choice_is_not(block: Any) -> None:
    assert of_scale(latents(block)()) == []


def test_lines_of_both_factors_are_in_the_remedy() -> None:
    found, _ = examined(latents(scales.Queries)())
    (own,) = [x for x in found if x.kind == "scale"]
    first, second = lines_of(scales.Queries)
    assert f"Remove the one at scales.py:{first}, or pass scale=1.0 at scales.py:{second}" in own.remedy
