"""The kernels for TPUs against the oracle, interpreted on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from pallas_tpu_cases import SMALLEST, Case, Shape, masks, spans

from attnspan.jax import _pallas_tpu as pallas
from attnspan.jax._contract import Operands, Static
from attnspan.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI

SHAPE = Shape()
MASKS = masks(SHAPE)
RNG = np.random.default_rng(9)


@pytest.mark.parametrize("mask", MASKS)
def test_mask(mask: str) -> None:
    Case(SHAPE, MASKS[mask]).check()


def test_bfloat16() -> None:
    shape = Shape(dtype="bfloat16", kv_heads=4, head_dim=37, v_dim=21)
    Case(shape, MASKS["global and window"], Static(scale=37**-0.5)).check()


def _places(shape: Shape) -> dict[str, np.ndarray]:
    """Global indices in any order, another one in each batch row."""
    order = [RNG.permutation(2 * (shape.q_len + shape.k_len)) for _ in range(shape.batch)]
    return {
        "q_index": np.stack([x[: shape.q_len] for x in order]),
        "k_index": np.stack([x[-shape.k_len :] for x in order]),
    }


def test_softcap_alibi_sinks_dropout_at_given_indices() -> None:
    static = Static(scale=0.25, softcap=2.0, bias_kind=ALIBI, dropout_p=0.2)
    arrays = {"bias": 0.02 * RNG.random((1, 4)), "sinks": RNG.standard_normal(4)}
    arrays["sinks"][1] = -np.inf
    Case(SHAPE, MASKS["anywhere, some rows nothing"], static, arrays, indices=_places(SHAPE)).check()


def test_signed_alibi_per_batch_row() -> None:
    static = Static(scale=0.25, bias_kind=SIGNED_ALIBI)
    Case(SHAPE, MASKS["causal"], static, {"bias": 0.02 * RNG.standard_normal((2, 4))}).check()


def test_dense_bias_shared_by_batch_rows_with_everything() -> None:
    static = Static(scale=0.25, softcap=2.0, bias_kind=DENSE, dropout_p=0.3)
    bias = RNG.standard_normal((1, 4, SHAPE.q_len, SHAPE.k_len)).astype(np.float32)
    bias[..., ::7] = -np.inf
    bias[:, :, 40] = np.finfo(np.float32).min  # all that this row sees is hidden
    Case(SHAPE, MASKS["causal"], static, {"bias": bias, "sinks": RNG.standard_normal(4)}).check()


def test_dense_bias_of_keys_and_distance_table() -> None:
    shape = Shape(batch=2, heads=2, kv_heads=1, q_len=130, k_len=140, head_dim=8, v_dim=8)
    bounds = spans((0, 140), shape=shape)
    keys = {"bias": RNG.standard_normal((2, 1, 1, 140))}
    Case(shape, bounds, Static(scale=0.3, bias_kind=DENSE), keys).check()
    table = {"bias": RNG.standard_normal((2, 15))}
    Case(shape, bounds, Static(scale=0.3, bias_kind=DISTANCE), table, indices=_places(shape)).check()


def test_more_runs_than_intervals() -> None:
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=129, k_len=600, head_dim=8, v_dim=8)
    cuts = np.sort(RNG.integers(0, 601, (1, 1, 129, 22)), -1)
    Case(shape, cuts.reshape(1, 1, 129, 11, 2)).check()


def test_rows_of_illegal_bounds_are_nan_and_have_no_gradient() -> None:
    bounds = MASKS["causal"].copy()
    bounds[0, 1, 3, 0] = 0, SHAPE.k_len + 1
    bounds[1, 2, 140] = [[0, 9], [8, 12]]
    legal = bounds.copy()
    legal[0, 1, 3] = legal[1, 2, 140] = 0
    got, exact = Case(SHAPE, bounds).run(), Case(SHAPE, legal).solve()
    for at in ((0, 1, 3), (1, 2, 140)):
        assert np.isnan(got["out"][at]).all() and np.isnan(got["lse"][at])
        got["out"][at], got["lse"][at] = 0, -np.inf
    for name, value in got.items():
        np.testing.assert_allclose(value, exact[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_nan_that_no_row_of_a_tile_sees_reaches_nobody() -> None:
    """Nor what nobody sees at all, in the middle of a tile that is computed; nor a query that sees nothing."""
    bounds = MASKS["window"].copy()
    bounds[:, :, 7] = 0
    clean = Case(SHAPE, bounds)
    a = {name: x.copy() for name, x in clean.arrays.items()}
    first = bounds[..., 0, 0][bounds[..., 0, 1] > 0].min()
    assert 128 % first and first > 100
    for name in ("k", "v"):
        a[name][:, :, :first] = np.nan
    for name in ("q", "dout"):
        a[name][:, :, 7] = np.inf
    a["dlse"][:, :, 7] = np.nan
    got, expected = clean.with_arrays(**a).run(), clean.run()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_empty_blocks_take_no_step(direction: str) -> None:
    """A window of 40 keys in 512: a list has two blocks, not four. Simulated, with copies as on a TPU."""
    length, points = 512, []
    rows = np.arange(length)
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=length, k_len=length, head_dim=8, v_dim=8)
    case = Case(shape, np.stack([np.maximum(rows - 40, 0), rows + 1], -1)[None, None, :, None])
    a = {name: jnp.asarray(x, jnp.float32) for name, x in case.arrays.items()}
    call = a["q"], a["k"], a["v"], case.operands
    params = pltpu.InterpretParams(grid_point_recorder=lambda at, core: points.append(tuple(map(int, at))))
    exact = case.solve()
    with pltpu.force_tpu_interpret_mode(params):
        if direction == "forward":
            out, _ = pallas.forward(*call, case.static, SMALLEST)
            np.testing.assert_allclose(out, exact["out"], rtol=1e-4, atol=1e-5)
            assert sorted(points) == [(0, 0, i, step) for i in range(4) for step in range(2)]
            return
        out, lse = (jnp.asarray(exact[name], jnp.float32) for name in ("out", "lse"))
        found = pallas.backward(a["dout"], a["dlse"], *call, out, lse, case.static, False, SMALLEST)
    for name, value in zip(("dq", "dk", "dv"), found, strict=False):
        np.testing.assert_allclose(value, exact[name], rtol=1e-4, atol=1e-5)
    of_keys = [(0, 0, j, 0, step) for j in range(4) for step in range(2)]
    assert sorted(points, key=lambda at: (len(at), at)) == [
        *((0, 0, i, step) for i in range(4) for step in range(2)),
        *of_keys,
    ]


LOWERED = {
    "plain": (Static(scale=0.1), {}),
    "softcap": (Static(scale=0.1, softcap=5.0), {}),
    "sinks": (Static(scale=0.1), {"sinks": ((4,), "float32")}),
    "alibi": (Static(scale=0.1, bias_kind=ALIBI), {"bias": ((1, 4), "float32")}),
    "signed alibi": (Static(scale=0.1, bias_kind=SIGNED_ALIBI), {"bias": ((2, 4), "float32")}),
    "distance table": (Static(scale=0.1, bias_kind=DISTANCE), {"bias": ((4, 9), "float32")}),
    "dense": (Static(scale=0.1, bias_kind=DENSE), {"bias": ((2, 1, 300, 400), "float32")}),
    "dense of keys": (Static(scale=0.1, bias_kind=DENSE), {"bias": ((1, 4, 1, 400), "bfloat16")}),
    "dropout": (Static(scale=0.1, dropout_p=0.1), {"seeds": ((2, 4, 2), "uint32")}),
    "indices": (
        Static(scale=0.1, bias_kind=ALIBI, dropout_p=0.1),
        {
            "bias": ((1, 4), "float32"),
            "seeds": ((2, 4, 2), "uint32"),
            "q_index": ((1, 300), "int32"),
            "k_index": ((2, 400), "int32"),
        },
    ),
}


def _lower(static: Static, arrays: dict, dtype: str, head_dim: int, runs: int = 2) -> str:
    """The program for a TPU, of both directions; JAX makes it on any machine."""

    def shaped(shape: tuple, kind: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    q, k = shaped((2, 4, 300, head_dim)), shaped((2, 2, 400, head_dim))
    lse = shaped((2, 4, 300), "float32")
    given = Operands(
        shaped((1, 1, 300, runs, 2), "int32"), **{name: shaped(*each) for name, each in arrays.items()}
    )

    def both(dout, q, k, v, given, lse):
        out, _ = pallas.forward(q, k, v, given, static)
        return out, pallas.backward(dout, lse, q, k, v, given, out, lse, static, True)

    exported = jax.export.export(jax.jit(both), platforms=["tpu"])(q, q, k, k, given, lse)
    return str(exported.mlir_module())


@pytest.mark.parametrize("option", LOWERED)
def test_lowers_for_a_tpu(option: str) -> None:
    static, arrays = LOWERED[option]
    program = _lower(static, arrays, "bfloat16", 64)
    kernels = 4 if static.bias_kind in (DENSE, DISTANCE) else 3
    assert program.count("@tpu_custom_call") == kernels


@pytest.mark.parametrize("head_dim", [37, 64, 128])
def test_lowers_for_a_tpu_in_float32(head_dim: int) -> None:
    assert _lower(Static(scale=0.1), {}, "float32", head_dim, runs=9).count("@tpu_custom_call") == 3


def test_lowers_for_a_tpu_with_64_bit_types_on() -> None:
    with jax.enable_x64(True):
        static, arrays = LOWERED["indices"]
        assert _lower(static, arrays, "bfloat16", 128).count("@tpu_custom_call") == 3
