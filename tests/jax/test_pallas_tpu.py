"""The kernels for TPUs against the oracle, interpreted on CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import few
from jax.experimental.pallas import tpu as pltpu
from pallas_tpu_cases import QUICKLY, SMALLEST, Case, Shape, masks

from attnspan.jax.backends import Operands, Static
from attnspan.jax.backends import pallas_tpu as pallas
from attnspan.options import ALIBI, DENSE, SIGNED_ALIBI

SHAPE = Shape()
MASKS = masks(SHAPE)
RNG = np.random.default_rng(9)


@pytest.mark.parametrize("mask", few(MASKS, 3))
def test_mask(mask: str) -> None:
    Case(SHAPE, MASKS[mask]).check()


def _places(shape: Shape) -> dict[str, np.ndarray]:
    """Global indices in any order, another one in each batch row."""
    order = [RNG.permutation(2 * (shape.q_len + shape.k_len)) for _ in range(shape.batch)]
    return {
        "q_index": np.stack([x[: shape.q_len] for x in order]),
        "k_index": np.stack([x[-shape.k_len :] for x in order]),
    }


def test_softcap_signed_alibi_per_batch_row_sinks_dropout_at_given_indices() -> None:
    static = Static(scale=0.25, softcap=2.0, bias_kind=SIGNED_ALIBI, dropout_p=0.2)
    arrays = {"bias": 0.02 * RNG.standard_normal((2, 4)), "sinks": RNG.standard_normal(4)}
    arrays["sinks"][1] = -np.inf
    Case(SHAPE, MASKS["anywhere, some rows nothing"], static, arrays, indices=_places(SHAPE)).check()


@pytest.mark.long
def test_more_runs_than_intervals_and_alibi_in_bfloat16() -> None:
    shape = Shape(heads=2, kv_heads=2, q_len=129, k_len=600, dtype="bfloat16", head_dim=37, v_dim=21)
    cuts = np.sort(RNG.integers(0, 601, (1, 2, 129, 22)), -1).reshape(1, 2, 129, 11, 2)
    slopes = {"bias": 0.02 * RNG.random((1, 2))}
    Case(shape, cuts, Static(scale=37**-0.5, bias_kind=ALIBI), slopes).check()


@pytest.mark.long
def test_dense_bias_shared_by_batch_rows_with_everything() -> None:
    static = Static(scale=0.25, softcap=2.0, bias_kind=DENSE, dropout_p=0.3)
    bias = RNG.standard_normal((1, 4, SHAPE.q_len, SHAPE.k_len)).astype(np.float32)
    bias[..., ::7] = -np.inf
    bias[:, :, 40] = np.finfo(np.float32).min  # all that this row sees is hidden
    Case(SHAPE, MASKS["causal"], static, {"bias": bias, "sinks": RNG.standard_normal(4)}).check()


@pytest.mark.long
def test_more_runs_than_intervals_and_a_dense_bias_of_keys() -> None:
    shape = Shape(batch=2, heads=2, kv_heads=1, q_len=129, k_len=600, head_dim=8, v_dim=8)
    cuts = np.sort(RNG.integers(0, 601, (1, 2, 129, 22)), -1).reshape(1, 2, 129, 11, 2)
    bias = {"bias": RNG.standard_normal((2, 1, 1, 600))}
    Case(shape, cuts, Static(scale=0.3, bias_kind=DENSE), bias).check()


def test_a_distance_table_becomes_a_dense_bias() -> None:
    places = {"q_index": np.array([[5, 0, 9]]), "k_index": np.array([[0, 1, 2, 3], [4, 9, 7, 6]])}
    table = RNG.standard_normal((2, 5)).astype(np.float32)
    given = Operands(jnp.zeros((1, 1, 3, 1, 2), jnp.int32), **{n: jnp.asarray(x) for n, x in places.items()})
    distance = np.clip(places["k_index"][:, None] - places["q_index"][..., None], -2, 2) + 2
    found = pallas._by_distance(jnp.asarray(table), given, 3, 4)
    np.testing.assert_array_equal(found, np.moveaxis(table[:, distance], 0, 1))
    default = pallas._by_distance(jnp.asarray(table), given._replace(q_index=None, k_index=None), 3, 4)
    np.testing.assert_array_equal(default[0, 1], table[1][[[1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 1, 2]]])


def test_rows_of_illegal_bounds_are_nan_and_have_no_gradient() -> None:
    bounds = MASKS["causal"].copy()
    bounds[0, 1, 3, 0] = 0, SHAPE.k_len + 1
    bounds[1, 2, 140] = [[0, 9], [8, 12]]
    legal = bounds.copy()
    legal[0, 1, 3] = legal[1, 2, 140] = 0
    got, exact = Case(SHAPE, bounds).run(), Case(SHAPE, legal).solve()
    for at in ((0, 1, 3), (1, 2, 140)):
        assert np.isnan(got["out"][at]).all()
        assert np.isnan(got["lse"][at])
        got["out"][at], got["lse"][at] = 0, -np.inf
    for name, value in got.items():
        np.testing.assert_allclose(value, exact[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_nan_that_no_row_of_a_tile_sees_reaches_nobody() -> None:
    """Nor what nobody sees in the middle of a tile that is computed; nor a query that sees nothing."""
    bounds = MASKS["window"].copy()
    bounds[:, :, 7] = 0
    clean = Case(SHAPE, bounds)
    a = {name: x.copy() for name, x in clean.arrays.items()}
    first = bounds[..., 0, 0][bounds[..., 0, 1] > 0].min()
    assert first % 128 > 100
    for name in ("k", "v"):
        a[name][:, :, :first] = np.nan
    for name in ("q", "dout"):
        a[name][:, :, 7] = np.inf
    a["dlse"][:, :, 7] = np.nan
    got, expected = clean.with_arrays(**a).run(), clean.run()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_empty_blocks_take_no_step() -> None:
    """A window of 40 keys in 384: a list has two blocks, not three. Simulated, with copies as on a TPU."""
    length, points = 384, []
    rows = np.arange(length)
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=length, k_len=length, head_dim=8, v_dim=8)
    case = Case(shape, np.stack([np.maximum(rows - 40, 0), rows + 1], -1)[None, None, :, None])
    a = {name: jnp.asarray(x, jnp.float32) for name, x in case.arrays.items()}
    call = a["q"], a["k"], a["v"], case.operands

    def record(token, at, core):
        points.append(tuple(map(int, at)))
        return token

    @partial(jax.jit, compiler_options=QUICKLY)
    def both(dout, dlse, *call):
        out, lse = pallas.forward(*call, case.static, SMALLEST)
        return out, lse, *pallas.backward(dout, dlse, *call, out, lse, case.static, False, SMALLEST)[:3]

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(grid_point_recorder=record)):
        found = jax.block_until_ready(both(a["dout"], a["dlse"], *call))
    exact = case.solve()
    for name, value in zip(exact, found, strict=True):
        np.testing.assert_allclose(value, exact[name], rtol=1e-4, atol=1e-5, err_msg=name)
    forward = [(0, 0, i, step) for i in range(3) for step in range(2)]
    of_keys = [(0, 0, j, 0, step) for j in range(3) for step in range(2)]
    assert sorted(points, key=lambda at: (len(at), at)) == sorted(2 * forward) + of_keys
