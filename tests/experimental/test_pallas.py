"""The Pallas kernels apart from their results: tables of blocks, what they refuse, what they lower to."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from covering import few
from jax.experimental.pallas import tpu as pltpu
from samples.jax_problems import cotangents_of, part_of
from samples.parts import Case, random_bounds
from samples.problems import check, make

from attnspan.call import Problem
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI
from attnspan.experimental.pallas import backend as pallas
from attnspan.experimental.pallas import lists as tables
from attnspan.experimental.pallas.visits import key_visits, query_visits
from attnspan.jax.backends.tiles import legal
from attnspan.jax.part import JaxPart

pytestmark = pytest.mark.below_promotion

PROBLEM = Problem(1, 2, 1, 8, 8, 64, 64, 1, "bfloat16", "gpu")
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({"device": "tpu"}, {}, None),
    ({"device": "cpu"}, {}, "it runs on TPUs, not on cpu"),
    ({"device": "tpu", "dtype": "float64"}, {}, "the dtypes of TPUs, not float64"),
    ({"device": "tpu", "v_dim": 640}, {}, "it takes head dims up to 512, not 64 and 640"),
    ({"device": "tpu", "runs": 300}, {}, "it takes up to 256 spans per query, not 300"),
    ({"device": "tpu", "k_len": 0}, {}, "it takes no empty arrays"),
    ({"device": "tpu", "q_len": 2048, "k_len": 8192}, {"bias_kind": DISTANCE}, "not 33554432"),
]


@pytest.mark.parametrize(("change", "numbers", "reason"), REFUSED)
def test_refusals(change: dict[str, Any], numbers: dict[str, Any], reason: str | None) -> None:
    found = pallas.supports(replace(PROBLEM, **change), JaxPart(*[None] * 4, 1.0, **numbers))
    assert found is None if reason is None else reason in str(found)


def test_there_is_a_tile_for_whatever_a_tpu_takes() -> None:
    for dtype in ("float32", "bfloat16"):
        for dim in (8, 128, pallas.MAX_HEAD_DIM):
            for length in (1, 130, 100_000):
                problem = Problem(1, 1, 1, length, length, dim, dim, 1, dtype, "tpu")
                for direction in ("forward", "backward"):
                    found = pallas.default(problem, direction)
                    assert pallas.vmem_bytes(problem, direction, *found) <= pallas.BUDGET
                    assert all(size % 128 == 0 for size in found)


# Tables.

Q, K, BQ, BK = 64, 96, 8, 16
ROWS = np.arange(Q) + K - Q


def _anywhere(runs: int, narrow: int = 1) -> np.ndarray:
    rng = np.random.default_rng(runs)
    cuts = np.sort(rng.integers(0, K // narrow + 1, (2, 3, Q, 2 * runs)), -1)
    cuts[:, :, ::3] = 0
    cuts[:, 1, 16:40] = 0
    return cuts.reshape(2, 3, Q, runs, 2)


def _spans(*runs: tuple[Any, Any]) -> np.ndarray:
    return np.stack([np.stack(np.broadcast_arrays(*run, ROWS)[:2], -1) for run in runs], 1)[None, None]


BEHIND = np.maximum(ROWS - 10, 0)
MASKS = {
    "causal": _spans((0, ROWS + 1)),
    "wide window": _spans((np.maximum(ROWS - 60, 0), ROWS + 1)),
    "global and window": _spans((0, np.minimum(BEHIND, 3)), (BEHIND, ROWS + 1)),
    "one run": _anywhere(1, 2),
    "three runs": _anywhere(3),
    "nine runs": _anywhere(9),
    "runs in turn": np.where((np.arange(Q) % 2)[:, None, None], [[0, 0], [0, 9]], [[70, 80], [0, 0]])[
        None, None
    ],
}
# Whose intervals have nothing between: there the lists are exact.
EXACT = ("causal", "wide window", "global and window", "runs in turn")


def _tiles(bounds: np.ndarray) -> np.ndarray:
    """The dense mask by tiles, (b, h, Q / BQ, BQ, K / BK, BK)."""
    keys = np.arange(K)
    dense = ((keys >= bounds[..., :1]) & (keys < bounds[..., 1:])).any(3)
    return dense.reshape(*dense.shape[:2], Q // BQ, BQ, K // BK, BK)


def _tables(bounds: np.ndarray) -> tables.Blocks:
    # As tuples: `Blocks` is no pytree. Compiled, as each operation alone would be, too.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def arrays(bounds: Any) -> Any:
        found = tables.blocks(legal(bounds, K), K, BQ, BK)
        return [(x.ends, x.shifts) for x in (found.of_queries, found.of_keys)], found.full

    lists, full = arrays(jnp.asarray(bounds, jnp.int32))
    return tables.Blocks(*(tables.Lists(*x) for x in lists), full)


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


def _said_whole(blocks: tables.Blocks) -> np.ndarray:
    lo, hi = (np.asarray(x)[..., None, :] for x in blocks.full)
    j = np.arange(K // BK)[:, None]
    return ((lo <= j) & (j < hi)).any(-1)


@pytest.mark.parametrize("mask", few(MASKS, 3))
def test_lists(mask: str) -> None:
    blocks, tiles = _tables(MASKS[mask]), _tiles(MASKS[mask])
    touched, whole = tiles.any((3, 5)), tiles.all((3, 5))
    of_queries = _listed(blocks.of_queries, K // BK)
    of_keys = _listed(blocks.of_keys, Q // BQ).swapaxes(2, 3)
    for listed in (of_queries, of_keys):
        assert (listed | ~touched).all()
        if mask in EXACT:
            np.testing.assert_array_equal(listed, touched)
    said = _said_whole(blocks)
    assert not (said & ~whole).any()
    if mask in ("causal", "wide window"):
        assert whole.any()
        np.testing.assert_array_equal(said, whole)
    flat = tuple(map(np.asarray, blocks.of_queries.flat()))
    places = np.indices((*blocks.of_queries.dims[:3], K // BK))
    np.testing.assert_array_equal(tables.touches(flat, blocks.of_queries.dims, *places), of_queries)


@pytest.mark.parametrize(("most", "lead"), [(2**14, (2, 3)), (100, (2, 1)), (30, (1, 1))])
def test_heads_and_batch_rows_share_tables_that_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch, most: int, lead: tuple[int, int]
) -> None:
    monkeypatch.setattr(tables, "MOST_ENTRIES", most)
    blocks, tiles = _tables(MASKS["three runs"]), _tiles(MASKS["three runs"])
    assert blocks.of_queries.dims[:2] == lead
    assert (_listed(blocks.of_queries, K // BK) | ~tiles.any((3, 5))).all()
    assert not (_said_whole(blocks) & ~tiles.all((3, 5))).any()


@pytest.mark.slow
def test_visits_cover_what_is_visible_once() -> None:
    bounds = random_bounds(torch.Generator().manual_seed(3), 2, 4, 75, 90, runs=3).numpy()
    visits = jax.jit(lambda b: key_visits(legal(b, 90), 90, 8, 4))(jnp.asarray(bounds))
    q_visits, visits = np.asarray(query_visits(visits, 23)), np.asarray(visits)
    keys = np.arange(92)[:, None]
    visible = ((keys >= bounds[..., None, :, 0]) & (keys < bounds[..., None, :, 1])).any(-1)
    tiles = np.pad(visible, ((0, 0), (0, 0), (0, 5), (0, 0))).reshape(2, 4, 10, 8, 23, 4)
    seen = np.zeros((2, 4, 10, 23), int)
    for place in np.ndindex(2, 4, 10):
        for first, end, all_first, all_end in visits[place]:
            seen[(*place, slice(first, end))] += 1
            assert first <= all_first <= all_end <= end
            inside = tiles[place][:, all_first:all_end].all(0)
            assert inside.all() or place[2] == 9  # whose last rows are nobody's
    assert seen.max() == 1
    assert (seen[tiles.any((3, 5))] == 1).all()
    for b, h, j in np.ndindex(2, 4, 23):
        at = np.nonzero(seen[b, h, :, j])[0]
        assert q_visits[b, h, j].tolist() == ([at[0], at[-1] + 1] if len(at) else [0, 0])


def test_illegal_rows_are_marked_and_see_nothing() -> None:
    rows = [[[0, 5], [3, 9]], [[-1, 2], [4, 5]], [[5, 4], [0, 0]], [[0, 2], [9, K + 1]], [[7, 7], [2, 3]]]
    found = np.asarray(legal(jnp.asarray([[rows]], jnp.int32), K))[0, 0]
    assert (found[:4] == -1).all()
    np.testing.assert_array_equal(found[4], [[0, 0], [2, 3]])


@pytest.mark.slow
def test_empty_blocks_take_no_step_on_a_tpu() -> None:
    """A window of 40 keys in 384: a list has two blocks, not three. Simulated, with copies as on a TPU."""
    sizes = {"heads": 1, "kv_heads": 1, "q_len": 384, "k_len": 384, "head_dim": 8, "v_dim": 8}
    case = Case(mask="window of 40", **sizes)
    problem, points = make(case), []

    def record(*given: Any) -> Any:
        *token, at, _ = given  # JAX 0.10.0 passes no token
        points.append(tuple(map(int, at)))
        return token[0] if token else ()

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(part: JaxPart, dout: Any, dlse: Any) -> Any:
        size = (128, 128)
        out, lse = pallas.forward(part, size)
        return out, lse, *pallas.backward(part, out, lse, dout, dlse, False, size)[:3]

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(grid_point_recorder=record)):
        found = jax.block_until_ready(both(part_of(problem), *cotangents_of(problem)))
    check(case, dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True)))
    forward = [(0, 0, i, step) for i in range(3) for step in range(2)]
    of_keys = [(0, 0, j, 0, step) for j in range(3) for step in range(2)]
    assert sorted(points, key=lambda at: (len(at), at)) == sorted(2 * forward) + of_keys


# What they lower to, where there is no such device.

ROW, KEY = 300, 333
INDICES = {"q_index": ((1, ROW), "int32"), "k_index": ((2, KEY), "int32")}
LOWERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "signed alibi": ({"bias_kind": SIGNED_ALIBI}, {"bias": ((2, 4), "float32")}),
    "distance table": ({"bias_kind": DISTANCE}, {"bias": ((4, 9), "float32")}),
    "dense": ({"bias_kind": DENSE}, {"bias": ((1, 4, ROW, KEY), "bfloat16")}),
    "dense of keys": ({"bias_kind": DENSE}, {"bias": ((2, 1, 1, KEY), "float32")}),
    "dropout": ({"dropout_p": 0.1}, {"dropout_seed": ((2, 4, 2), "uint32")}),
    "indices and all the rest": (
        {"softcap": 5.0, "bias_kind": ALIBI, "dropout_p": 0.1},
        {
            "sinks": ((4,), "float32"),
            "bias": ((1, 4), "float32"),
            "dropout_seed": ((2, 4, 2), "uint32"),
            **INDICES,
        },
    ),
}


def _lowered(option: str, dtype: str, head_dim: int, runs: int = 2) -> str:
    """The program of both directions, of which JAX makes the text on any machine."""

    def shaped(shape: tuple[int, ...], kind: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    numbers, arrays = LOWERED[option]
    q, k = shaped((2, 4, ROW, head_dim)), shaped((2, 2, KEY, head_dim))
    options: Any = {n: shaped(*x) for n, x in arrays.items()}
    part = JaxPart(q, k, k, shaped((2, 1, ROW, runs, 2), "int32"), 0.1, **numbers, **options)  # type: ignore[arg-type]

    def both(part: JaxPart, dout: Any, dlse: Any) -> Any:
        out, lse = pallas.forward(part)
        return out, pallas.backward(part, out, lse, dout, dlse, True)

    traced = jax.jit(both).trace(part, q, shaped((2, 4, ROW), "float32"))
    return str(traced.lower(lowering_platforms=("tpu",)).as_text())


def _kernels(text: str) -> list[str]:
    """Names of the kernels, in order."""
    return re.findall(r'kernel_name = "attnspan_(\w+)"', text)


@pytest.mark.parametrize("option", few(list(LOWERED), 4))
def test_options_lower(option: str) -> None:
    own = ["dbias"] if LOWERED[option][0].get("bias_kind") in (DENSE, DISTANCE) else []
    assert _kernels(_lowered(option, "bfloat16", 64)) == ["forward", "dq", "dkv", *own]


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [37, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_and_sizes_lower(dtype: str, head_dim: int) -> None:
    text = _lowered("plain", dtype, head_dim, runs=9)
    assert _kernels(text) == ["forward", "dq", "dkv"]


def test_numbers_of_64_bits_change_nothing() -> None:
    with jax.enable_x64(True):
        text = _lowered("indices and all the rest", "bfloat16", 128)
    assert _kernels(text) == ["forward", "dq", "dkv"]
