"""Decode steps, state between calls and growing caches are found at their line, and twins are healthy."""

from __future__ import annotations

import inspect
from typing import Any

import decoders
import pytest
import torch
from test_masked import examined

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.decoding.prefill_parity import decode_findings
from attnspan_lab.doctor.torch.decoding.state import state_findings
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
_TWINS = [(name, i) for name, x in decoders.DECODE.items() for i in range(len(x[3]))]


def line_of(code: Any, mark: str = "# sick") -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if mark in x)


def checked(factory: Any) -> tuple[dict[str, Finding], dict[str, Any]]:
    """Findings of these two checks alone by kind, and what was checked. A whole examination takes longer."""
    subject, coverage = Subject(*factory()), Coverage()
    step = recorded(subject, subject.batches[0], ())
    found = [*state_findings(step, coverage), *decode_findings(step, coverage, explained=False)]
    assert len({x.kind for x in found}) == len(found)
    return {x.kind: x for x in found}, coverage.facts


@pytest.mark.parametrize("name", decoders.DECODE)
def test_a_decode_step_that_differs_is_found_at_its_line(name: str) -> None:
    code, sick, remedy, _ = decoders.DECODE[name]
    found, _ = checked(sick)
    assert set(found) - {"cache-cat"} == {"decode"}
    own = found["decode"]
    assert own.severity == "wrong"
    assert own.places[0].line == line_of(code, "# sick" if "# sick" in inspect.getsource(code) else "# cat")
    assert remedy in own.remedy
    # Learned positions and reordered samples change more than attention.
    alone = name not in ("positions inside", "reordered")
    assert ("with the prefill's results in these calls" in own.tried) == alone


@pytest.mark.parametrize(("name", "number"), _TWINS)
def test_a_decoder_whose_steps_equal_a_prefill_is_healthy(name: str, number: int) -> None:
    found, facts = checked(decoders.DECODE[name][3][number])
    assert set(found) <= {"cache-cat"}
    assert "equal one prefill" in facts["checked"]["decoding"]


@pytest.mark.parametrize("name", decoders.WELL)
def test_other_healthy_decoders_are_checked(name: str) -> None:
    found, facts = checked(decoders.WELL[name])
    assert set(found) <= {"cache-cat"}
    assert "equal one prefill" in facts["checked"]["decoding"]
    assert ("rounding" in facts["checked"]["decoding"]) == (name == "quantized")


@pytest.mark.parametrize("name", decoders.UNCOMPARED)
def test_a_decoder_that_cannot_be_compared_is_named(name: str) -> None:
    factory, why = decoders.UNCOMPARED[name]
    found, facts = checked(factory)
    assert found == {}
    assert why in facts["unchecked"]["decoding"]


def test_attention_that_is_written_out_is_compared() -> None:
    code, sick, well = decoders.WRITTEN
    found, _ = examined(sick())
    assert [(x.kind, x.places[0].line) for x in found if x.severity == "wrong"] == [("decode", line_of(code))]
    found, facts = examined(well())
    assert [x.kind for x in found if x.severity == "wrong"] == []
    assert "equal one prefill" in facts["checked"]["decoding"]


@pytest.mark.parametrize("name", decoders.STATE)
def test_state_between_calls_is_found_where_it_is_written(name: str) -> None:
    code, attribute, sick, twins = decoders.STATE[name]
    found, _ = checked(sick)
    own = found["state"]
    assert (own.severity, own.places[0].line) == ("wrong", line_of(code))
    assert own.what.endswith(f"{attribute} keeps data of it")
    assert own.tried.endswith("the results do not differ")
    for twin in twins:
        found, facts = checked(twin)
        assert found == {}
        assert facts["checked"]["state"] == "a batch gives the same results behind another batch"


def test_a_state_with_a_reset_is_a_note() -> None:
    own = checked(decoders.stacked(decoders.Resettable))[0]["state"]
    assert (own.severity, own.remedy) == ("note", "Call reset_cache() before each new sequence")


@pytest.mark.parametrize("name", decoders.CATS)
def test_a_cache_that_grows_by_a_copy_is_a_cost(name: str) -> None:
    code, sick, twins = decoders.CATS[name]
    own = checked(sick)[0]["cache-cat"]
    assert (own.severity, own.places[0].line) == ("slow", line_of(code, "# cat"))
    tokens = decoders.LENGTH - (3 if name == "inside" else 0)  # The doctor decodes the prefill's tokens.
    layers, samples = 2, 2
    size = layers * 2 * samples * decoders.DIM * tokens * 4
    assert f"copies {size / 1024:.1f} KiB" in own.evidence[0]
    assert "index_copy_" in own.remedy
    for twin in twins:
        assert checked(twin)[0] == {}


def test_a_joint_sequence_is_no_cache() -> None:
    assert checked(decoders.JOINT)[0] == {}


@pytest.mark.parametrize("name", ["positions by an argument", "wrong slot"])
def test_the_remedies_give_right_results(name: str) -> None:
    """A twin is the sick model with the remedy. Its decode step equals a prefill in float64."""
    model, (batch, *_), _ = decoders.DECODE[name][3][0]()
    model, ids = model.double(), batch["input_ids"]
    whole, part = model(ids), model(ids[:, :-1])
    last = part[1] if isinstance(part, tuple) else ids.shape[1] - 1
    step = model(ids[:, -1:], last)
    step, whole = (x[0] if isinstance(x, tuple) else x for x in (step, whole))
    assert torch.allclose(step[:, 0], whole[:, -1], atol=1e-12)
