"""The options of the compiled kernel at one level (test_levels.py runs this file at the others)."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, budget, check, exponential, make, walk

from attnspan.kernels import cpu
from attnspan.options import Options

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
SMALL = Case(batch=2, kv_heads=1, group=2, q_len=70, k_len=150, head_dim=24, v_dim=40, runs=2)

CASES = [
    replace(SMALL, options=("softcap",)),
    replace(SMALL, options=("wide softcap", "sinks"), scale=-0.2),
    replace(SMALL, options=("sinks",)),
    replace(SMALL, options=("alibi",), mask="causal", q_len=150),
    replace(SMALL, options=("any alibi", "softcap", "rows elsewhere")),
    replace(SMALL, options=("signed alibi", "keys elsewhere")),
    replace(SMALL, options=("table", "sinks", "rows shifted"), mask="full"),
    replace(SMALL, options=("long table",), mask="causal", q_len=150),
    replace(SMALL, options=("table", "rows elsewhere", "keys elsewhere")),
    replace(SMALL, options=("one distance", "sinks")),
    replace(SMALL, options=("dense",)),
    replace(SMALL, options=("dense of heads", "softcap"), kv_heads=2),
    replace(SMALL, options=("dense of batch",), kv_heads=3, group=1),
    replace(SMALL, options=("dense of rows", "dropout"), kv_heads=2),
    replace(SMALL, options=("dense of keys", "sinks")),
    replace(SMALL, options=("dense with holes",), mask="full"),
    replace(SMALL, options=("dense with holes", "sinks", "dropout by head")),
    replace(SMALL, options=("dense with deep rows",), mask="full"),
    replace(SMALL, options=("dense with deep rows", "dropout"), mask="full", q_len=6),
    replace(SMALL, options=("dropout",)),
    replace(SMALL, options=("dropout", "softcap", "sinks", "alibi", "rows elsewhere", "keys elsewhere")),
    replace(SMALL, options=("softcap", "table", "dropout", "sinks"), q_len=5, group=1),
    replace(SMALL, options=("softcap", "dense", "dropout", "sinks"), q_len=9, group=4),
    replace(SMALL, options=("alibi", "dropout by head"), q_len=1, k_len=700, mask="full"),
    replace(SMALL, options=("softcap", "alibi", "dropout"), q_len=250, k_len=470, mask="documents"),
    replace(SMALL, options=("dense", "dropout"), q_len=210, k_len=400, batch=1, head_dim=192, v_dim=128),
]


# tests/conformance has each option with each dtype.
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    arrays = make(case)
    got, exact = arrays.run(), arrays.oracle()
    allowed = budget(case, exact)
    # Scores with their biases are up to this large, and exponents have the absolute error of such floats.
    seen = exact["lse"][exact["lse"].isfinite()]
    largest = 2**-24 * max(1.0, float(seen[seen.abs() < 1000].abs().max()))
    rounding = walk(case) + exponential(dtype, 2e-6) + largest
    # The error of a few numbers is a draw, not a norm.
    luck = {name: 3 if exact[name].numel() > 10 else 10 for name in got}
    check(got, exact, {name: luck[name] * (allowed[name] + rounding) for name in got})


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
def test_dropout_is_the_same_under_any_tiling_and_number_of_threads(dtype: torch.dtype) -> None:
    # One value for each key, of which a row's output tells whether it was kept.
    case = Case(kv_heads=1, q_len=100, k_len=200, head_dim=16, v_dim=200, mask="full", dtype=dtype)
    case = replace(case, options=("dropout",))
    patterns = []
    problem = {"num_threads": 1}
    for config in (None, *({"block_q": 0, "block_k": b, "threads": t} for b in (192, 384) for t in (1, 3))):
        arrays = make(replace(case, threads=problem["num_threads"] if config is None else config["threads"]))
        arrays.v[:] = torch.eye(200, dtype=dtype)
        patterns.append(arrays.run(config)["out"] != 0)
    assert all(torch.equal(patterns[0], pattern) for pattern in patterns[1:])
    rate, pairs = float(patterns[0].double().mean()), patterns[0].numel()
    assert abs(rate - 0.7) < 4 * (0.3 * 0.7 / pairs) ** 0.5


@pytest.mark.parametrize("q_len", [100, 12, 1])
def test_a_shard_drops_what_the_whole_drops(q_len: int) -> None:
    case = Case(batch=2, kv_heads=2, q_len=q_len, k_len=200, head_dim=16, v_dim=200, mask="full")
    whole = make(replace(case, options=("dropout by head",)))
    whole.v[:] = torch.eye(200)
    kept = whole.run()["out"] != 0
    rows, keys = torch.arange(0, q_len, 2), torch.arange(3, 200, 3)
    options = Options(
        dropout_p=0.5,
        dropout_seed=whole.options.dropout_seed[1:, 1:].contiguous(),
        q_index=(rows + 200 - q_len)[None].int(),
        k_index=keys[None].int(),
    )
    bounds = torch.tensor([0, len(keys)], dtype=torch.int32).expand(1, 1, len(rows), 1, 2).contiguous()
    q, k, v = whole.q[1:, 1:, rows], whole.k[1:, 1:, keys], whole.v[1:, 1:, keys]
    out, lse = torch.empty(1, 1, len(rows), 200), torch.empty(1, 1, len(rows))
    cpu.forward(q, k, v, bounds, out, lse, scale=0.25, num_threads=2, options=options)
    assert torch.equal(out[..., keys] != 0, kept[1:, 1:, rows][..., keys])


@pytest.mark.parametrize("q_len", [150, 5])
def test_a_non_finite_value_reaches_what_may_see_it_and_nothing_else(q_len: int) -> None:
    options = ("softcap", "alibi", "sinks", "dropout")
    arrays = make(Case(q_len=q_len, k_len=300, kv_heads=1, runs=2, options=options))
    clean, keys = arrays.run(), torch.arange(300)
    spans = arrays.bounds[0, 0]
    sees = ((spans[..., 0, None] <= keys) & (keys < spans[..., 1, None])).any(1)[:, 71]
    arrays.k[0, 0, 71, 3] = torch.nan
    got = arrays.run()
    assert torch.equal(got["out"][0, 0].isnan().any(-1), sees)
    assert torch.equal(got["dq"][0, 0].isnan().any(-1), sees)
    # Rows beside it take another way to the same result.
    torch.testing.assert_close(got["out"][0, 0, ~sees], clean["out"][0, 0, ~sees])


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("q_len", [150, 5])
def test_a_bias_of_hidden_keys_is_not_seen(q_len: int, value: float, dtype: torch.dtype) -> None:
    arrays = make(Case(q_len=q_len, k_len=q_len, kv_heads=1, mask="causal", options=("dense",), dtype=dtype))
    clean = arrays.run()
    arrays.options.bias[:, :, torch.ones(q_len, q_len, dtype=torch.bool).triu(1)] = value
    got = arrays.run()
    assert all(torch.equal(clean[name], got[name]) for name in clean)


def test_rows_that_see_nothing_do_not_see_a_bad_slope() -> None:
    arrays = make(Case(q_len=70, k_len=90, options=("alibi",)))
    arrays.options.bias[:] = torch.nan
    nothing = (arrays.bounds[..., 0] == arrays.bounds[..., 1]).all(-1)
    got = arrays.run()
    assert (got["out"][nothing] == 0).all()
    assert got["out"][~nothing].isnan().all()


@pytest.mark.parametrize("cap", [1e10, 1e30, 3e38])
def test_a_cap_far_above_all_scores_changes_none(cap: float) -> None:
    arrays = make(replace(SMALL, options=("sinks",)))
    plain = arrays.run()
    arrays.options = arrays.options._replace(softcap=cap)
    got = arrays.run()
    for name in plain:
        torch.testing.assert_close(got[name], plain[name])


def test_a_gradient_that_is_not_wanted_is_not_made() -> None:
    arrays = make(replace(SMALL, options=("dense", "sinks")))
    wanted = arrays.run()
    dq, dk, dv = (torch.empty_like(x) for x in (arrays.q, arrays.k, arrays.v))
    given = (
        arrays.dout,
        arrays.dlse,
        arrays.q,
        arrays.k,
        arrays.v,
        wanted["out"],
        wanted["lse"],
        arrays.bounds,
    )
    cpu.backward(*given, dq, dk, dv, scale=SMALL.scale, num_threads=2, options=arrays.options)
    assert all(torch.equal(wanted[name], x) for name, x in (("dq", dq), ("dk", dk), ("dv", dv)))


BAD = {
    "softcap: expected 0 or a number of at least": {"softcap": -1.0},
    "at least 1e-30": {"softcap": 1e-40},
    "bias_kind": {"bias_kind": 7, "bias": torch.zeros(1, 2)},
    "sinks": {"sinks": torch.zeros(3)},
    "bias: expected shape": {"bias": torch.zeros(1, 3), "bias_kind": 1},
    "bias: expected 1 or 2": {"bias": torch.zeros(3, 2), "bias_kind": 2},
    "reach": {"bias": torch.zeros(2, 4), "bias_kind": 3},
    "bias: expected 1 or 70": {"bias": torch.zeros(1, 1, 3, 150), "bias_kind": 4},
    "float16": {"bias": torch.zeros(1, 1, 70, 150, dtype=torch.float64), "bias_kind": 4},
    "dropout_seed": {"dropout_p": 0.5, "dropout_seed": torch.zeros(3, 3, dtype=torch.int64)},
    "int64": {"dropout_p": 0.5, "dropout_seed": torch.tensor(1, dtype=torch.int32)},
    "q_index": {"q_index": torch.zeros(1, 69, dtype=torch.int32)},
    "k_index": {"k_index": torch.zeros(2, 150, dtype=torch.int64)},
}


@pytest.mark.compiled_module("another process takes options as they are")
@pytest.mark.parametrize("message", BAD)
def test_options_that_do_not_fit_are_refused(message: str) -> None:
    arrays = make(SMALL)
    arrays.options = Options(**BAD[message])
    with pytest.raises(ValueError, match=message):
        arrays.run()
