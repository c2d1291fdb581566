"""Only calls of the predicted tokens have to be causal, and a proof needs results for each token."""

import pytest
import sick_sequences as sequences
from small_models import IDS, fused
from torch_runner import examined, grave

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("name", sequences.NAMES)
def test_the_causality_of_two_sequences_is_checked(name):
    _, facts = examined(sequences.translator(fused, **sequences.NAMES[name]))
    assert facts["checked"]["causality"] == "declared"


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


def test_results_without_labels_are_a_proof():
    _, facts = examined(sequences.trained(fused, label="labels"))
    assert facts["checked"]["causality"] == "declared"
    assert not any("by other layers" in x for x in facts["unchecked"])


def test_the_remedy_of_later_tokens_in_documents_separates_documents():
    found, _ = examined(sequences.trained(sequences.shows_all_documents, segment_ids=IDS))
    (later,) = (x for x in found if x.kind == "causality-lost")
    assert "mask=causal() & segments(segment_ids)" in later.remedy
    assert later.tried.endswith("changes no other result")
