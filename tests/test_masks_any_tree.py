"""Random trees of masks and of masks made of masks, at any rows and keys: spans are what pairs say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples.library import HEADS, LIBRARY
from samples.masks import BATCH, KEYS, SAMPLES, document

import attnspan as a
from attnspan import library as lib

OTHER_ROWS = "q_index of a prepared mask: expected the queries that it was prepared for"
Sees = Callable[[int, int, int, int], Any]


@dataclass
class Tree:
    """A mask, made of arrays that `convert` makes, and what it says of batch row, head, query and key.

    `rows` are those that a part of it was prepared for.
    """

    text: str
    make: Callable[[Any], a.Mask]
    sees: Sees
    rows: np.ndarray | None = None

    def __repr__(self) -> str:
        return self.text


#: Masks that say the same of any number of keys.
ANYWHERE = [x for x in SAMPLES if not x.arrays and "padding" not in x.name]
#: Their default rows are others, or their formulas mean something for a row before the first key.
LEFT_OUT = re.compile("cache|room to spare|global_sliding|dilated|prefix_lm|spatial")
FITTING = [x for x in LIBRARY if x.keys == x.q_len == KEYS]
LEAVES = [x for x in (*SAMPLES, *FITTING) if not LEFT_OUT.search(x.name)]


@st.composite
def _trees(draw: Any, n: int, rows: np.ndarray | None, depth: int, batch: int, heads: int) -> Tree:
    """A tree. Some subtrees are prepared for `rows`, unless there are none."""
    whole = (n, batch, heads) == (KEYS, BATCH, HEADS)
    kinds = ["leaf", "&", "|", *(["reordered", "batchify", "per_document"] if n == KEYS else [])]
    kinds += ["per_row"] * (batch > 1) + ["per_head"] * (heads > 1)
    kinds += ["prepare"] * (rows is not None and depth < 2)  # One that is nothing else takes no q_index.
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        sample = draw(st.sampled_from(LEAVES if whole else ANYWHERE))
        return Tree(sample.name, sample.mask, sample.sees)
    if kind == "prepare":
        one = draw(_trees(n, rows, depth - 1, batch, heads))
        sizes = {"batch": batch, "heads": heads}
        return Tree(
            f"{one}.prepare({rows})",
            lambda c: one.make(c).prepare(len(rows), n, q_index=c(rows), **sizes),
            one.sees,
            rows,
        )
    if kind == "per_document":
        cu = np.array([0, *sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=3)))])
        one = draw(_trees(0, None, depth - 1, 1, 1))

        def inside(b: int, h: int, i: int, j: int) -> Any:
            d = document(cu, i)
            return d is not None and d == document(cu, j) and one.sees(b, h, i - cu[d], j - cu[d])

        return Tree(f"{kind}({one}, {cu})", lambda c: lib.per_document(one.make(c), c(cu)), inside)
    if kind == "batchify":
        size = draw(st.integers(1, n - 1))
        one = draw(_trees(size, None, depth - 1, 1, 1))
        sees: Sees = lambda b, h, i, j: i // size == j // size and one.sees(b, h, i % size, j % size)  # noqa: E731
        return Tree(f"batchify({one}, {size})", lambda c: lib.batchify(one.make(c), size), sees)
    if kind == "reordered":
        order, one = draw(st.permutations(range(n))), draw(_trees(n, None, depth - 1, batch, heads))
        sees = lambda b, h, i, j: 0 <= i < n and one.sees(b, h, order[i], order[j])  # noqa: E731
        return Tree(f"{kind}({one}, {order})", lambda c: lib.reordered(one.make(c), c(np.array(order))), sees)
    batch, heads = 1 if kind == "per_row" else batch, 1 if kind == "per_head" else heads
    x, y = (draw(_trees(n, rows, depth - 1, batch, heads)) for _ in range(2))
    text, prepared = f"({x} {kind} {y})", x.rows if y.rows is None else y.rows
    if kind in "&|":
        both = all if kind == "&" else any
        join = (lambda p, q: p & q) if kind == "&" else (lambda p, q: p | q)
        each: Sees = lambda *at: both((x.sees(*at), y.sees(*at)))  # noqa: E731
        return Tree(text, lambda c: join(x.make(c), y.make(c)), each, prepared)
    axis, mixture = (0, lib.per_row) if kind == "per_row" else (1, lib.per_head)
    one_of: Sees = lambda *at: (x, y)[at[axis]].sees(*at)  # noqa: E731
    return Tree(text, lambda c: mixture([x.make(c), y.make(c)]), one_of, prepared)


@given(st.booleans(), st.data())
def test_spans_are_the_definition(of_torch: bool, data: st.DataObject) -> None:
    n, chosen = KEYS, data.draw(st.none() | st.lists(st.integers(-2, KEYS - 1), max_size=6))
    rows = np.arange(n) if chosen is None else np.array(chosen, np.int64)
    tree = data.draw(_trees(n, rows, 2, BATCH, HEADS))
    convert = torch.from_numpy if of_torch else np.asarray
    q_index = None if chosen is None else convert(rows)
    mask, given = tree.make(convert), {"batch": BATCH, "heads": HEADS, "q_index": q_index}
    spans = mask.spans(len(rows), n, **given).lowered
    at = np.ndindex(BATCH, HEADS, len(rows), n)
    want = [bool(tree.sees(b, h, int(rows[i]), j)) for b, h, i, j in at]
    got = np.broadcast_to(np.asarray(spans.validate().dense()), (BATCH, HEADS, len(rows), n))
    np.testing.assert_array_equal(got, np.reshape(want, got.shape))
    prepared = mask.prepare(len(rows), n, **given).lowered.dense()
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(prepared), got.shape), got)
    some = np.flatnonzero(np.arange(n) % 3 != 1)
    taken = np.asarray(spans.take_keys(convert(some)).compact().validate().dense())
    np.testing.assert_array_equal(np.broadcast_to(taken, (*got.shape[:3], len(some))), got[..., some])
    if tree.rows is not None and len(rows):
        with pytest.raises(ValueError, match=OTHER_ROWS):
            mask.spans(len(rows), n, **{**given, "q_index": convert((rows + 1) % n)})
