"""Padding behind attention, the order of samples, and inputs without an effect are found at their line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import reaching
import remedied
import torch
import wired
from test_masked import examined

from attnspan_lab.doctor.torch.isolation.mixing_remedies import of_operator

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def line_of(code: Any) -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if x.rstrip().endswith("# sick"))


@pytest.mark.parametrize("name", reaching.PAIRS)
def test_the_fault_is_found_first_and_its_remedy_mends_it(name: str) -> None:
    kind, code, remedy, sick, well = reaching.PAIRS[name]
    found = examined(sick())[0][0]
    assert (found.kind, found.severity) == (kind, "wrong")
    assert found.places[0].line == line_of(code)
    assert remedy in found.remedy
    assert [x.kind for x in examined(well())[0] if x.severity in ("wrong", "stops")] == []


def without_padding(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """The sample alone, in float64."""
    mask = batch.get("attention_mask", torch.ones(len(next(iter(batch.values()))), 1))
    length, real = mask.shape[1], int(mask[row].sum())
    found = {}
    for name, x in batch.items():
        x = x[row : row + 1].double() if x.is_floating_point() else x[row : row + 1]
        dims = [i for i, n in enumerate(x.shape) if n == length > 1]
        found[name] = x.narrow(dims[0], 0, real) if dims else x
    return found


@pytest.mark.parametrize("name", [x for x in reaching.PAIRS if "29 of" not in x])
def test_a_mended_sample_has_the_results_that_it_has_alone(name: str) -> None:
    """Exact results are the model's in float64 for one sample without padding."""
    *_, sick, well = reaching.PAIRS[name]
    errors = []
    for factory in (well, sick):
        model, (batch, *_), _ = factory()
        row = len(next(iter(batch.values()))) - 1
        with torch.no_grad():
            found = model(**batch)[row].double()
            exact_model = well()[0].double()
            if hasattr(exact_model, "table"):
                exact_model.table = exact_model.table.double()
            exact = exact_model(**without_padding(batch, row))[0]
        found = found[: len(exact)]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-2


def test_attention_before_the_pooling_is_known_to_hide_padding() -> None:
    found = examined(reaching.PAIRS["mean"][3]())[0][0]
    assert found.evidence[2] == "the first operator that padding changes: mean"
    assert found.evidence[3].startswith("attention hides the padding: 2 calls")


def test_the_line_of_a_mask_of_other_frames_is_named() -> None:
    found = examined(reaching.PAIRS["mask of channels first, 32 of 64"][3]())[0][0]
    assert "mask = attention_mask[:, ::STRIDE] if self.right" in found.places[1].text


def test_the_layer_that_forgets_its_memory_is_named() -> None:
    found = examined(reaching.PAIRS["forgotten memory"][3]())[0][0]
    assert found.what == "No result depends on src"
    assert found.evidence[1].startswith("decoder (Forgetful) receives a tensor that is made from src")


def test_an_input_of_the_loss_is_not_ignored() -> None:
    found, facts = examined(reaching.losing())
    assert [x.kind for x in found if x.severity == "wrong"] == []
    assert facts["checked"]["inputs"] == "each tensor was changed alone"


def test_an_input_behind_a_gate_of_0_is_not_ignored() -> None:
    found, _ = examined(reaching.translator(reaching.Gated)())
    assert [x.kind for x in found if x.severity == "wrong"] == []


def test_random_numbers_in_evaluation_mode_are_no_place_in_the_batch() -> None:
    _, _, sick, _, well = remedied.REMEDIED["recompute-random: own generator"]
    for factory in (sick, well):
        found, facts = examined(factory())
        assert "sample-axis" not in {x.kind for x in found}
        assert "draws random numbers" in facts["unchecked"]["order of samples"]


def test_padding_in_the_window_of_a_convolution_is_a_note() -> None:
    found, _ = examined(reaching.convolved())
    assert [(x.kind, x.severity) for x in found if x.severity == "wrong" or x.kind == "mask-lost"] == [
        ("mask-lost", "note")
    ]


def test_a_mean_over_a_padded_caption_is_found() -> None:
    """Attention hides the caption's padding, and the mean over the caption does not."""
    found = examined(wired.captioned(wired.Pooling)())[0][0]
    assert (found.kind, found.severity) == ("mask-lost", "wrong")
    assert "caption.mean(1, keepdim=True)" in found.places[0].text


def test_attention_within_groups_of_tokens_says_what_was_not_examined() -> None:
    _, facts = examined(reaching.grouped())
    assert (
        "attends within 8 sequences of 6 tokens, made from 2 samples"
        in facts["unchecked"]["grouping of tokens"]
    )
    _, facts = examined(wired.latents(wired.Attend)())
    assert "grouping of tokens" not in facts["unchecked"]


def test_a_video_whose_sides_are_as_long_as_its_caption_is_not_cut() -> None:
    found, facts = examined(reaching.captioned(2, 12, 12))
    assert [x.what for x in found if x.severity == "wrong"] == []
    assert "padding outside of attention" not in facts["unchecked"]


def test_padding_that_an_unknown_operator_reads_has_a_remedy_for_all_layers() -> None:
    cause, remedy = of_operator("attention_mask", "")
    assert "no operator" in cause
    assert remedy.startswith("Set padding to 0 before layers that mix tokens")
    assert "attention_mask[..., None]" in of_operator("attention_mask", "cumsum")[1]
