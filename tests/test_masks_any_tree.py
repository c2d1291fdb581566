"""Random trees of masks and of masks made of masks, at any rows and keys: spans are what pairs say."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples.masks import document

import attnspan as a
from attnspan import library as lib

BATCH, HEADS = 2, 2
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


@st.composite
def _leaves(draw: Any, n: int, arrays: bool, batch: int) -> Tree:
    """A mask of `n` keys; without arrays that describe keys, or with some for each of `batch` rows."""
    size, few = draw(st.integers(0, n + 1)), draw(st.integers(1, 4))
    found = [
        Tree("full()", lambda c: a.full(), lambda b, h, i, j: True),
        Tree("causal()", lambda c: a.causal(), lambda b, h, i, j: j <= i),
        Tree(f"window({size}, None)", lambda c: a.window(size, None), lambda b, h, i, j: j >= i - size),
        Tree(f"prefix({size})", lambda c: a.prefix(size), lambda b, h, i, j: j < size),
        Tree(
            f"block_causal({few})", lambda c: lib.block_causal(few), lambda b, h, i, j: j // few <= i // few
        ),
        Tree(
            f"dilated({size}, {few})",
            lambda c: lib.dilated(size, few),
            lambda b, h, i, j: abs(i - j) <= size and (i - j) % few == 0,
        ),
        Tree(
            f"global_sliding({few}, {size})",
            lambda c: lib.global_sliding(few, size),
            lambda b, h, i, j: abs(i - j) <= few or j < size or 0 <= i < size,
        ),
    ]
    if arrays:
        lengths = np.array(draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch)))
        rows = st.lists(st.integers(-1, 2), min_size=n, max_size=n)
        ids = np.array([draw(rows) for _ in range(batch)])
        found += [
            Tree(
                f"key_padding({lengths})",
                lambda c: a.key_padding(c(lengths)),
                lambda b, h, i, j: j < lengths[b % batch],
            ),
            Tree(f"keys({ids} > 0)", lambda c: a.keys(c(ids > 0)), lambda b, h, i, j: ids[b % batch, j] > 0),
            Tree(
                f"segments({ids}, max_runs={n})",
                lambda c: a.segments(c(ids), padding_id=0, max_runs=n),
                lambda b, h, i, j: 0 <= i < n and ids[b % batch, i] == ids[b % batch, j] != 0,
            ),
            Tree(
                f"from_predicate({ids[0]})",
                lambda c: (lambda x: a.from_predicate(lambda b, h, q, k: x[q % n] <= x[k]))(c(ids[0])),
                lambda b, h, i, j: ids[0, i % n] <= ids[0, j],
            ),
        ]
    return draw(st.sampled_from(found))  # type: ignore[no-any-return]


@st.composite
def _trees(
    draw: Any,
    n: int,
    rows: np.ndarray | None = None,
    depth: int = 2,
    arrays: bool = True,
    batch: int = BATCH,
    heads: int = HEADS,
) -> Tree:
    """A tree. Some subtrees are prepared for `rows`, unless there are none."""
    kinds = ["leaf", "&", "|", *(["reordered", "batchify", "per_document"] if arrays else [])]
    kinds += ["per_row"] * (batch > 1) + ["per_head"] * (heads > 1) + ["prepare"] * (rows is not None)
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        return draw(_leaves(n, arrays, batch))  # type: ignore[no-any-return]
    if kind == "prepare":
        one = draw(_trees(n, rows, depth - 1, arrays, batch, heads))
        sizes = {"batch": batch, "heads": heads}
        return Tree(
            f"{one}.prepare({rows})",
            lambda c: one.make(c).prepare(len(rows), n, q_index=c(rows), **sizes),
            one.sees,
            rows,
        )
    if kind == "per_document":
        cu = np.array([0, *sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=3)))])
        one = draw(_trees(n, None, depth - 1, False, 1, 1))

        def inside(b: int, h: int, i: int, j: int) -> Any:
            d = document(cu, i)
            return d is not None and d == document(cu, j) and one.sees(b, h, i - cu[d], j - cu[d])

        return Tree(f"{kind}({one}, {cu})", lambda c: lib.per_document(one.make(c), c(cu)), inside)
    if kind == "batchify":
        size = draw(st.integers(1, n))
        one = draw(_trees(size, None, depth - 1, arrays, batch, heads))
        sees: Sees = lambda b, h, i, j: i // size == j // size and one.sees(b, h, i % size, j % size)  # noqa: E731
        return Tree(f"batchify({one}, {size})", lambda c: lib.batchify(one.make(c), size), sees)
    if kind == "reordered":
        order, one = draw(st.permutations(range(n))), draw(_trees(n, None, depth - 1, arrays, batch, heads))
        sees = lambda b, h, i, j: 0 <= i < n and one.sees(b, h, order[i], order[j])  # noqa: E731
        return Tree(f"{kind}({one}, {order})", lambda c: lib.reordered(one.make(c), c(np.array(order))), sees)
    batch, heads = 1 if kind == "per_row" else batch, 1 if kind == "per_head" else heads
    x, y = (draw(_trees(n, rows, depth - 1, arrays, batch, heads)) for _ in range(2))
    text, prepared = f"({x} {kind} {y})", x.rows if y.rows is None else y.rows
    if kind in "&|":
        both = all if kind == "&" else any
        join = (lambda p, q: p & q) if kind == "&" else (lambda p, q: p | q)
        each: Sees = lambda *at: both((x.sees(*at), y.sees(*at)))  # noqa: E731
        return Tree(text, lambda c: join(x.make(c), y.make(c)), each, prepared)
    axis, mixture = (0, lib.per_row) if kind == "per_row" else (1, lib.per_head)
    one_of: Sees = lambda *at: (x, y)[at[axis]].sees(*at)  # noqa: E731
    return Tree(text, lambda c: mixture([x.make(c), y.make(c)]), one_of, prepared)


@given(st.integers(1, 8), st.booleans(), st.data())
def test_spans_are_the_definition(n: int, of_torch: bool, data: st.DataObject) -> None:
    chosen = data.draw(st.none() | st.lists(st.integers(-2, n - 1), max_size=6))
    rows = np.arange(n) if chosen is None else np.array(chosen, np.int64)
    tree = data.draw(_trees(n, rows))
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
    if tree.rows is not None and len(rows) and n > 1:
        with pytest.raises(ValueError, match=OTHER_ROWS):
            mask.spans(len(rows), n, **{**given, "q_index": convert((rows + 1) % n)})
