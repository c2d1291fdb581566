"""The doctor says nothing false about models of a stranger, and no check of the doctor ends a stage."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import strangers
import torch
from patients import LENGTH, Model, fused, tokens
from test_masked import examined

from attnspan_lab.doctor import process
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.isolation import axes, samples
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding, highest_hiding_in
from attnspan_lab.doctor.torch.recording import watch

pytestmark = [pytest.mark.filterwarnings("ignore")]
SLOW = pytest.mark.slow


def line_of(code: Any, mark: str = "# sick") -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if x.rstrip().endswith(mark))


def kinds(found: Any) -> list[str]:
    return [x.kind for x in found]


# Numbers that hide


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        ([0.0, -100.0], -100.0),
        ([0.3, -0.2, -99.8, -100.1, -200.0], -99.8),
        ([0.0, -1e4], HIDDEN),
        ([0.0, -1e9, -torch.inf], HIDDEN),
        ([0.0, -3.0], HIDDEN),
        ([0.5 * -x for x in range(200)], HIDDEN),  # ALiBi
    ],
)
def test_a_gap_tells_masks_from_biases(numbers: list[float], limit: float) -> None:
    assert highest_hiding(torch.tensor(numbers)) == pytest.approx(limit)


def test_a_number_hides_only_below_the_models_own_scores() -> None:
    mask, q = torch.tensor([[0.0, -30.0]]), torch.ones(1, 1, 1, 4)
    k = torch.tensor([[1.0] * 4, [2.0] * 4])[None, None]
    assert highest_hiding_in(mask, q, k) == -30.0
    assert highest_hiding_in(mask, q * 10, k) == HIDDEN  # The scores differ by 20.


@SLOW
@pytest.mark.parametrize("number", [-30.0, -100.0, -1e9])
def test_the_remedy_of_written_attention_keeps_a_mask_of_finite_numbers(number: float) -> None:
    """The first batch has no padding, so its mask hides nothing."""
    found, _ = examined(strangers.written_padding(number)())
    (unfused,) = [x for x in found if x.kind == "unfused"]
    assert unfused.places[0].line == line_of(strangers.written_padding)
    assert "attn_mask=(your mask)" in unfused.remedy
    assert "wrong" not in {x.severity for x in found}


@SLOW
@pytest.mark.parametrize("number", [-30.0, -100.0, -1e4])
def test_a_causal_mask_of_finite_numbers_has_a_form_with_equal_results(number: float) -> None:
    ((found,), _) = examined(strangers.fused_number(number)())
    assert (found.kind, found.places[0].line) == ("dense-mask", line_of(strangers.fused_number))
    assert (
        found.remedy
        == "Pass is_causal=True, without attn_mask. Or: Pass mask=causal() to attnspan.torch.attention"
    )
    made, (batch,), _ = strangers.fused_number(number)()
    assert torch.allclose(made(**batch), Model(fused)(**batch), atol=1e-5)


@SLOW
def test_a_small_number_is_no_mask() -> None:
    found, _ = examined(strangers.fused_number(-3.0)())
    assert "causality-lost" in kinds(found)
    assert not any("Pass is_causal=True, without attn_mask" in x.remedy for x in found)
    found, _ = examined(strangers.written_windows(-3.0)())
    (mask,) = [x for x in found if x.kind == "dense-mask"]
    assert "full()" not in mask.remedy


# Windows


@SLOW
@pytest.mark.parametrize("attend", [strangers.fused_windows, strangers.float_windows])
def test_windows_with_a_mask_are_examined(attend: Any) -> None:
    ((found,), facts) = examined((Model(attend), tokens()))
    assert found.kind == "dense-mask"
    assert found.remedy.startswith("Keep the mask")
    assert "heads" not in found.tried
    assert "32,768" not in "".join(found.evidence)
    assert "quadratically" not in found.cause
    assert "axes" in facts["checked"]
    assert not {"operators", "attention"} & set(facts["unchecked"])


@SLOW
@pytest.mark.parametrize(("number", "every"), [(-100.0, 1), (float("-inf"), 2), (-100.0, 2)])
def test_the_mask_of_some_windows_is_kept(number: float, every: int) -> None:
    found, _ = examined(strangers.written_windows(number, every)())
    (unfused,) = [x for x in found if x.kind == "unfused"]
    assert "attn_mask=(your mask)" in unfused.remedy
    assert ("1 of the 2 calls here have a mask" in unfused.remedy) == (every == 2)
    assert not any("full()" in x.remedy or "heads hide" in x.tried for x in found)
    assert not any("32,768" in y for x in found for y in x.evidence)


# Checks that raise


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("sizes must match")


@pytest.mark.parametrize(
    ("module", "name", "topic"),
    [(samples, "_others", "samples"), (axes, "source_of", "axes"), (watch, "fused", "operators")],
)
def test_a_check_that_raises_is_named_and_ends_no_stage(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, topic: str
) -> None:
    monkeypatch.setattr(module, name, broken)
    found, facts = examined((Model(fused), tokens(), {"causal": True}))
    assert found == ()
    assert "RuntimeError: sizes must match" in facts["unchecked"][topic]
    assert ("Your own step does not raise" in facts["unchecked"][topic]) == (topic != "operators")
    assert "gradients" in facts["checked"]


_TRACE = """Traceback (most recent call last):
  File "/home/me/model.py", line 3, in forward
    y = x + z
{}RuntimeError: sizes must match
"""
_DISPATCH = f'  File "{watch.__file__}", line 7, in {{}}\n    out = op()\n'


def test_the_code_that_raised_is_named() -> None:
    found = process._crash(_TRACE.format(""), 1, "running", ())
    said = "This line raised an error while the doctor ran the model again: RuntimeError: sizes must match"
    assert found.what == said
    assert found.places == (Place("/home/me/model.py", 3, "forward"),)
    passed = _TRACE.format(_DISPATCH.format("__torch_dispatch__"))
    assert process._crash(passed, 1, "running", ()).what == said
    found = process._crash(_TRACE.format(_DISPATCH.format("_note")), 1, "running", ())
    assert found.what == "The doctor raised an error while running: RuntimeError: sizes must match"
    assert found.cause.endswith("This says nothing about your model")
    assert "sys.exit()" not in found.remedy


# State


@SLOW
def test_the_doctors_own_steps_leave_the_state_of_a_model_alone() -> None:
    model = strangers.Counting()
    found, facts = examined((model, tokens((LENGTH, LENGTH - 4)), {"causal": True}))
    assert set(kinds(found)) <= {"state"}  # The position is state of earlier calls.
    assert not {"axes", "samples", "attention"} & set(facts["unchecked"])
    assert (model.position, model.seen) == (2 * LENGTH - 4, [LENGTH, 2 * LENGTH - 4])


class _Frozen(dict):  # type: ignore[type-arg]
    """A config as diffusers has it."""

    def __setitem__(self, *_: object) -> None:
        raise RuntimeError

    update = __setitem__  # type: ignore[assignment]


@SLOW
def test_a_config_that_cannot_be_written_is_left_alone() -> None:
    model, batches, *_ = strangers.decoder()
    model.config = _Frozen(layers=2)
    found, _ = examined((model, batches))
    assert "error" not in kinds(found)
    assert model.config == {"layers": 2}


# Prefill and decode


@SLOW
def test_a_form_of_the_prefill_is_tried_on_decode_steps() -> None:
    ((found,), _) = examined(strangers.decoder())
    assert found.places[0].line == line_of(strangers.Decoder)
    assert found.remedy == "Pass mask=causal() to attnspan.torch.attention"
    refused = "is_causal=True, without attn_mask: it would change results of 1 of 2 calls of this line"
    assert refused in found.tried


# Gradients


@SLOW
@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_a_teacher_without_a_gradient_is_one_question(how: str) -> None:
    ((found,), _) = examined(strangers.distilled(how))
    assert (found.kind, found.severity) == ("no-gradient", "note")
    assert found.what == "The parameters of teacher are trainable but get no gradient, from this line"
    assert found.places[0].line == line_of(strangers.Distilled, f"# sick: {how}")
    assert "teacher.requires_grad_(False)" in found.remedy
    assert found.tried == "frozen and in torch.no_grad(), results and all other gradients are equal"
    # Each of three layers saves its input and its GELU's input. The first input belongs to the embedding too.
    bytes_saved = 6 * 2 * LENGTH * 32 * 4
    assert (f"saves {bytes_saved / 1024:.1f} KiB" in found.remedy) == (how == "detach"), found.remedy
    assert examined(strangers.distilled("frozen"))[0] == ()


@SLOW
def test_a_layer_without_a_gradient_is_still_wrong() -> None:
    ((found,), _) = examined(strangers.distilled("layer"))
    assert (found.kind, found.severity) == ("no-gradient", "wrong")
    assert found.places[0].line == line_of(strangers.Distilled, "# sick: layer")
    assert found.what == "2 trainable parameters have no gradient: layer.weight, layer.bias"


# Weights, shared lines and images


@SLOW
def test_a_line_that_needs_the_weights_is_named() -> None:
    ((found,), _) = examined((Model(strangers.Maps()), tokens()))
    assert found.kind == "unfused"
    assert [x.line for x in found.places] == [line_of(strangers.Maps), line_of(strangers.Maps, "# use")]
    assert found.remedy.startswith(
        f"Keep these lines where strangers.py:{found.places[1].line} needs the weights"
    )


@SLOW
def test_only_the_guilty_calls_of_a_shared_line_are_accused() -> None:
    found, _ = examined((strangers.TwoLayers(), tokens(), {"causal": True}))
    assert kinds(found) == ["causality-lost"]
    assert [x.line for x in found[0].places] == [
        line_of(strangers.shared),
        line_of(strangers.TwoLayers, "# sick: caller"),
    ]
    assert found[0].evidence[-1].startswith("1 of the 2 calls of this line show them")
    assert found[0].tried == "with this mask, changing these tokens changes no other result"


def test_samples_of_images_are_compared() -> None:
    _, facts = examined(strangers.images())
    assert facts["checked"]["samples"] == "a changed sample changes the results of no other sample"
    _, facts = examined(strangers.images(mixes=True))
    assert facts["checked"]["samples"].startswith("a changed sample changes the results of 2 other samples")
    _, facts = examined(strangers.distilled("frozen"))
    assert facts["unchecked"]["samples"] == "no result has a row for each of the 2 samples"


def test_a_padding_mask_of_another_length_is_named() -> None:
    mask = torch.ones(2, LENGTH // 2).long()
    mask[0, 4:] = 0

    def attend(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
        return fused(q, k, v)

    _, facts = examined((Model(attend), tokens(attention_mask=mask)))
    assert facts["unchecked"]["padding"].startswith("attention_mask of shape (2, 12) marks padding")


@SLOW
@pytest.mark.parametrize("how", ["last", "mean"])
def test_padding_behind_attention_is_found_at_its_line(how: str) -> None:
    found, facts = examined(strangers.pooled(how))
    assert (found[0].kind, found[0].severity) == ("mask-lost", "wrong")
    assert found[0].places[0].line == line_of(strangers.Pooled.forward, f"# sick: {how}")
    assert facts["checked"]["padding of input_ids"] == "read from attention_mask"
    well = examined(strangers.pooled({"last": "own last", "mean": "own mean"}[how]))[0]
    assert "mask-lost" not in kinds(well)
