"""Only calls of the predicted tokens have to be causal, and a proof needs results for each token."""

import pytest
import sick_sequences as sequences
from sick import examined, grave, lines_of
from small_models import IDS, fused

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("name", sequences.NAMES)
def test_a_right_encoder_is_not_accused(name):
    found, facts = examined(sequences.translator(fused, **sequences.NAMES[name]))
    assert grave(found) == []
    assert facts["checked"]["causality"] == "declared"


@pytest.mark.parametrize("name", sequences.NAMES)
def test_a_decoder_that_sees_later_tokens_is_accused_alone(name):
    found, _ = examined(sequences.translator(sequences.shows_all_to_tokens, **sequences.NAMES[name]))
    assert grave(found) == ["causality-lost"]
    assert [found[0].places[0].line] == lines_of(sequences.shows_all_to_tokens)
    assert found[0].evidence[1].startswith("changing these tokens changes")


def test_nothing_confirmed_is_no_finding_if_there_are_several_sequences():
    found, facts = examined(sequences.translator(sequences.shows_all_to_tokens, only_loss=True))
    assert grave(found) == []
    assert "causality" not in facts["checked"]
    assert facts["unchecked"]["causality"].endswith("the model returned only a scalar loss")
    found, facts = examined(sequences.translator(fused, only_loss=True))
    assert grave(found) == []
    assert "only a scalar loss" in facts["unchecked"]["later tokens seen by other layers"]


@pytest.mark.parametrize("length", [sequences.SHORTER, sequences.LENGTH])
def test_padding_of_one_of_several_sequences_is_proven_by_the_loss(length):
    made = sequences.translator(fused, length=length, valid=sequences.VALID, only_loss=True)
    found, _ = examined(made)
    assert grave(found) == ["mask-lost", "mask-lost"]  # in the encoder and across
    across = found[1]
    assert across.what == "Queries see the padding of input_ids here"
    assert across.evidence[0].startswith("changing padded entries of input_ids changes results by")
    assert across.tried == "with padding hidden in this call, changed padding changes no result"


@pytest.mark.parametrize("label", ["labels", "targets"])
def test_results_without_labels_are_a_proof(label):
    found, _ = examined(sequences.trained(sequences.shows_all_to_tokens, label))
    assert grave(found) == ["causality-lost"]
    assert found[0].evidence[1].startswith("changing these tokens changes")
    assert found[0].tried.endswith("changes no other result")


@pytest.mark.parametrize("name", sequences.WELL)
def test_healthy_twins_have_no_finding(name):
    found, facts = examined(sequences.WELL[name])
    assert grave(found) == []
    assert facts["checked"]["causality"] == "declared"
    assert not any("by other layers" in x for x in facts["unchecked"])


def test_a_model_that_returns_only_a_loss_is_said_in_plain_words():
    found, _ = examined(sequences.trained(sequences.shows_all_to_tokens, needs_labels=True))
    assert grave(found) == ["causality-lost"]
    assert found[0].evidence[1] == "not confirmed by changing tokens: the model returned only a scalar loss"


def test_the_remedy_of_a_leak_is_causal_if_the_model_is():
    made = sequences.trained(sequences.shows_all_documents, segment_ids=IDS)
    found, _ = examined(made)
    assert grave(found) == ["leak", "causality-lost"]
    for x in found[:2]:
        assert "mask=causal() & segments(segment_ids)" in x.remedy
        assert x.tried.endswith("changes no other result")
