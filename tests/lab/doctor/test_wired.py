"""Mixed axes, samples, sequences and caches are found at their line, and the twins have no such finding."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import wired
from test_masked import examined
from torch import nn

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.masks.call_costs import with_caller
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
_TWINS = [(name, i) for name, x in wired.PAIRS.items() for i in range(len(x[3]))]
_NEW = {kind for kind, *_ in wired.PAIRS.values()}


def line_of(code: Any) -> int:
    """Number of the line that is marked, also in one of several places of a class."""
    mark = "# sick" if not isinstance(code, str) else f"# sick: {code}"
    lines, first = inspect.getsourcelines(wired.Places.forward if isinstance(code, str) else code)
    return next(first + i for i, x in enumerate(lines) if mark in x)


def found_in(name: str) -> Finding:
    kind, _, sick, _ = wired.PAIRS[name]
    return next(x for x in examined(sick())[0] if x.kind == kind)


@pytest.mark.parametrize("name", wired.PAIRS)
def test_the_fault_is_found_at_its_line(name: str) -> None:
    kind, code, sick, _ = wired.PAIRS[name]
    found, _ = examined(sick())
    wrong = [x.kind for x in found if x.severity == "wrong"]
    own = next(x for x in found if x.kind == kind)
    assert own.places[0].line == line_of(code)
    assert wrong[:1] == ([kind] if own.severity == "wrong" else [])


@pytest.mark.parametrize(("name", "number"), _TWINS)
def test_the_twin_is_healthy(name: str, number: int) -> None:
    found, facts = examined(wired.PAIRS[name][3][number]())
    assert [x.kind for x in found if x.severity in ("wrong", "stops") or x.kind in _NEW] == []
    one_token = "no module around"  # A decode step of one token has nothing to follow.
    assert facts["unchecked"].get("axes", one_token).startswith(one_token)


def test_swapped_heads_are_transposed_by_trial() -> None:
    found = found_in("swapped")
    assert "in all 4 rows that attend to each other" in found.evidence[0]
    assert "q.transpose(1, 2)" in found.remedy
    assert found.tried.endswith("changes the results of 23 other tokens in this call")
    assert found_in("merged by a view").tried.endswith("the result of query 12 changes token 12 alone")
    split = found_in("split by a view")
    assert "view(B, S, heads, -1).transpose(1, 2)" in split.remedy
    assert split.tried == "split so, changing token 12 changes query 12 of each head alone"


def test_a_batch_that_takes_the_place_of_tokens_is_proven() -> None:
    found = found_in("batch last")
    assert found.remedy == "Make the module with batch_first=True"
    assert found.tried.startswith("with batch_first=True, a changed sample changes no other sample")


@pytest.mark.parametrize("number", [1, 2])
def test_a_model_whose_tokens_come_first_is_not_accused(number: int) -> None:
    _, facts = examined(wired.PAIRS["batch last"][3][number]())
    assert "which may be the sequence" in facts["unchecked"]["samples"]


def test_a_causal_mask_across_is_a_question() -> None:
    found = found_in("causal across")
    assert found.severity == "note"
    assert found.evidence[-1] == "no query sees the last 9 keys"
    assert found.tried.startswith("without the mask, results of this call change by")


def test_empty_slots_are_filled_by_trial() -> None:
    found = found_in("empty slots")
    assert found.evidence[0] == "20 keys of 32, from key 12 on, are zeros and visible"
    assert "attn_mask=(torch.arange(k_len) < written)[None, None, None]" in found.remedy
    assert found.tried.startswith("if hidden, their contents change no result")
    assert "attn_mask=mask & (" in found_in("empty slots behind a mask").remedy


def test_the_own_key_is_shown_by_trial() -> None:
    found = found_in("own key hidden")
    assert found.evidence[0] == "the last query of this call sees keys up to 20, and its own key is 21 of 24"
    assert found.tried.startswith("with the own key visible, results differ from those without a cache by")
    assert "instead of" in found.tried


def test_padding_of_a_caption_is_hidden_by_trial() -> None:
    found = found_in("added padding mask of Captioned")
    assert found.tried == "with padding hidden in this call, changed padding changes no result"
    assert found.remedy == "Pass a boolean mask: attn_mask=(mask != 0)"
    module = found_in("none padding mask of CaptionedByModule")
    assert module.remedy == "Pass key_padding_mask=(caption_mask == 0) to the module"
    assert "pass ~mask" in found_in("inverted padding mask of Captioned").remedy


@pytest.mark.parametrize("name", wired.LATE)
def test_a_mask_behind_the_softmax_is_the_cause(name: str) -> None:
    sick, code = wired.LATE[name]
    found = examined(sick())[0][0]
    assert (found.kind, found.places[0].line) == ("causality-lost", line_of(code))
    assert found.cause.startswith("A mask sets weights to 0 after the softmax")
    assert found.remedy.startswith("Hide pairs before the softmax")


def test_a_mask_behind_the_softmax_may_be_right() -> None:
    """If weights are divided by their sum again, results are right."""
    found, _ = examined(wired.well_late())
    assert all(not x.cause.startswith("A mask sets weights") for x in found)


def test_weights_of_nan_are_no_softmax_over_another_dim() -> None:
    found, _ = examined(wired.latents(wired.Blind)())
    assert [x.kind for x in found if x.severity == "wrong"] == ["hidden-rows"]


def test_a_record_follows_multihead_attention() -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=True)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 7, 32)
    (call,) = recorded(Subject(Wrapped(), [x]), x, ()).calls
    assert call.modules == ("", "inner")
    assert call.rows.shape == (2, 4, 7, 8)


def recompiled(block: Any, made: Any = wired.counting) -> list[Finding]:
    found = list[Finding]()

    def say(finding: Finding | None = None, **_: Any) -> None:
        found.extend([] if finding is None else [finding])

    STAGES["compiled"](Subject(*made(block)()), say, "aot_eager")
    return found


@pytest.mark.parametrize(
    ("block", "remedy"),
    [
        (wired.Flagged, "Make it a tensor: flags['calls'] = torch.tensor(n)"),
        (wired.Global, "Make it a tensor: STEPS[0] = torch.tensor(n)"),
        (wired.Growing, "Empty kept before each call, outside of the compiled code: kept.clear()"),
    ],
)
def test_the_remedy_of_a_counter_is_tried(block: Any, remedy: str) -> None:
    (found,) = recompiled(block)
    assert (found.kind, found.places[0].line) == ("recompile", line_of(block))
    assert found.remedy == remedy
    assert found.tried.endswith(": 0 recompilations instead of 3")
    if block is wired.Flagged:
        assert recompiled(wired.FlaggedByTensor) == []


def test_no_remedy_is_said_if_none_helps() -> None:
    (found,) = recompiled(wired.Summed)
    assert found.remedy.startswith("No change that the doctor tried helps. Keep the number of entries")
    assert "but other results" in found.tried


@pytest.mark.parametrize("block", [wired.Warmed, wired.WarmedScale])
def test_a_number_that_the_model_sets_anew_is_filled_in_place(block: Any) -> None:
    """The guard's place is a file of torch, so the finding names the user's line of an earlier guard."""
    (found,) = recompiled(block, wired.warming)
    assert (found.kind, found.places[0].line) == ("recompile", line_of(block))
    assert "temperature as a tensor that is filled in place" in found.tried
    assert found.tried.endswith("in place: 0 recompilations instead of 3") == (block is wired.Warmed)
    assert "temperature.fill_(n)" in found.remedy


def test_the_users_line_that_calls_a_library_is_named() -> None:
    files = (
        "/x/site-packages/transformers/sdpa.py",
        "/x/site-packages/transformers/llama.py",
        "/home/me/train.py",
    )
    lines = [f"{x}:{i}" for i, x in enumerate(files, 3)]
    call = Attention("sdpa", "", None, (1,), (1,), torch.float32, lines=["/x/bin/attnspan:8", *lines])
    found = with_caller(Finding("leak", "", (Place(files[0], 3),)), [call])
    assert list(map(str, found.places)) == [lines[0], lines[2]]
    own = Finding("leak", "", (Place(files[2], 5),))
    assert with_caller(own, [call]) == own
