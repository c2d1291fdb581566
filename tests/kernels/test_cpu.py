"""The compiled kernel at one instruction-set level (test_levels.py runs this file at all the others)."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import Case, budget, check, error, exponential, make, walk

from attnspan.kernels import cpu

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16

# Sizes around the kernel's own: strips of 24 and 32 rows, blocks of 96, 128, 192 and 256, panels of 16.
CASES = [
    Case(q_len=1, k_len=300),
    Case(q_len=7, k_len=513, group=4, runs=2),
    Case(q_len=8, k_len=257, mask="causal"),
    Case(q_len=97, k_len=255, runs=3),
    Case(q_len=193, k_len=193, mask="causal"),
    Case(q_len=400, k_len=400, mask="documents", group=2),
    Case(q_len=385, k_len=577, mask="full", kv_heads=1),
    Case(q_len=130, k_len=20, mask="causal"),
    Case(batch=2, q_len=65, k_len=129, group=8, kv_heads=1, head_dim=32, v_dim=32),
    Case(q_len=33, k_len=70, head_dim=1, v_dim=1),
    Case(q_len=40, k_len=70, head_dim=8, v_dim=8, runs=4),
    Case(q_len=50, k_len=90, head_dim=37, v_dim=53),
    Case(q_len=70, k_len=131, head_dim=72, v_dim=24),
    Case(q_len=100, k_len=300, head_dim=128, v_dim=128, runs=2),
    Case(q_len=60, k_len=200, head_dim=192, v_dim=128, mask="causal"),
    Case(q_len=35, k_len=67, head_dim=256, v_dim=256),
    Case(q_len=64, k_len=64, scale=-0.2),
    Case(q_len=64, k_len=64, scale=0.0),
    Case(q_len=50, k_len=500, kv_heads=1, threads=7, mask="full"),
    Case(q_len=30, k_len=0),
]


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    arrays = make(case)
    got, exact = arrays.run(), arrays.oracle()
    allowed, rounding = budget(case, exact), walk(case) + exponential(dtype)
    check(got, exact, {name: 3 * (allowed[name] + rounding) for name in exact})


REPEATED = [("float32",), ("bfloat16",)]
REPEATED += [
    ("float32", "dense of rows", "dropout"),
    ("float32", "table", "sinks"),
    ("float32", "alibi", "softcap"),
]


@pytest.mark.parametrize(("dtype", "options"), [(x, tuple(rest)) for x, *rest in REPEATED])
def test_same_bits_every_time_and_from_several_threads_at_once(dtype: str, options: tuple[str, ...]) -> None:
    case = Case(q_len=300, k_len=500, group=2, kv_heads=3, dtype=getattr(torch, dtype), options=options)
    arrays = make(case)
    first = arrays.run()
    with ThreadPoolExecutor(4) as pool:
        others = list(pool.map(lambda _: arrays.run(), range(8)))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("q_len", [150, 12, 3])
def test_a_non_finite_value_reaches_what_may_see_it_and_nothing_else(
    q_len: int, where: str, value: float
) -> None:
    arrays = make(Case(q_len=q_len, k_len=300, kv_heads=1, runs=2))
    clean = arrays.run()
    keys = torch.arange(300)
    spans = arrays.bounds[0, 0]
    sees = ((spans[..., 0, None] <= keys) & (keys < spans[..., 1, None])).any(1)
    by_row = where in ("q", "dout")
    # A row that sees keys, or a key that some rows see.
    at = int((sees.any(1) if by_row else sees.any(0) & ~sees.all(0)).nonzero()[-1])
    getattr(arrays, where)[0, 0, at, 3] = value
    got = arrays.run()
    touched = {
        name: (got[name] != clean[name]).flatten(3).any(-1)[0, 0] for name in ("out", "dq", "dk", "dv")
    }
    if by_row:
        query, key = torch.arange(q_len) == at, sees[at]
        assert query[at]
        assert key.any()
    else:
        query, key = sees[:, at], keys == at
        assert query.any()
        assert not query.all()
    bad = {name: ~got[name].isfinite().all(-1)[0, 0] for name in touched}
    assert not bad["out"][~query].any()
    if where in ("q", "v") or (where == "k" and value != value):  # a score of -inf is a probability of 0
        assert torch.equal(bad["out"], query)
    assert not bad["dq"][~query].any()
    seen_by_bad_rows = key if by_row else sees[query].any(0)
    assert not bad["dk"][~seen_by_bad_rows].any()
    assert not bad["dv"][~seen_by_bad_rows].any()
    assert bad["dq"].any() or bad["dv"].any()
    # The others keep their results, to rounding: another path computes them.
    for name, others in {
        "out": ~query,
        "dq": ~query,
        "dk": ~seen_by_bad_rows,
        "dv": ~seen_by_bad_rows,
    }.items():
        torch.testing.assert_close(got[name][0, 0][others], clean[name][0, 0][others], rtol=1e-4, atol=1e-5)


ILLEGAL = {
    "end beyond k_len": [[0, 65], [0, 0]],
    "negative start": [[-1, 5], [5, 6]],
    "end before start": [[9, 4], [9, 10]],
    "overlap": [[0, 5], [4, 8]],
    "unsorted": [[10, 12], [0, 5]],
    "huge": [[0, 2**31 - 1], [0, 0]],
}


@pytest.mark.parametrize("spans", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_bounds_raise_before_anything_is_written(spans: list[list[int]]) -> None:
    arrays = make(Case(q_len=40, runs=2))
    arrays.bounds[0, 1, 37] = torch.tensor(spans, dtype=torch.int32)
    out, lse = torch.full_like(arrays.q, 7.0), torch.full((1, 2, 40), 7.0)
    with pytest.raises(ValueError, match=r"row 37 \(batch 0, head 1\)"):
        cpu.forward(arrays.q, arrays.k, arrays.v, arrays.bounds, out, lse, scale=1.0, num_threads=2)
    assert (out == 7).all()
    assert (lse == 7).all()
    grads = [torch.full_like(x, 7.0) for x in (arrays.q, arrays.k, arrays.v)]
    given = (arrays.dout, None, arrays.q, arrays.k, arrays.v, out, lse, arrays.bounds)
    with pytest.raises(ValueError, match="within 0 <= lo <= hi <= k_len = 64"):
        cpu.backward(*given, *grads, scale=1.0, num_threads=2)
    assert all((x == 7).all() for x in grads)


def test_empty_spans_may_stand_anywhere() -> None:
    arrays = make(Case(q_len=40, runs=3))
    plain = arrays.bounds.clone()
    plain[..., 0, :], plain[..., 1, :], plain[..., 2, :] = torch.tensor(
        [[2, 9], [9, 20], [30, 31]], dtype=torch.int32
    )
    arrays.bounds = plain
    expected = arrays.run()
    holes = torch.tensor([[64, 64], [2, 20], [0, 0], [30, 31], [3, 3]], dtype=torch.int32)
    arrays.bounds = holes.expand(1, 2, 40, 5, 2)
    got = arrays.run()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])


MISFITS = {
    "k": (lambda a: a.k[..., :32], "k: expected shape"),
    "v": (lambda a: a.v.half(), "v: expected float32, got float16"),
    "q": (lambda a: a.q.transpose(2, 3), "q: expected a unit last stride"),
    "bounds": (lambda a: a.bounds.long(), "bounds: expected int32"),
    "out": (lambda a: a.q[:, :1], "out: expected shape"),
    "lse": (lambda a: a.dlse.half(), "lse: expected float32, got float16"),
}


@pytest.mark.compiled_module("its Python edge checks the arrays")
@pytest.mark.parametrize("name", MISFITS)
def test_arrays_that_do_not_fit_are_refused_by_name(name: str) -> None:
    arrays = make(Case())
    change, message = MISFITS[name]
    given = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "bounds": arrays.bounds}
    given |= {"out": torch.empty_like(arrays.q), "lse": torch.empty_like(arrays.dlse), name: change(arrays)}
    with pytest.raises(ValueError, match=message):
        cpu.forward(**given, scale=1.0, num_threads=1)


def test_numpy_arrays_are_taken_too() -> None:
    arrays = make(Case(q_len=20, k_len=30))
    expected = arrays.run()
    q, k, v, bounds = (x.numpy() for x in (arrays.q, arrays.k, arrays.v, arrays.bounds))
    out, lse = np.full(arrays.q.shape, np.nan, np.float32), np.full((1, 2, 20), np.nan, np.float32)
    cpu.forward(q, k, v, bounds, out, lse, scale=0.125, num_threads=1)
    np.testing.assert_array_equal(out, expected["out"].numpy())
    np.testing.assert_array_equal(lse, expected["lse"].numpy())


def test_float16_subnormals_are_values_like_any_other() -> None:
    arrays = make(Case(q_len=40, dtype=HALF, mask="causal"))
    arrays.v = (arrays.v.float() * 2e-6).half()  # below 6.1e-5, the smallest normal number
    assert (arrays.v != 0).any()
    got, exact = arrays.run(), arrays.oracle()
    # Half of the spacing of subnormals, 2^-24, is what the rounding of the output may take.
    assert (got["out"].double() - exact["out"]).abs().max() <= 2**-25 * 1.01
    assert error(got["dv"], exact["dv"]) < 1e-3


def test_the_callers_own_subnormals_are_left_alone() -> None:
    arrays = make(Case(threads=1))
    arrays.run()
    tiny = torch.full((64,), 1e-40)
    assert (tiny * 1.0 != 0).all()


def test_probabilities_far_below_the_maximum_vanish() -> None:
    arrays = make(Case(q_len=64, mask="causal", scale=20.0))
    got, exact = arrays.run(), arrays.oracle()
    for name in ("out", "lse", "dv"):
        assert error(got[name], exact[name]) < 1e-4, name


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25, 1e37])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_values_of_any_size_keep_their_precision(sign: float, size: float, dtype: torch.dtype) -> None:
    arrays = make(Case(q_len=40, k_len=70, mask="full", dtype=dtype))
    # Every score is near 27. Who leaves the maximum out must see that sums may leave the range of floats.
    direction = torch.ones(64)
    arrays.q = (sign * 1.8 * direction + 0.05 * arrays.q.float()).to(dtype)
    arrays.k = (1.8 * direction + 0.05 * arrays.k.float()).to(dtype)
    usual = error(arrays.run()["out"], arrays.oracle()["out"])
    arrays.v = (arrays.v.float() * size).clamp(-3e38, 3e38).to(dtype)
    arrays.dout = (arrays.dout.float() / max(size, 1.0)).to(dtype)
    got, exact = arrays.run(), arrays.oracle()
    assert error(got["out"], exact["out"]) < 2 * usual
    assert got["dq"].isfinite().all()
