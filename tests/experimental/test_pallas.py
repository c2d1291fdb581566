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


K, BQ, BK = 96, 8, 16
BOUNDS = {"causal": np.stack([np.zeros(64, int), np.arange(33, 97)], -1)[None, None, :, None]}
BOUNDS["three runs"] = random_bounds(torch.Generator().manual_seed(3), 2, 3, 64, K, runs=3).numpy()


#: Heads and batch rows share tables that grow too large.
SHARED = [(2**14, (2, 3)), (100, (2, 1)), (30, (1, 1))]


# tests/jax/test_backends.py has results of several tiles.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "most", "lead"), [("causal", 2**14, (1, 1)), *(("three runs", *x) for x in SHARED)]
)
def test_lists(monkeypatch: pytest.MonkeyPatch, mask: str, most: int, lead: tuple[int, int]) -> None:
    """No block twice, none missing, and none that only causal masks could leave out."""
    monkeypatch.setattr(tables, "MOST_ENTRIES", most)
    bounds = BOUNDS[mask]
    found = tables.blocks(legal(jnp.asarray(bounds, jnp.int32), K), K, BQ, BK)
    keys = np.arange(K)
    dense = ((keys >= bounds[..., :1]) & (keys < bounds[..., 1:])).any(3)
    tiles = dense.reshape(*dense.shape[:2], 64 // BQ, BQ, K // BK, BK)
    lists, touched = found.of_queries, tiles.any((3, 5))
    assert lists.dims[:2] == lead
    flat, steps = tuple(map(np.asarray, lists.flat())), int(lists.steps)
    walks = np.asarray(tables.block_at(flat, lists.dims, *np.indices((*lists.dims[:3], steps), np.int32)))
    listed = np.zeros((*lists.dims[:3], K // BK), bool)
    for at in np.ndindex(lists.dims[:3]):
        own = walks[at][: int(np.asarray(lists.ends)[at][-1])]
        assert len(set(own)) == len(own)
        listed[at][own] = True
    assert (listed | ~touched).all()
    assert mask != "causal" or (listed == touched).all()
    lo, hi = (np.asarray(x)[..., None, :] for x in found.full)
    j = np.arange(K // BK)[:, None]
    whole = ((lo <= j) & (j < hi)).any(-1)
    assert not (whole & ~tiles.all((3, 5))).any()
    assert mask != "causal" or (whole == tiles.all((3, 5))).all()


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
ALL_THE_REST = {"q_index": ((1, ROW), "int32"), "k_index": ((2, KEY), "int32"), "sinks": ((4,), "float32")}
ALL_THE_REST |= {"bias": ((1, 4), "float32"), "dropout_seed": ((2, 4, 2), "uint32")}
LOWERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "signed alibi": ({"bias_kind": SIGNED_ALIBI}, {"bias": ((2, 4), "float32")}),
    "distance table": ({"bias_kind": DISTANCE}, {"bias": ((4, 9), "float32")}),
    "dense": ({"bias_kind": DENSE}, {"bias": ((1, 4, ROW, KEY), "bfloat16")}),
    "dense of keys": ({"bias_kind": DENSE}, {"bias": ((2, 1, 1, KEY), "float32")}),
    "dropout": ({"dropout_p": 0.1}, {"dropout_seed": ((2, 4, 2), "uint32")}),
    "all the rest": ({"softcap": 5.0, "bias_kind": ALIBI, "dropout_p": 0.1}, ALL_THE_REST),
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


@pytest.mark.slow
@pytest.mark.parametrize("option", few(LOWERED, 4))
def test_options_lower(option: str) -> None:
    own = ["dbias"] if LOWERED[option][0].get("bias_kind") in (DENSE, DISTANCE) else []
    assert _kernels(_lowered(option, "bfloat16", 64)) == ["forward", "dq", "dkv", *own]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [37, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_and_sizes_lower(dtype: str, head_dim: int, x64: bool) -> None:
    with jax.enable_x64(x64):
        text = _lowered("all the rest" if x64 else "plain", dtype, head_dim, runs=2 if x64 else 9)
    assert _kernels(text) == ["forward", "dq", "dkv"]
