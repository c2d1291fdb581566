"""Decoders that are healthy in unusual ways, or that cannot be compared with a prefill."""

import pytest
import sick_decoders as decoders
import torch
from torch_runner import examined, grave

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("name", decoders.WELL)
def test_other_healthy_decoders_are_checked(name):
    found, facts = examined(decoders.WELL[name])
    assert grave(found) == []
    assert "equal one prefill" in facts["checked"]["decoding"]
    assert ("rounding" in facts["checked"]["decoding"]) == (name == "quantized")


@pytest.mark.parametrize("name", decoders.UNCOMPARED)
def test_a_decoder_that_cannot_be_compared_is_named(name):
    factory, why = decoders.UNCOMPARED[name]
    found, facts = examined(factory)
    assert grave(found) == []
    assert why in facts["unchecked"]["decoding"]


def test_a_joint_sequence_is_no_cache():
    assert "cache-cat" not in {x.kind for x in examined(decoders.JOINT)[0]}


@pytest.mark.parametrize("factory", [decoders.RIGHT, decoders.made(decoders.ByStart, decoders.Static)])
def test_the_remedies_give_right_results(factory):
    """A twin is the sick model with the remedy. Its decode step equals a prefill in float64."""
    model, (batch, *_), _ = factory()
    model, ids = model.double(), batch["input_ids"]
    whole, part = model(ids), model(ids[:, :-1])
    last = part[1] if isinstance(part, tuple) else ids.shape[1] - 1
    step = model(ids[:, -1:], last)
    step, whole = (x[0] if isinstance(x, tuple) else x for x in (step, whole))
    assert torch.allclose(step[:, 0], whole[:, -1], atol=1e-12)
