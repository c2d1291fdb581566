"""Random mask trees, with lengths of each batch row on both sides, against their dense definitions."""

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything
from samples.masks import BATCH, KEYS, SAMPLES, Sample

import attnspan as a

_BY_NAME = {sample.name: sample for sample in SAMPLES}
# Per batch row, from the left and from the right: none of them knows the number of rows.
_PER_BATCH = ("key_padding", "key_padding, left", "prefix, per batch row")
_OTHERS = (
    *("causal", "window", "window, both sides", "segments", "segments, per batch row"),
    *("segments, three runs", "documents", "prefix, int", "groups", "key_padding, int", "global_keys"),
    *("prefix-LM", "window and sinks"),
)
_TREES = 60 if everything() else 20
_OTHER_ROWS = "q_index of a prepared mask: expected the queries that it was prepared for"

Convert = Callable[..., object]


def _last_rows(q_len: int) -> np.ndarray:
    return np.tile(np.arange(KEYS - q_len, KEYS), (BATCH, 1))


#: What may be passed as q_index; by default the rows are the last of the keys, or those of a cache.
_ROWS: dict[str, Callable[[int], np.ndarray]] = {
    "last": _last_rows,
    "first": lambda q_len: np.tile(np.arange(q_len), (BATCH, 1)),
    "of the cache": _BY_NAME["cache"].default_q_index,
}


class Tree:
    """A mask expression as nested tuples, with the dense definition that goes with it.

    Args:
        random: decides what it is.
        depth: of nested operators, at most.
        prepares: some subtrees are prepared, for rows of their own, and some leaves are caches.
        root: it is an operator.
    """

    def __init__(
        self, random: np.random.Generator, depth: int, *, prepares: bool = False, root: bool = False
    ) -> None:
        self.operands: list[Tree | Sample]
        self.rows: str | None = None
        if prepares and not root and random.random() < 0.4:
            self.kind = "prepare"
            self.operands = [Tree(random, depth, prepares=prepares, root=True)]
            self.rows = str(random.choice(list(_ROWS))) if random.random() < 0.5 else None
        elif depth == 0 or (not root and random.random() < 0.25):
            names = _PER_BATCH if random.random() < 0.5 else _OTHERS
            name = "cache" if prepares and random.random() < 0.15 else str(random.choice(names))
            self.kind, self.operands = "leaf", [_BY_NAME[name]]
        else:
            self.kind = str(random.choice(["&", "|"]))
            count = random.integers(2, 4)
            self.operands = [Tree(random, depth - 1, prepares=prepares) for _ in range(count)]

    def mask(self, convert: Convert, q_len: int = 0) -> a.Mask:
        first, *others = [
            x.mask(convert) if isinstance(x, Sample) else x.mask(convert, q_len) for x in self.operands
        ]
        if self.kind == "prepare":
            rows = None if self.rows is None else convert(_ROWS[self.rows](q_len))
            return first.prepare(q_len, KEYS, batch=BATCH, q_index=rows, like=convert(np.zeros(1)))
        for other in others:
            first = first & other if self.kind == "&" else first | other
        return first

    def dense(self, q_index: np.ndarray) -> np.ndarray:
        parts = [
            x.dense(q_index, np.arange(KEYS)) if isinstance(x, Sample) else x.dense(q_index)
            for x in self.operands
        ]
        return (np.logical_or if self.kind == "|" else np.logical_and).reduce(parts)

    def default_rows(self) -> str | None:
        """Which rows the expression is for by default: a cache's, a prepared mask's, or the last."""
        if "cache" in self._leaves():
            return "of the cache"
        return next((rows for rows in self.prepared_rows() if rows is not None), None)

    def prepared_rows(self) -> list[str | None]:
        """Which rows the outermost prepared masks are for."""
        if self.kind == "prepare":
            (operand,) = self.operands
            return [self.rows or operand.default_rows()]
        trees = [x for x in self.operands if isinstance(x, Tree)]
        return [rows for tree in trees for rows in tree.prepared_rows()]

    def inner_is_consistent(self, q_len: int) -> bool:
        """Whether all that is prepared inside can be prepared."""
        trees = [x for x in self.operands if isinstance(x, Tree)]
        if not all(tree.inner_is_consistent(q_len) for tree in trees):
            return False
        return self.kind != "prepare" or not trees[0].other_rows(self.rows, q_len).any()

    def other_rows(self, rows: str | None, q_len: int) -> np.ndarray:
        """Bool (B, q_len): the rows that are not those of a prepared mask."""
        index = self.q_index(rows, q_len)
        others = [_ROWS[x or "last"](q_len) != index for x in self.prepared_rows()]
        return np.logical_or.reduce([np.zeros_like(index, bool), *others])

    def q_index(self, rows: str | None, q_len: int) -> np.ndarray:
        return _ROWS[rows or self.default_rows() or "last"](q_len)

    def most_runs(self) -> int:
        """The largest R that the structure allows."""
        each = [(x.runs or 0) if isinstance(x, Sample) else x.most_runs() for x in self.operands]
        return sum(each) - (len(each) - 1) * (self.kind == "&")

    def _leaves(self) -> list[str]:
        """Names of the leaves that are not prepared."""
        if self.kind == "prepare":
            return []
        return [name for x in self.operands for name in ([x.name] if isinstance(x, Sample) else x._leaves())]


def _trees(seed: int, count: int = _TREES) -> list[Tree]:
    random = np.random.default_rng(seed)
    return [Tree(random, 2) for _ in range(count)]


