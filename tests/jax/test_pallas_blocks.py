"""The tables of touched blocks against the dense mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import few

from attnspan.jax.backends.pallas_tpu import lists as tables
from attnspan.jax.backends.tiles import legal

Q, K, BQ, BK = 64, 96, 8, 16


def _causal(rows: np.ndarray) -> np.ndarray:
    return np.stack([np.zeros_like(rows), rows + 1], -1)[None, None, :, None]


def _global_and_window(rows: np.ndarray) -> np.ndarray:
    behind = np.maximum(rows - 10, 0)
    first = np.stack([0 * rows, np.minimum(behind, 3)], -1)
    return np.stack([first, np.stack([behind, rows + 1], -1)], 1)[None, None]


def _anywhere(rows: np.ndarray, runs: int, narrow: int = 1) -> np.ndarray:
    rng = np.random.default_rng(runs)
    cuts = np.sort(rng.integers(0, K // narrow + 1, (2, 3, len(rows), 2 * runs)), -1)
    cuts[:, :, ::3] = 0
    cuts[:, 1, 16:40] = 0
    return cuts.reshape(2, 3, len(rows), runs, 2)


ROWS = np.arange(Q) + K - Q
MASKS = {
    "causal": _causal(ROWS),
    "wide window": np.stack([np.maximum(ROWS - 60, 0), ROWS + 1], -1)[None, None, :, None],
    "global and window": _global_and_window(ROWS),
    "one run": _anywhere(ROWS, 1, 2),
    "three runs": _anywhere(ROWS, 3),
    "nine runs": _anywhere(ROWS, 9),
    "runs in turn": np.where((np.arange(Q) % 2)[:, None, None], [[0, 0], [0, 9]], [[70, 80], [0, 0]])[
        None, None
    ],
}
# Whose intervals have nothing between: there the lists are exact.
EXACT = ("causal", "wide window", "global and window", "runs in turn")


def _dense(bounds: np.ndarray) -> np.ndarray:
    keys = np.arange(K)
    return ((keys >= bounds[..., :1]) & (keys < bounds[..., 1:])).any(3)


@partial(jax.jit, static_argnames="most", compiler_options={"xla_backend_optimization_level": 0})
def _arrays(bounds, most: int):
    assert most == tables.MOST_ENTRIES, "another program for other entries"
    blocks = tables.blocks(legal(bounds, K), K, BQ, BK)
    of_queries, of_keys = blocks.of_queries, blocks.of_keys
    return (of_queries.ends, of_queries.shifts), blocks.full, (of_keys.ends, of_keys.shifts)


def _tables(bounds: np.ndarray) -> tables.Blocks:
    """Compiled, as each operation alone would be, too."""
    of_queries, full, of_keys = _arrays(jnp.asarray(bounds, jnp.int32), tables.MOST_ENTRIES)
    return tables.Blocks(tables.Lists(*of_queries), tables.Lists(*of_keys), full)


def _said_whole(blocks: tables.Blocks) -> np.ndarray:
    lo, hi = (np.asarray(x)[..., None, :] for x in blocks.full)
    j = np.arange(K // BK)[:, None]
    return ((lo <= j) & (j < hi)).any(-1)


def _listed(lists: tables.Lists, count: int) -> np.ndarray:
    """Which blocks each list has, by walking it as a kernel does."""
    flat, steps = tuple(map(np.asarray, lists.flat())), int(lists.steps)
    b, h, i, step = np.indices((*lists.dims[:3], steps), np.int32)
    walks = np.asarray(tables.block_at(flat, lists.dims, b, h, i, step))
    assert (walks >= 0).all()
    assert (walks < count).all()
    ends = np.asarray(lists.ends)[..., -1]
    found = np.zeros((*lists.dims[:3], count), bool)
    for at in np.ndindex(lists.dims[:3]):
        total, walk = int(ends[at]), walks[at]
        assert len(set(walk[:total])) == total, "a block twice"
        assert (walk[total:] == walk[max(total - 1, 0)]).all(), "a new block behind the end"
        found[at][walk[:total]] = True
    return found


@pytest.mark.parametrize("mask", few(MASKS, 3))
def test_lists(mask: str) -> None:
    blocks = _tables(MASKS[mask])
    dense = _dense(MASKS[mask])
    tiles = dense.reshape(*dense.shape[:2], Q // BQ, BQ, K // BK, BK)
    touched, whole = tiles.any((3, 5)), tiles.all((3, 5))
    listed, of_keys = _listed(blocks.of_queries, K // BK), _listed(blocks.of_keys, Q // BQ).swapaxes(2, 3)
    assert (listed | ~touched).all()
    assert (of_keys | ~touched).all()
    if mask in EXACT:
        np.testing.assert_array_equal(listed, touched)
        np.testing.assert_array_equal(of_keys, touched)
    said = _said_whole(blocks)
    assert not (said & ~whole).any()
    if mask in ("causal", "wide window"):
        assert whole.any()
        np.testing.assert_array_equal(said, whole)


def test_touched_blocks_are_those_of_the_list() -> None:
    lists = _tables(MASKS["three runs"]).of_queries
    flat = tuple(map(np.asarray, lists.flat()))
    found = tables.touches(flat, lists.dims, *np.indices((*lists.dims[:3], K // BK)))
    np.testing.assert_array_equal(found, _listed(lists, K // BK))


@pytest.mark.parametrize(("most", "lead"), [(2**14, (2, 3)), (100, (2, 1)), (30, (1, 1))])
def test_heads_and_batch_rows_share_tables_that_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch, most: int, lead: tuple[int, int]
) -> None:
    monkeypatch.setattr(tables, "MOST_ENTRIES", most)
    mask = MASKS["three runs"]
    blocks = _tables(mask)
    assert blocks.of_queries.dims[:2] == lead
    tiles = _dense(mask).reshape(2, 3, Q // BQ, BQ, K // BK, BK)
    assert (_listed(blocks.of_queries, K // BK) | ~tiles.any((3, 5))).all()
    assert not (_said_whole(blocks) & ~tiles.all((3, 5))).any()


def test_illegal_rows_are_marked_and_see_nothing() -> None:
    rows = [[[0, 5], [3, 9]], [[-1, 2], [4, 5]], [[5, 4], [0, 0]], [[0, 2], [9, K + 1]], [[7, 7], [2, 3]]]
    found = np.asarray(legal(jnp.asarray([[rows]], jnp.int32), K))[0, 0]
    assert (found[:4] == -1).all()
    np.testing.assert_array_equal(found[4], [[0, 0], [2, 3]])
