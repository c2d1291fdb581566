"""Random trees of masks and of masks made of masks, at any rows and keys: spans are what pairs say."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnspan as a
from attnspan import library as lib

BATCH, HEADS = 2, 2
Sees = Callable[[int, int, int, int], Any]


@dataclass
class Tree:
    """A mask, made of arrays that `convert` makes, and what it says of batch row, head, query and key."""

    make: Callable[[Any], a.Mask]
    sees: Sees
    text: str

    def __repr__(self) -> str:
        return self.text


def _document(cu: list[int], i: int) -> int | None:
    return next((d for d in range(len(cu) - 1) if cu[d] <= i < cu[d + 1]), None)


@st.composite
def _leaves(draw: Any, n: int, arrays: bool, batch: int) -> Tree:
    """A mask of `n` keys; without arrays that describe keys, or with some for each of `batch` rows."""
    size, few = draw(st.integers(0, n + 1)), draw(st.integers(1, 4))
    found: list[tuple[str, Callable[[Any], a.Mask], Sees]] = [
        ("full()", lambda c: a.full(), lambda b, h, i, j: True),
        ("causal()", lambda c: a.causal(), lambda b, h, i, j: j <= i),
        (f"window({size}, None)", lambda c: a.window(size, None), lambda b, h, i, j: j >= i - size),
        (f"prefix({size})", lambda c: a.prefix(size), lambda b, h, i, j: j < size),
        (f"block_causal({few})", lambda c: lib.block_causal(few), lambda b, h, i, j: j // few <= i // few),
        (
            f"dilated({size}, {few})",
            lambda c: lib.dilated(size, few),
            lambda b, h, i, j: abs(i - j) <= size and (i - j) % few == 0,
        ),
        (
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
            (
                f"key_padding({lengths})",
                lambda c: a.key_padding(c(lengths)),
                lambda b, h, i, j: j < lengths[b % batch],
            ),
            (f"keys({ids} > 0)", lambda c: a.keys(c(ids > 0)), lambda b, h, i, j: ids[b % batch, j] > 0),
            (
                f"segments({ids}, max_runs={n})",
                lambda c: a.segments(c(ids), padding_id=0, max_runs=n),
                lambda b, h, i, j: 0 <= i < n and ids[b % batch, i] == ids[b % batch, j] != 0,
            ),
            (
                f"from_predicate({ids[0]})",
                lambda c: (lambda x: a.from_predicate(lambda b, h, q, k: x[q % n] <= x[k]))(c(ids[0])),
                lambda b, h, i, j: ids[0, i % n] <= ids[0, j],
            ),
        ]
    text, make, sees = draw(st.sampled_from(found))
    return Tree(make, sees, text)


@st.composite
def _trees(
    draw: Any, n: int, depth: int = 2, arrays: bool = True, batch: int = BATCH, heads: int = HEADS
) -> Tree:
    kinds = ["leaf", "&", "|", *(["reordered", "batchify", "per_document"] if arrays else [])]
    kinds += ["per_row"] * (batch > 1) + ["per_head"] * (heads > 1)
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        return draw(_leaves(n, arrays, batch))  # type: ignore[no-any-return]
    if kind == "per_document":
        cu = [0, *sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=3)))]
        one = draw(_trees(n, depth - 1, False, 1, 1))

        def inside(b: int, h: int, i: int, j: int) -> Any:
            d = _document(cu, i)
            return d is not None and d == _document(cu, j) and one.sees(b, h, i - cu[d], j - cu[d])

        return Tree(lambda c: lib.per_document(one.make(c), c(np.array(cu))), inside, f"{kind}({one}, {cu})")
    if kind == "batchify":
        size = draw(st.integers(1, n))
        one = draw(_trees(size, depth - 1, arrays, batch, heads))
        sees: Sees = lambda b, h, i, j: i // size == j // size and one.sees(b, h, i % size, j % size)  # noqa: E731
        return Tree(lambda c: lib.batchify(one.make(c), size), sees, f"batchify({one}, {size})")
    if kind == "reordered":
        order, one = draw(st.permutations(range(n))), draw(_trees(n, depth - 1, arrays, batch, heads))
        sees = lambda b, h, i, j: 0 <= i < n and one.sees(b, h, order[i], order[j])  # noqa: E731
        return Tree(lambda c: lib.reordered(one.make(c), c(np.array(order))), sees, f"{kind}({one}, {order})")
    batch, heads = 1 if kind == "per_row" else batch, 1 if kind == "per_head" else heads
    x, y = (draw(_trees(n, depth - 1, arrays, batch, heads)) for _ in range(2))
    text = f"({x} {kind} {y})"
    if kind in "&|":
        both = all if kind == "&" else any
        join = (lambda p, q: p & q) if kind == "&" else (lambda p, q: p | q)
        return Tree(lambda c: join(x.make(c), y.make(c)), lambda *at: both((x.sees(*at), y.sees(*at))), text)
    axis, mixture = (0, lib.per_row) if kind == "per_row" else (1, lib.per_head)
    return Tree(lambda c: mixture([x.make(c), y.make(c)]), lambda *at: (x, y)[at[axis]].sees(*at), text)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), _trees(n))), st.booleans(), st.data())
def test_spans_are_the_definition(drawn: tuple[int, Tree], of_torch: bool, data: st.DataObject) -> None:
    n, tree = drawn
    chosen = data.draw(st.none() | st.lists(st.integers(-2, n - 1), max_size=6))
    rows = np.arange(n) if chosen is None else np.array(chosen, np.int64)
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
