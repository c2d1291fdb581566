"""Work in vain is found at its line. The twins have no such finding, and the remedies keep the results."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
import vain
from test_masked import examined

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
_TWINS = [(name, i) for name, x in vain.PAIRS.items() for i in range(len(x[3]))]
_NEW = {kind for kind, *_ in vain.PAIRS.values()}
#: Part of the remedy and of the evidence of each kind.
_TEXTS = {
    "one-key": ("out_proj(v_proj(x)) has the same results", "other queries change no result"),
    "repeat": ("once before the loop", "2 products with values"),
    "causality-lost": ("not over the tokens", "changing these tokens changes"),
    "leak": ("stop at document borders", "changing these tokens changes"),
    "rope": ("", "with the same token at all positions"),
    "no-cache": ("StaticCache", "are needed"),
    "equal-queries": ("torch.randn(rows, dim)", "and so are their gradients"),
    "kept": (".clear()", "after steps 1, 2, 3"),
}


def line_of(code: Any) -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if "# sick" in x)


@cache
def all_in(name: str) -> tuple[Finding, ...]:
    return examined(vain.PAIRS[name][2]())[0]


def found_in(name: str) -> Finding:
    return next(x for x in all_in(name) if x.kind == vain.PAIRS[name][0])


@pytest.mark.parametrize("name", vain.PAIRS)
def test_waste_is_found_at_its_line(name: str) -> None:
    kind, code, *_ = vain.PAIRS[name]
    (own,) = (x for x in all_in(name) if x.kind == kind)
    assert [x.kind for x in all_in(name) if x.severity in ("wrong", "stops")] == [kind] * (
        own.severity == "wrong"
    )
    assert own.severity == ("slow" if kind in ("repeat", "no-cache", "kept") else "wrong")
    assert own.places[0].line == line_of(code)
    remedy, evidence = _TEXTS[kind]
    assert remedy in own.remedy
    assert any(evidence in x for x in own.evidence)


@pytest.mark.parametrize(("name", "number"), _TWINS)
def test_the_twin_wastes_nothing(name: str, number: int) -> None:
    found, facts = examined(vain.PAIRS[name][3][number]())
    assert [x.kind for x in found if x.severity in ("wrong", "stops") or x.kind in _NEW] == []
    assert not any("cannot be copied" in x for x in facts["unchecked"].values())


@pytest.mark.parametrize("name", vain.COSTS)
def test_the_remedy_keeps_the_results(name: str) -> None:
    _, _, sick, (well, *_) = vain.PAIRS[name]
    (results, batch), (wanted, _) = (in_double(x, None) for x in (sick, well))
    results, _ = in_double(sick, batch)
    wanted, _ = in_double(well, batch)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(results, wanted, strict=True))


def in_double(factory: Any, batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Results of the first batch, or of another one, in float64 and in evaluation mode."""
    subject = Subject(*factory())
    batch = subject.batches[0] if batch is None else batch
    wide = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    subject.model.double().eval()
    with torch.no_grad():
        return list(subject.step(subject.model, wide, backward=False).values()), batch


def test_rotations_of_the_twins_equal_complex_products() -> None:
    found, wanted = (in_double(vain.rotary(x), None)[0] for x in (vain.RotaryHalves, vain.Complex))
    assert torch.allclose(found[0], wanted[0], rtol=1e-9, atol=1e-9)


def test_the_other_order_of_pairs_is_tried() -> None:
    assert "cat([angles, angles], -1)" in found_in("tables of neighbours").remedy
    assert found_in("tables of halves").tried.startswith("with tables of the other order of pairs, scores")
    other = found_in("no rotation")
    assert (other.tried, other.remedy[:9]) == ("", "Compute p")


def test_the_line_that_makes_one_token_is_named() -> None:
    place = found_in("one key").places[1]
    assert place.text == "return self.embed(features)[:, None]"


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        (vain.pooled, "If one key is meant"),
        (vain.patched, "If your sequences are really this short"),
        (vain.lengths(1, 1), "If your sequences are really this short"),
    ],
)
def test_one_key_may_be_meant(factory: Any, remedy: str) -> None:
    found, _ = examined(factory())
    (own,) = (x for x in found if x.kind == "one-key")
    assert own.severity == "note"
    assert own.remedy.startswith(remedy)


def test_products_behind_a_repeated_one_belong_to_it() -> None:
    assert found_in("encoder again").evidence[0].endswith("before, and 2 products behind them")


def test_the_operator_that_mixes_tokens_is_named() -> None:
    operators = {"experts choose": "topk", "mean of all tokens": "mean", "size of all tokens": "std"}
    operators["mean of documents"] = "mean"
    assert {x: found_in(x).cause.partition(" ")[0] for x in operators} == operators


@pytest.mark.parametrize("name", vain.COPIED)
def test_one_copy_of_a_mask_is_tried(name: str) -> None:
    sick, well, said, index = vain.COPIED[name]
    ((found,), _), ((other,), _) = examined(sick()), examined(well())
    assert (found.kind, found.places[0].line) == ("dense-mask", line_of(vain.copied_mask))
    assert found.evidence[-1].startswith(said)
    assert found.remedy.startswith("Pass one copy, shape (1, ")
    assert found.tried.startswith(f"{index}: results differ by ")
    assert "copies" not in "".join(other.evidence)
    assert "one copy" not in other.remedy
    results, wanted = in_double(sick, None)[0], in_double(well, None)[0]
    assert torch.allclose(results[0], wanted[0], rtol=1e-9, atol=1e-9)


def test_a_mask_of_the_batch_may_differ_in_another_batch() -> None:
    found, _ = examined(vain.equal_padding())
    assert all("equal copies" not in y for x in found for y in x.evidence)
