"""The compiled kernel at one instruction-set level (test_levels.py runs this file at all the others)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import relative_error
from kernel_run import check_run, forward, run
from samples.problems import Case, Problem, compare, make
from torch import Tensor

from attnspan.call.options import Options
from attnspan.kernels import cpu

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16

# Sizes around the kernel's own: strips of 24 and 32 rows, blocks of 96, 128, 192 and 256, panels of 16.
CASES = [
    Case(q_len=1, k_len=300),
    Case(q_len=7, k_len=513, heads=8, runs=2),
    Case(q_len=8, k_len=257, mask="causal"),
    Case(q_len=97, k_len=255, runs=3),
    Case(q_len=193, k_len=193, mask="causal"),
    Case(q_len=400, k_len=400, mask="documents of 50", heads=4),
    Case(q_len=385, k_len=577, mask="full", heads=1, kv_heads=1),
    Case(q_len=130, k_len=20, mask="causal"),
    Case(batch=2, q_len=65, k_len=129, heads=8, kv_heads=1, head_dim=32, v_dim=32),
    Case(q_len=33, k_len=70, head_dim=1, v_dim=1),
    Case(q_len=40, k_len=70, head_dim=8, v_dim=8, runs=4),
    Case(q_len=50, k_len=90, head_dim=37, v_dim=53),
    Case(q_len=70, k_len=131, head_dim=72, v_dim=24),
    Case(q_len=100, k_len=300, head_dim=128, v_dim=128, runs=2),
    Case(q_len=60, k_len=200, head_dim=192, v_dim=128, mask="causal"),
    Case(q_len=35, k_len=67, head_dim=256, v_dim=256),
    Case(q_len=3, k_len=300, head_dim=512, v_dim=512, heads=1, kv_heads=1),
    Case(q_len=70, k_len=131, head_dim=576, v_dim=512, mask="causal"),
    Case(q_len=64, k_len=64, scale=-0.2),
    Case(q_len=64, k_len=64, scale=0.0),
    Case(q_len=50, k_len=500, heads=1, kv_heads=1, mask="full"),
    Case(q_len=30, k_len=0),
]

SMALL = Case(batch=2, heads=2, kv_heads=1, q_len=70, k_len=150, head_dim=24, v_dim=40, runs=2, scale=0.125)


#: Options, and what else than SMALL. tests/conformance has each option with each dtype.
WITH_OPTIONS = [
    (("strong softcap", "sinks"), {"scale": -0.2}),
    (("alibi",), {"mask": "causal", "q_len": 150}),
    (("alibi, per batch row", "softcap", "queries given"), {}),
    (("alibi, signed", "keys given"), {}),
    (("distance table", "sinks", "shifted queries given"), {"mask": "full"}),
    (("long distance table",), {"mask": "causal", "q_len": 150}),
    (("distance table", "queries given", "keys given"), {}),
    (("one distance", "sinks"), {}),
    (("dense, per head", "softcap"), {"heads": 4, "kv_heads": 2}),
    (("dense, all heads",), {"heads": 3, "kv_heads": 3}),
    (("dense, one for all, float32", "dropout"), {"heads": 4, "kv_heads": 2}),
    (("dense, per key and head, float32", "sinks"), {}),
    (("dense with holes", "sinks", "dropout by seeds"), {}),
    (("dense with deep rows",), {"mask": "full"}),
    (("dense with deep rows", "dropout"), {"mask": "full", "q_len": 6}),
    (("dropout", "softcap", "sinks", "alibi", "queries given", "keys given"), {}),
    (("softcap", "distance table", "dropout", "sinks"), {"q_len": 5, "heads": 1}),
    (("softcap", "dense, float32", "dropout", "sinks"), {"q_len": 9, "heads": 4}),
    (("alibi", "dropout by seeds"), {"q_len": 1, "k_len": 700, "mask": "full"}),
    (("softcap", "alibi", "dropout"), {"q_len": 150, "k_len": 300, "mask": "documents of 50"}),
    (("dense, float32", "dropout"), {"q_len": 110, "k_len": 200, "batch": 1, "head_dim": 192, "v_dim": 128}),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    check_run(case, run(make(case), threads=7 if case.q_len == 50 else 2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize(("options", "sizes"), WITH_OPTIONS, ids=str)
def test_options_against_the_oracle(options: tuple[str, ...], sizes: dict, dtype: torch.dtype) -> None:
    case = replace(SMALL, options=options, dtype=dtype, **sizes)
    check_run(case, run(make(case)))


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("options", [(), ("dense", "dropout"), ("distance table", "sinks")], ids=str)
def test_same_bits_every_time_and_from_several_threads_at_once(
    dtype: torch.dtype, options: tuple[str, ...]
) -> None:
    problem = make(Case(q_len=200, k_len=300, heads=6, kv_heads=3, dtype=dtype, options=options))
    first = run(problem)
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(lambda _: run(problem), range(6)):
            assert all(torch.equal(first[name], other[name]) for name in first)


def _seen(bounds: Tensor, keys: Tensor) -> Tensor:
    """Which rows of the first head see which keys."""
    spans = bounds[0, 0]
    return ((spans[..., 0, None] <= keys) & (keys < spans[..., 1, None])).any(1)


NON_FINITE = [
    ((), q_len, where, value)
    for q_len in (150, 12, 3)
    for where in ("q", "k", "v", "dout")
    for value in (torch.nan, torch.inf)
]
NON_FINITE += [(("softcap", "alibi", "sinks", "dropout"), q_len, "k", torch.nan) for q_len in (150, 5)]


@pytest.mark.parametrize(("options", "q_len", "where", "value"), NON_FINITE, ids=str)
def test_a_non_finite_value_reaches_what_may_see_it_and_nothing_else(
    options: tuple[str, ...], q_len: int, where: str, value: float
) -> None:
    problem = make(Case(q_len=q_len, k_len=300, heads=1, kv_heads=1, runs=2, options=options))
    clean = run(problem)
    sees = _seen(problem.bounds, torch.arange(300))
    by_row = where in ("q", "dout")
    # A row that sees keys, or a key that some rows see.
    at = int((sees.any(1) if by_row else sees.any(0) & ~sees.all(0)).nonzero()[-1])
    getattr(problem, where)[0, 0, at, 3] = value
    got = run(problem)
    query, key = (torch.arange(q_len) == at, sees[at]) if by_row else (sees[:, at], torch.arange(300) == at)
    assert key.any() if by_row else query.any() and not query.all()
    bad = {name: ~got[name].isfinite().all(-1)[0, 0] for name in ("out", "dq", "dk", "dv")}
    seen_by_bad_rows = key if by_row else sees[query].any(0)
    touched = {"out": query, "dq": query, "dk": seen_by_bad_rows, "dv": seen_by_bad_rows}
    for name, hit in touched.items():
        assert not bad[name][~hit].any(), name
        # The others keep their results, to rounding: another path computes them.
        torch.testing.assert_close(got[name][0, 0][~hit], clean[name][0, 0][~hit], rtol=1e-4, atol=1e-5)
    if where in ("q", "v") or (where == "k" and value != value):  # a score of -inf is a probability of 0
        assert torch.equal(bad["out"], query)
    if where == "k" and value != value:
        assert torch.equal(bad["dq"], query)
    assert bad["dq"].any() or bad["dv"].any()


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
    problem = make(Case(q_len=40, runs=2))
    problem.bounds[0, 1, 37] = torch.tensor(spans, dtype=torch.int32)
    inputs = tuple(problem.inputs.values())
    out, lse = torch.full_like(problem.q, 7.0), torch.full((1, 2, 40), 7.0)
    with pytest.raises(ValueError, match=r"query 37 \(batch 0, head 1\)"):
        cpu.forward(*inputs, problem.bounds, out, lse, scale=1.0, num_threads=2)
    grads = [torch.full_like(x, 7.0) for x in inputs]
    given = (problem.dout, None, *inputs, out, lse, problem.bounds)
    with pytest.raises(ValueError, match="within 0 <= lo <= hi <= k_len = 64"):
        cpu.backward(*given, *grads, scale=1.0, num_threads=2)
    assert all((x == 7).all() for x in (out, lse, *grads))


def test_empty_spans_may_stand_anywhere() -> None:
    problem = make(Case(q_len=40))
    results = []
    for spans in ([[2, 9], [9, 20], [30, 31]], [[64, 64], [2, 20], [0, 0], [30, 31], [3, 3]]):
        bounds = torch.tensor(spans, dtype=torch.int32).expand(1, 2, 40, len(spans), 2)
        results.append(run(replace(problem, bounds=bounds)))
    torch.testing.assert_close(*results)


#: What `forward` gives the kernel, of a problem that it refuses.
UNFIT: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "k: expected shape": lambda p: {"k": p.k[..., :8]},
    "v: expected float32, got float16": lambda p: {"v": p.v.half()},
    "q: expected a unit last stride": lambda p: {"q": p.q.mT.contiguous().mT},
    "bounds: expected int32": lambda p: {"bounds": p.bounds.long()},
}
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
UNFIT |= {message: lambda _, given=given: {"options": Options(**given)} for message, given in BAD.items()}


@pytest.mark.compiled_module("its Python edge checks the arrays")
@pytest.mark.parametrize("message", UNFIT)
def test_arrays_that_do_not_fit_are_refused_by_name(message: str) -> None:
    problem = make(SMALL)
    with pytest.raises(ValueError, match=message):
        forward(replace(problem, **UNFIT[message](problem)))


@pytest.mark.compiled_module("its Python edge checks the arrays")
def test_results_that_do_not_fit_are_refused_by_name() -> None:
    problem = make(Case())
    for out, lse, message in (
        (problem.q[:, :1], problem.dlse, "out: expected shape"),
        (problem.q, problem.dlse.half(), "lse: expected float32, got float16"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.forward(*problem.inputs.values(), problem.bounds, out, lse, scale=1.0, num_threads=1)


def test_subnormals_are_values_like_any_other_and_the_callers_own_are_left_alone() -> None:
    problem = make(Case(q_len=40, dtype=HALF, mask="causal"))
    problem.v = (problem.v.float() * 2e-6).half()  # below 6.1e-5, the smallest normal number
    assert (problem.v != 0).any()
    got, exact = run(problem), problem.oracle()
    # Half of the spacing of subnormals, 2^-24, is what the rounding of the output may take.
    assert abs(got["out"].double().numpy() - exact["out"]).max() <= 2**-25 * 1.01
    compare({"dv": got["dv"]}, exact, {"dv": 1e-3})
    assert (torch.full((64,), 1e-40) * 1.0 != 0).all()


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25, 1e37])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_values_of_any_size_keep_their_precision(sign: float, size: float, dtype: torch.dtype) -> None:
    problem = make(Case(q_len=40, k_len=70, mask="full", dtype=dtype))
    # Every score is near 27. Who leaves the maximum out must see that sums may leave the range of floats.
    direction = torch.ones(64)
    problem.q = (sign * 1.8 * direction + 0.05 * problem.q.float()).to(dtype)
    problem.k = (1.8 * direction + 0.05 * problem.k.float()).to(dtype)
    usual = relative_error(forward(problem)[0], torch.from_numpy(problem.oracle()["out"]))
    problem.v = (problem.v.float() * size).clamp(-3e38, 3e38).to(dtype)
    problem.dout = (problem.dout.float() / max(size, 1.0)).to(dtype)
    got = run(problem)
    compare({"out": got["out"]}, problem.oracle(), {"out": 2 * usual})
    assert got["dq"].isfinite().all()


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("q_len", [150, 5])
def test_a_bias_of_hidden_keys_is_not_seen(q_len: int, dtype: torch.dtype) -> None:
    case = Case(q_len=q_len, k_len=q_len, heads=1, kv_heads=1, mask="causal", dtype=dtype)
    problem = make(replace(case, options=("dense, float32",)))
    clean = run(problem)
    for value in (torch.nan, torch.inf):
        problem.options.bias[:, :, torch.ones(q_len, q_len, dtype=torch.bool).triu(1)] = value
        got = run(problem)
        assert all(torch.equal(clean[name], got[name]) for name in clean)
    sloped = make(Case(q_len=70, k_len=90, options=("alibi",)))
    sloped.options.bias[:] = torch.nan
    nothing = (sloped.bounds[..., 0] == sloped.bounds[..., 1]).all(-1)
    out, _ = forward(sloped)
    assert (out[nothing] == 0).all()
    assert out[~nothing].isnan().all()


@pytest.mark.parametrize("cap", [1e10, 1e30, 3e38])
def test_a_cap_far_above_all_scores_changes_none(cap: float) -> None:
    problem = make(replace(SMALL, options=("sinks",)))
    capped = replace(problem, options=problem.options._replace(softcap=cap))
    torch.testing.assert_close(run(capped), run(problem))


LONE = {"plain": (), "sinks": ("sinks",), "dropout": ("dropout",), "dense": ("dense, float32",)}


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("options", LONE.values(), ids=LONE)
@pytest.mark.parametrize("q_len", [3, 12, 70])
@pytest.mark.parametrize("hidden", [1.0, torch.nan], ids=["", "next to nan"])
def test_a_lone_key_has_a_weight_of_1(
    hidden: float, q_len: int, options: tuple[str, ...], dtype: torch.dtype
) -> None:
    # Rows see one key, two of which one has all weight, or many of which one has.
    problem = make(Case(q_len=q_len, k_len=90, scale=-1e4, mask="full", options=options, dtype=dtype))
    bounds = problem.bounds.clone()
    bounds[:, :, ::3, 0] = torch.tensor([40, 41], dtype=torch.int32)
    bounds[:, :, 1::3, 0] = torch.tensor([17, 82], dtype=torch.int32)
    bounds[:, :, 2::3, 0] = torch.tensor([17, 19], dtype=torch.int32)
    problem.bounds = bounds
    if problem.options is not None and problem.options.sinks is not None:
        problem.options.sinks[:] = -1e6
    problem.v[:, :, 89] = hidden
    scores = problem.q.double() @ problem.k.double().transpose(2, 3) * -1e4
    if options == LONE["dense"]:
        scores = scores + problem.options.bias.double()
    keys = torch.arange(90)
    scores = scores.masked_fill((keys < bounds[..., :1, 0]) | (keys >= bounds[..., :1, 1]), -torch.inf)
    top = scores.topk(2, -1)
    lone = top.values[..., 0] - top.values[..., 1] > 200
    assert lone.double().mean() > 0.9
    value = problem.v.gather(2, top.indices[..., :1].expand(*scores.shape[:3], problem.v.shape[3]))
    out = forward(problem)[0]
    if options == LONE["dropout"]:
        kept = out.ne(0).any(-1, keepdim=True)
        assert not kept.all()
        rate = round(problem.options.dropout_p * 65536)
        value = (value.float() * (65536 / (65536 - rate)) * kept).to(dtype)
    assert torch.equal(out[lone], value[lone])


SMALL_NUMBERS = {
    "v": {"v": -112},
    "smaller v": {"v": -118},
    "k": {"q": 120, "k": -120},
    "q": {"q": -120, "k": 120},
    "dout": {"dout": -118},
}


@pytest.mark.parametrize("powers", SMALL_NUMBERS.values(), ids=SMALL_NUMBERS)
@pytest.mark.parametrize(("q_len", "k_len"), [(3, 1100), (70, 90), (250, 1000)])
def test_small_normal_numbers_keep_their_precision(q_len: int, k_len: int, powers: dict[str, int]) -> None:
    problem = make(Case(q_len=q_len, k_len=k_len, heads=2, kv_heads=1, mask="full"))
    problem.dlse[:] = 0
    usual = run(problem)
    for name, power in powers.items():
        getattr(problem, name).mul_(2.0**power)
    got = run(problem)
    of = {"out": {"v"}, "dv": {"dout"}, "dq": {"k", "v", "dout"}, "dk": {"q", "v", "dout"}}
    for name, factors in of.items():
        power = sum(powers.get(factor, 0) for factor in factors)
        assert relative_error(got[name].double() * 2.0**-power, usual[name].double()) < 1e-6, name


BRIEF = [(FLOAT, 8, 8, 1, 64, 1), (BF16, 8, 8, 1, 100, 1), (FLOAT, 4, 1, 1, 60, 1), (FLOAT, 1, 1, 16, 16, 1)]
BRIEF += [
    (FLOAT, 8, 8, 1, 1024, 2),
    (BF16, 8, 8, 1, 130, 2),
    (FLOAT, 8, 8, 16, 16, 2),
    (FLOAT, 2, 2, 40, 40, 2),
]


@pytest.mark.compiled_module("counts its threads")
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "q_len", "k_len", "threads"), BRIEF)
def test_a_call_that_is_over_before_others_wake_up_has_one_thread(
    dtype: torch.dtype, heads: int, kv_heads: int, q_len: int, k_len: int, threads: int
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len}
    problem = make(Case(mask="full", dtype=dtype, **sizes))
    for asked, used in ((2, threads), (1, 1)):
        before = cpu.counters()["forward"]["threads"]
        forward(problem, threads=asked)
        assert cpu.counters()["forward"]["threads"] - before == used


@pytest.mark.parametrize("q_len", [5, 70])
@pytest.mark.parametrize("dim", [33, 64, 80, 128])
def test_a_row_that_sees_one_key_has_no_gradient_of_its_score(dim: int, q_len: int) -> None:
    """Its dP and its delta are one product, bit for bit, wherever the sums are cut."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, n, dim) for n in (q_len, 50, 50, q_len))
    key = torch.randint(50, (q_len,), dtype=torch.int32)
    bounds = torch.stack([key, key + 1], -1)[None, None, :, None]
    out, lse, grads = torch.empty_like(q), torch.empty(1, 1, q_len), [torch.ones_like(x) for x in (q, k, v)]
    v, dout = v + 1, dout + 1
    cpu.forward(q, k, v, bounds, out, lse, scale=0.1, num_threads=1)
    cpu.backward(dout, None, q, k, v, out, lse, bounds, *grads, scale=0.1, num_threads=1)
    assert out.equal(v[:, :, key.long()])
    assert not grads[0].any()
    assert not grads[1].any()
    assert grads[2].any()