def _trees_that_prepare(seed: int, count: int) -> list[tuple[Tree, str | None]]:
    """Trees with the rows that they are lowered for."""
    random = np.random.default_rng(seed)
    trees = [Tree(random, 2, prepares=True, root=True) for _ in range(count)]
    return [(tree, str(random.choice(list(_ROWS))) if random.random() < 0.5 else None) for tree in trees]


def _traceable_trees(q_len: int) -> list[tuple[Tree, str | None]]:
    """Some whose prepared masks are for other rows, and some whose are not; all can be prepared inside."""
    found: dict[bool, list[tuple[Tree, str | None]]] = {False: [], True: []}
    for tree, rows in _trees_that_prepare(11, _TREES):
        if tree.inner_is_consistent(q_len) and None in tree.prepared_rows():
            found[bool(tree.other_rows(rows, q_len).any())].append((tree, rows))
    each = 2 if everything() else 1
    return found[False][:each] + found[True][:each]


def _once(convert: Convert) -> Convert:
    """Of one array one only: masks that share their array share their rows."""
    known: dict[int, tuple[np.ndarray, object]] = {}
    return lambda x: known.setdefault(id(x), (x, convert(x)))[1]


def _check(spans: a.Spans, want: np.ndarray) -> None:
    assert spans.q_len == want.shape[2]
    spans.validate()
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(spans.dense()), want.shape), want)


def _check_traced(bounds: object, tree: Tree, rows: str | None, q_len: int) -> None:
    """Where values cannot be read, the rows that a prepared mask is not for are illegal, and no others."""
    found = np.asarray(bounds)
    found = np.broadcast_to(found, (BATCH, *found.shape[1:]))
    illegal = (found == (0, -1)).all((-2, -1))[:, 0]
    np.testing.assert_array_equal(illegal, tree.other_rows(rows, q_len))
    legal = np.where(illegal[:, None, :, None, None], 0, found).astype(np.int32)
    want = tree.dense(tree.q_index(rows, q_len)) & ~illegal[:, None, :, None]
    _check(a.Spans(legal, KEYS), want)


@pytest.mark.parametrize("q_len", [1, 5, KEYS])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_prepared_subtrees_are_their_definitions_or_refused(convert: Convert, q_len: int) -> None:
    refused = 0
    for tree, rows in _trees_that_prepare(q_len, 2 * _TREES):
        own = _once(convert)
        q_index = None if rows is None else own(_ROWS[rows](q_len))
        if tree.inner_is_consistent(q_len) and not tree.other_rows(rows, q_len).any():
            spans = tree.mask(own, q_len).spans(q_len, KEYS, batch=BATCH, q_index=q_index)
            assert spans.runs <= tree.most_runs()
            _check(spans, tree.dense(tree.q_index(rows, q_len)))
            continue
        refused += 1
        with pytest.raises(ValueError, match=_OTHER_ROWS):
            tree.mask(own, q_len).spans(q_len, KEYS, batch=BATCH, q_index=q_index)
    assert _TREES // 4 < refused < 2 * _TREES - _TREES // 4


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax.jit", "torch.compile"])
def test_trees_in_a_program_that_is_traced(framework: str) -> None:
    def lower(given: list[tuple[a.Mask, Any]]) -> list[Any]:
        return [mask.spans(5, KEYS, batch=BATCH, q_index=rows).bounds for mask, rows in given]

    if framework == "jax.jit":
        jax = pytest.importorskip("jax")
        pytest.importorskip("attnspan.jax")  # It registers masks as pytrees.
        convert = jax.numpy.asarray
    else:
        convert = torch.from_numpy
    plain: list[tuple[Tree, str | None]] = [
        (tree, None) for tree in _trees(seed=7, count=4 if everything() else 1)
    ]
    trees = [*plain, *_traceable_trees(5)]
    given = []
    for tree, rows in trees:
        own = _once(convert)
        given.append((tree.mask(own, 5), None if rows is None else own(_ROWS[rows](5))))
    if framework == "jax.jit":
        found = jax.jit(lower)(given)
    else:
        torch._dynamo.reset()
        found = torch.compile(lower, backend="eager", fullgraph=True)(given)
    for bounds, (tree, rows) in zip(found, trees, strict=True):
        _check_traced(bounds, tree, rows, 5)


def test_illegal_rows_are_illegal_in_every_expression() -> None:
    broken = a.segments(np.array([1, 0, 1, *[2] * (KEYS - 3)]))
    trees = [tree.mask(np.asarray) for tree in _trees(seed=3)]
    for left, right in pairwise(trees):
        for mask in (broken & left, left | broken, (left | broken) & right, left & broken | right):
            bounds = np.asarray(mask.spans(KEYS, KEYS, batch=BATCH).bounds)
            assert (bounds[:, :, [0, 2]] == [0, -1]).all()
            a.Spans(bounds[:, :, [1, *range(3, KEYS)]], KEYS).validate()
            with pytest.raises(ValueError, match=r"\(0, -1\) marks a query whose mask data are wrong"):
                mask.prepare(KEYS, KEYS, batch=BATCH)


def test_a_key_tells_apart_what_differs_in_one_field() -> None:
    masks = [a.full(), a.causal(), a.window(3), a.window(3, 1), a.window(2)]
    masks += [a.global_keys(3), a.global_keys(2)]
    masks += [a.causal() & a.window(3), a.causal() | a.window(3), a.causal() | a.window(2)]
    assert len({mask.static_key() for mask in masks}) == len(masks)
    assert a.documents(np.array([0, 3])).static_key() is None
    for mask in masks:  # A key is of the fields that a pattern of `match` would name.
        assert mask.__match_args__ == tuple(field.name for field in fields(mask))
