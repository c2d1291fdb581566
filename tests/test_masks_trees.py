"""Random mask trees, with lengths of each batch row on both sides, against their dense definitions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from mask_samples import BATCH, KEYS, SAMPLES, Sample

import attnspan as a

_BY_NAME = {sample.name: sample for sample in SAMPLES}
# Per batch row, from the left and from the right: none of them knows the number of rows.
_PER_BATCH = ("key_padding", "key_padding, left", "prefix, per batch row")
_OTHERS = (
    "causal",
    "window",
    "window, both sides",
    "segments",
    "segments, per batch row",
    "segments, three runs",
    "documents",
    "prefix, int",
    "groups",
    "key_padding, int",
    "global_keys",
    "prefix-LM",
    "window and sinks",
)
_TREES = 60


class Tree:
    """A mask expression as nested tuples, with the dense definition that goes with it."""

    def __init__(self, random: np.random.Generator, depth: int) -> None:
        self.operands: list[Tree | Sample]
        if depth == 0 or random.random() < 0.25:
            names = _PER_BATCH if random.random() < 0.5 else _OTHERS
            self.kind, self.operands = "leaf", [_BY_NAME[str(random.choice(names))]]
        else:
            self.kind = str(random.choice(["&", "|"]))
            self.operands = [Tree(random, depth - 1) for _ in range(random.integers(2, 4))]

    def mask(self, convert: Callable[..., object]) -> a.Mask:
        first, *others = [x.mask(convert) for x in self.operands]
        for other in others:
            first = first & other if self.kind == "&" else first | other
        return first

    def dense(self, q_index: np.ndarray) -> np.ndarray:
        parts = [
            x.dense(q_index, np.arange(KEYS)) if isinstance(x, Sample) else x.dense(q_index)
            for x in self.operands
        ]
        return (np.logical_and if self.kind == "&" else np.logical_or).reduce(parts)


def _trees(seed: int, count: int = _TREES) -> list[Tree]:
    random = np.random.default_rng(seed)
    return [Tree(random, 2) for _ in range(count)]


def _last_rows(q_len: int) -> np.ndarray:
    return np.tile(np.arange(KEYS - q_len, KEYS), (BATCH, 1))


def _check(spans: a.Spans, want: np.ndarray) -> None:
    assert spans.q_len == want.shape[2]
    spans.validate()
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(spans.dense()), want.shape), want)


@pytest.mark.parametrize("q_len", [1, 5, KEYS])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_trees_are_their_definitions(convert: Callable[..., object], q_len: int) -> None:
    for tree in _trees(seed=q_len):
        mask, want = tree.mask(convert), tree.dense(_last_rows(q_len))
        _check(mask.spans(q_len, KEYS, batch=BATCH), want)
        _check(mask.prepare(q_len, KEYS, batch=BATCH).lowered, want)


def test_trees_under_jax_jit() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("attnspan.jax")  # It registers masks as pytrees.
    for tree in _trees(seed=7, count=5):
        spans = jax.jit(lambda mask: mask.spans(5, KEYS, batch=BATCH))(tree.mask(jax.numpy.asarray))
        _check(spans, tree.dense(_last_rows(5)))


def test_trees_while_a_compiler_traces() -> None:
    for tree in _trees(seed=9, count=6):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda mask, like: mask.spans(5, KEYS, batch=BATCH, like=like).bounds,
            backend="eager",
            fullgraph=True,
        )
        bounds = compiled(tree.mask(torch.from_numpy), torch.zeros(1))
        _check(a.Spans(bounds, KEYS), tree.dense(_last_rows(5)))


_LENGTHS = np.array([2, 4])
_BOTH_SIDES = {
    "key_padding": lambda x: a.key_padding(x, side="left") & a.key_padding(x),
    "prefix": lambda x: a.key_padding(x, side="left") & a.prefix(x),
    "cache": lambda x: a.key_padding(x, side="left") & a.cache(x),
}


@pytest.mark.parametrize("name", _BOTH_SIDES)
def test_lengths_on_both_sides_have_a_span_for_every_row(name: str) -> None:
    mask = _BOTH_SIDES[name](_LENGTHS)
    want = np.array([[[3, 3]] * 3, [[1, 4]] * 3])
    for lowered in (mask.spans(3, 5, batch=2), mask.prepare(3, 5, batch=2).lowered):
        assert lowered.bounds.shape == (2, 1, 3, 1, 2)
        visible = np.asarray(lowered.dense())[:, 0]
        keys = np.arange(5)
        np.testing.assert_array_equal(visible, (keys >= want[..., :1]) & (keys < want[..., 1:]))
