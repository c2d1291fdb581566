"""Masks of very many parts: joined in a loop, read from long texts, nested in each other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import default_collate

from attnspan import Mask, causal, global_keys, window
from attnspan.library import batchify, per_document, per_head, per_row, reordered
from attnspan.library.text import parse
from attnspan.masks.picture import svg_of_mask
from attnspan.parallel import Layout
from attnspan.torch import attention

MANY = 2000
CU = np.array([0, 4])


@pytest.mark.slow
@pytest.mark.parametrize("join", [and_, or_])
def test_masks_joined_in_a_loop_are_one_level(join: Any) -> None:
    first, same = (causal(), window(1)) if join is and_ else (window(1), window(5))
    mask, again = (reduce(join, [window(i % 5 + 1) for i in range(MANY)], first) for _ in range(2))
    back, same = reduce(lambda x, y: join(y, x), reversed(mask.operands)), same.spans(8, 8)
    q = torch.randn(1, 1, 8, 8)
    copies = [copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), default_collate([mask, again])]
    copies += [jax.tree.map(lambda x: x, mask), _pytree.tree_map(lambda x: x, mask), mask.to("cpu")]
    for each in (mask, back):
        assert (each.spans(8, 8).bounds == same.bounds).all()
    for each in copies:
        assert each == mask
        assert hash(each) == hash(mask)
        assert each.static_key() == mask.static_key()
    assert torch.equal(attention(q, q, q, mask=mask), attention(q, q, q, mask=same))
    assert len(mask.leaves()) == MANY + 1
    assert repr(mask).count("window") >= MANY
    assert svg_of_mask(mask)
    assert (Layout.of(mask, q_len=8, ranks=2)._source.mask.bounds == same.bounds).all()  # type: ignore[union-attr]
    assert not mask.may_separate()
    if join is and_:
        assert mask.band() == (causal() & window(1)).band()


def test_order_of_operators_does_not_matter() -> None:
    a, b, c = window(1), global_keys(2), causal()
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert (a & b) | c != a & (b | c)


#: Puts a mask into another one.
NESTS: dict[str, Callable[[Mask], Mask]] = {
    "& and |": lambda mask: (mask & window(5)) | global_keys(1),
    "per_row": lambda mask: per_row([mask]),
    "per_head": lambda mask: per_head([mask]),
    "per_document": lambda mask: per_document(mask, CU),
    "batchify": lambda mask: batchify(mask, 4),
    "reordered": lambda mask: reordered(mask, [0, 1, 2, 3]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTS)
def test_masks_nested_too_deep_are_refused_when_they_are_made(name: str) -> None:
    mask: Mask = window(1)
    levels = 2 if "&" in name else 1
    for _ in range(60 // levels):
        mask = NESTS[name](mask)
    assert (mask.spans(4, 4).dense() == NESTS[name](window(1)).spans(4, 4).dense()).all()
    assert copy.deepcopy(mask).spans(4, 4).q_len == 4
    for _ in range(140 // levels):
        mask = NESTS[name](mask)
    with pytest.raises(ValueError, match=r"expected at most 200 levels of masks, got 201\. Prepare an inner"):
        NESTS[name](mask)


@pytest.mark.parametrize("operator", ["&", "|"])
def test_a_long_text_is_read(operator: str) -> None:
    text = f" {operator} ".join(["window(3)"] * 700)
    assert (parse(text).spans(6, 6).bounds == window(3).spans(6, 6).bounds).all()
    nested = "per_row([" * 90 + "causal" + "])" * 90
    assert parse(nested).spans(3, 3).q_len == 3


@pytest.mark.parametrize(
    "text",
    [
        " & ".join(["causal"] * 100_000),
        "window(" + "-" * 50_000 + "1)",
        "window(" + "(" * 5_000 + "1" + ")" * 5_000 + ")",
        "window(1" + "+1" * 50_000 + ")",
    ],
    ids=["operators", "signs", "parentheses", "sums"],
)
def test_a_text_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^mask '.*: expected .*, got .*\. [A-Z].*\.$") as caught:
        parse(text)
    assert len(str(caught.value)) < 2000
