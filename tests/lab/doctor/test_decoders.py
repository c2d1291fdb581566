"""Decode steps, state between calls and growing caches are found at their line, and twins are healthy."""

import inspect

import pytest
import sick_decoders as decoders
import torch
from sick import examined, grave, lines_of

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.decoding.prefill_parity import decode_findings
from attnspan_lab.doctor.torch.decoding.state import state_findings
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
_TWINS = [(name, i) for name, x in decoders.DECODE.items() for i in range(3, len(x))]


def checked(factory):
    """Findings of these two checks alone by kind, and what was checked. A whole examination takes longer."""
    subject, coverage = Subject(*factory()), Coverage()
    step = recorded(subject, subject.batches[0], ())
    found = [*state_findings(step, coverage), *decode_findings(step, coverage, explained=False)]
    assert len({x.kind for x in found}) == len(found)
    return {x.kind: x for x in found}, coverage.facts


@pytest.mark.parametrize("name", decoders.DECODE)
def test_a_decode_step_that_differs_is_found_at_its_line(name):
    code, sick, remedy, *_ = decoders.DECODE[name]
    found, _ = checked(sick)
    assert set(found) - {"cache-cat"} == {"decode"}
    own = found["decode"]
    assert own.severity == "wrong"
    mark = "# sick" if "# sick" in inspect.getsource(code) else "# cat"
    assert own.places[0].line in lines_of((code, mark))
    assert remedy in own.remedy
    # Learned positions and reordered samples change more than attention.
    alone = name not in ("positions inside", "reordered")
    assert ("with the prefill's results in these calls" in own.tried) == alone


@pytest.mark.parametrize(("name", "number"), _TWINS)
def test_a_decoder_whose_steps_equal_a_prefill_is_healthy(name, number):
    found, facts = checked(decoders.DECODE[name][number])
    assert set(found) <= {"cache-cat"}
    assert "equal one prefill" in facts["checked"]["decoding"]


@pytest.mark.parametrize("name", decoders.WELL)
def test_other_healthy_decoders_are_checked(name):
    found, facts = checked(decoders.WELL[name])
    assert set(found) <= {"cache-cat"}
    assert "equal one prefill" in facts["checked"]["decoding"]
    assert ("rounding" in facts["checked"]["decoding"]) == (name == "quantized")


@pytest.mark.parametrize("name", decoders.UNCOMPARED)
def test_a_decoder_that_cannot_be_compared_is_named(name):
    factory, why = decoders.UNCOMPARED[name]
    found, facts = checked(factory)
    assert found == {}
    assert why in facts["unchecked"]["decoding"]


def test_attention_that_is_written_out_is_compared():
    sick, well = decoders.WRITTEN
    (own,) = (x for x in examined(sick)[0] if x.severity == "wrong")
    assert (own.kind, [own.places[0].line]) == ("decode", lines_of(decoders.Positionless.positions))
    found, facts = examined(well)
    assert grave(found) == []
    assert "equal one prefill" in facts["checked"]["decoding"]


@pytest.mark.parametrize("name", decoders.STATE)
def test_state_between_calls_is_found_where_it_is_written(name):
    code, attribute, sick, twins = decoders.STATE[name]
    found, _ = checked(sick)
    own = found["state"]
    assert (own.severity, [own.places[0].line]) == ("wrong", lines_of(code))
    assert own.what.endswith(f"{attribute} keeps data of it")
    assert own.tried.endswith("the results do not differ")
    for twin in twins:
        found, facts = checked(twin)
        assert found == {}
        assert facts["checked"]["state"] == "a batch gives the same results behind another batch"


def test_a_state_with_a_reset_is_a_note():
    own = checked(decoders.stacked(decoders.Resettable))[0]["state"]
    assert (own.severity, own.remedy) == ("note", "Call reset_cache() before each new sequence")


@pytest.mark.parametrize("name", decoders.CATS)
def test_a_cache_that_grows_by_a_copy_is_a_cost(name):
    code, sick, twins = decoders.CATS[name]
    own = checked(sick)[0]["cache-cat"]
    assert (own.severity, [own.places[0].line]) == ("slow", lines_of((code, "# cat")))
    tokens = decoders.LENGTH - (3 if name == "inside" else 0)  # The doctor decodes the prefill's tokens.
    layers, samples = 2, 2
    size = layers * 2 * samples * decoders.DIM * tokens * 4
    assert f"copies {size / 1024:.1f} KiB" in own.evidence[0]
    assert "index_copy_" in own.remedy
    for twin in twins:
        assert checked(twin)[0] == {}


def test_a_joint_sequence_is_no_cache():
    assert checked(decoders.JOINT)[0] == {}


@pytest.mark.parametrize("name", ["positions by an argument", "wrong slot"])
def test_the_remedies_give_right_results(name):
    """A twin is the sick model with the remedy. Its decode step equals a prefill in float64."""
    model, (batch, *_), _ = decoders.DECODE[name][3]()
    model, ids = model.double(), batch["input_ids"]
    whole, part = model(ids), model(ids[:, :-1])
    last = part[1] if isinstance(part, tuple) else ids.shape[1] - 1
    step = model(ids[:, -1:], last)
    step, whole = (x[0] if isinstance(x, tuple) else x for x in (step, whole))
    assert torch.allclose(step[:, 0], whole[:, -1], atol=1e-12)
