"""Remedies are tried, alignments and documents are seen, and what was not checked is said."""

from __future__ import annotations

import inspect
from typing import Any

import masked
import pytest
import torch
from patients import Model

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.torch.stages import eager
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.zoo.step import in_float64

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def examined(made: Any) -> tuple[tuple[Finding, ...], dict[str, Any]]:
    found, facts = list[Finding](), dict[str, Any]()

    def say(**told: Any) -> None:
        found.extend([told["finding"]] if "finding" in told else [])
        facts.update(told.get("facts", {}))

    model, batches, *expected = made
    eager(Subject(model, batches, *expected), say, "")
    return merged(found), facts


def planted(name: str) -> list[int]:
    source = inspect.unwrap(getattr(masked, name))
    # Models with a cache share the line that makes their mask.
    of = masked.bottom_right if name == "costly_decoding" else source
    lines, first = inspect.getsourcelines(of)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# sick")]


def results(made: Any) -> torch.Tensor:
    model, (batch, *_), *_ = made
    with torch.no_grad():
        return model(**batch)


@pytest.mark.parametrize("name", masked.FORMS)
def test_the_form_that_replaces_a_mask_is_right(name: str) -> None:
    made = getattr(masked, name)()
    (found,), _ = examined(made)
    assert found.kind == "dense-mask"
    assert found.places[0].line in planted(name)
    text, attend = masked.FORMS[name]
    assert text in found.remedy
    assert "these forms: results of 1 call differ by at most" in found.tried
    before, batches, *expected = made
    after = Model(attend)
    assert examined((after, batches, *expected))[0] == ()
    with in_float64():
        wanted = results((before.double(), batches))
    assert torch.allclose(results((after, batches)).double(), wanted, atol=1e-5)


def test_is_causal_is_not_offered_where_it_changes_results() -> None:
    (found,), _ = examined(masked.costly_decoding())
    assert "is_causal" not in found.remedy
    assert "is_causal=True, without attn_mask: results would differ by" in found.tried
    (found,), _ = examined(masked.costly_padding())
    assert "Pass is_causal" not in found.remedy


def test_a_mask_without_a_shorter_form_stays() -> None:
    (found,), _ = examined(masked.costly_without_form())
    assert found.remedy == "Keep the mask: the doctor knows no shorter form with the same results"


@pytest.mark.parametrize("name", ["sick_top_left", "sick_top_left_of_one", "sick_top_left_tril"])
def test_a_causal_mask_that_counts_from_the_first_key_is_wrong(name: str) -> None:
    made = getattr(masked, name)()
    found = examined(made)[0][0]
    assert (found.kind, found.severity) == ("causal-alignment", "wrong")
    assert found.places[0].line in planted(name)
    assert "Pass mask=causal() to attnspan.torch.attention. Or: pass attn_mask=" in found.remedy
    assert examined(masked.well_decoding())[0] == ()
    exact = results(masked.cached(masked.bottom_right, made[1][0]["input_ids"].shape[1]))
    ours = results(masked.cached(masked._attnspan(mask=masked.causal()), made[1][0]["input_ids"].shape[1]))
    assert torch.allclose(ours, exact, atol=1e-5)
    assert not torch.allclose(results(made), exact, atol=1e-2)


@pytest.mark.parametrize("name", ["well_static_cache", "well_cross", "well_packed"])
def test_twins_with_other_keys_have_no_finding(name: str) -> None:
    assert examined(getattr(masked, name)())[0] == ()


def test_later_tokens_behind_a_cache_are_seen() -> None:
    found, _ = examined(masked.sick_later_in_cache())
    assert [x.kind for x in found] == ["causality-lost"]
    assert found[0].places[0].line in planted("sick_later_in_cache")
    assert found[0].remedy.startswith("Pass mask=causal() to attnspan.torch.attention")
    assert "is_causal" not in found[0].remedy
    found, _ = examined(masked.sick_packed())
    assert found[0].kind == "leak"
    assert found[0].places[0].line in planted("sick_packed")
    assert "mask=causal() & segments(torch.arange(len(cu_seqlens) - 1)" in found[0].remedy
    assert found[0].tried.endswith("changes no other result")


@pytest.mark.parametrize("spelling", masked.SPELLINGS)
def test_documents_are_known_in_every_spelling(spelling: str) -> None:
    sick, well = masked.documents_of(**masked.SPELLINGS[spelling])
    (found,), _ = examined(sick)
    assert found.kind == "leak"
    assert "mask=causal() & segments(" in found.remedy
    assert found.tried == "with this mask, changing these tokens changes no other result"
    found, facts = examined(well)
    assert found == ()
    assert facts["checked"]["documents"] == f"read from {next(iter(masked.SPELLINGS[spelling]))}"


@pytest.mark.parametrize("name", masked.OTHERS)
def test_other_tensors_are_no_documents(name: str) -> None:
    found, facts = examined(masked.documents_of(**masked.OTHERS[name])[0])
    assert found == ()
    assert "no batch has several documents" in facts["unchecked"]["documents"]


def test_dropout_does_not_hide_a_leak() -> None:
    (found, *_), facts = examined(masked.sick_with_dropout())
    assert found.kind == "leak"
    assert found.evidence[1].startswith("changing these tokens changes")
    assert facts["unchecked"] == {"padding": "no batch has padding that the doctor knows"}


def test_what_was_not_checked_is_said() -> None:
    found, facts = examined(masked.no_attention())
    assert found == ()
    assert "no attention call was seen" in facts["unchecked"]["attention"]
    found, facts = examined(masked.undeclared())
    assert found == ()
    assert facts["unchecked"]["causality"].startswith("not declared, and tokens see later tokens at")
    _, facts = examined(masked.costly_causal())
    assert facts["checked"]["causality"] == "declared"
