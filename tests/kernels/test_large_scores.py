"""Scores and biases so large that floats lose what tells keys apart (test_levels.py runs every level).

Every result, forward and backward, is compared with the float64 oracle.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closeness import error
from kernel_run import forward, run
from samples.problems import DTYPES, Case, Problem, compare, make, oracle, rounding
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.kernels import cpu

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
HEADS = 2
SMALL = Case(heads=HEADS, kv_heads=1, q_len=70, k_len=150, head_dim=24, v_dim=40, runs=2, scale=0.125)
Q_LENS = {"tiles": 70, "few rows": 12, "rows": 3}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _with(case: Case, kind: str, depth: float, **more: Any) -> Problem:
    """Under a bias of about ``depth``, which slopes give to the nearest of keys that are far from queries."""
    given: dict[str, Any] = {}
    far, slopes = torch.arange(10_000, 10_150)[None].int(), torch.full((1, HEADS), depth / 10_000)
    if kind == "table":
        given = {"bias": _normal(HEADS, 81) + depth, "bias_kind": DISTANCE}
    elif kind == "dense":
        given = {"bias": _normal(1, HEADS, case.q_len, case.k_len) + depth, "bias_kind": DENSE}
    elif kind == "slopes":
        given = {"bias": -slopes, "bias_kind": ALIBI, "q_index": far[:, : case.q_len]}
    elif kind == "signed slopes":
        given = {"bias": slopes, "bias_kind": SIGNED_ALIBI, "k_index": far[:, : case.k_len]}
    return replace(make(case), options=Options(**given, **more))


BIASES = ["table", "slopes", "signed slopes", "dense"]


def _check(problem: Problem, slack: float = 1.0) -> None:
    """Results are as good as those of ordinary scores."""
    case, got, exact, (_, allowed) = problem.case, run(problem), problem.oracle(), oracle(problem.case)
    sizes = abs(exact["lse"])
    # Backward takes weights from a float of an lse up to 1,024 as it is.
    rounded, inherent = (
        2**-24 * sizes[sizes <= 1024].max(initial=0.0),
        rounding(case, 2e-6 if case.dtype == HALF else None),
    )
    bounds = {}
    for name, x in got.items():
        luck, of_lse = 3 if x.numel() > 10 else 10, 0.0 if name in ("out", "lse") else rounded
        bounds[name] = slack * luck * (allowed.get(name, allowed["dq"]) + inherent + of_lse)
    compare(got, exact, bounds)


def _within(problem: Problem, names: str, bound: float) -> None:
    got = run(problem)
    compare({name: got[name] for name in names.split()}, problem.oracle(), dict.fromkeys(got, bound))


def _weights_sum_to_1(problem: Problem, rtol: float) -> Tensor:
    """Returns the lse."""
    problem.dout[:], problem.dlse[:] = 1.0, 0.0
    got = run(problem)
    sums = got["dv"].sum(2)
    rows = torch.full_like(sums, problem.case.q_len * problem.case.heads)
    torch.testing.assert_close(sums, rows, rtol=rtol, atol=0)
    return got["lse"]


@pytest.mark.parametrize(
    ("depth", "dtype"),
    [*((depth, FLOAT) for depth in (-1e3, -1e6, -1e9, 1e6)), (-1e6, BF16), (-1e6, HALF)],
    ids=str,
)
@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("bias", BIASES)
def test_large_biases_change_nothing_but_the_lse(bias, rows, depth, dtype):
    case = replace(SMALL, q_len=Q_LENS[rows], dtype=dtype)
    _check(_with(case, bias, depth), slack=2)


@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("bias", ["table", "slopes", "dense"])
def test_sinks_and_options_next_to_large_biases(bias: str, rows: str) -> None:
    case = replace(SMALL, q_len=Q_LENS[rows])
    # A sink of the size of the largest biases, and one far above them all.
    largest = -1e6 * (10_000 + case.q_len - case.k_len) / 10_000 if bias == "slopes" else -1e6
    more = {"softcap": 3.0, "dropout_p": 0.3, "dropout_seed": torch.tensor(3)}
    _check(_with(case, bias, -1e6, sinks=torch.tensor([largest + 1, 0.5]), **more), slack=4)


@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("size", [300.0, 1e6, "table", "dense", "signed slopes"])
def test_weights_sum_to_1_however_large_scores_are(rows: str, size: float | str) -> None:
    case = replace(SMALL, q_len=Q_LENS[rows], mask="full", runs=1, v_dim=16)
    if isinstance(size, str):  # A bias cancels large scores.
        problem = _with(replace(case, scale=1.0), size, 1e7)
        problem.q[..., 0], problem.k[..., 0] = 1.0, -1e7
        lse = _weights_sum_to_1(problem, rtol=1e-5)
        assert size == "signed slopes" or lse.abs().max() < 200
        return
    problem = make(replace(case, scale=size))
    # Several keys alike share a row's weight.
    problem.k[:, :, 75:] = problem.k[:, :, :75]
    _weights_sum_to_1(problem, rtol=2e-4)


def _huge(case: Case, largest: float) -> Problem:
    """The largest score in magnitude is about ``largest``."""
    problem = make(case)
    scores = problem.q.double() @ problem.k.double().repeat_interleave(HEADS, 1).mT
    return replace(problem, case=replace(case, scale=largest / float(scores.abs().max())))


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("largest", [3e9, 1e20, 2e38, 3.3e38, -3.3e38])
def test_scores_up_to_the_end_of_floats(largest: float, rows: str, dtype: torch.dtype) -> None:
    case = replace(SMALL, q_len=Q_LENS[rows], dtype=dtype)
    problem, eps = _huge(case, largest), torch.finfo(dtype).eps
    _within(problem, "out lse dv", 4 * eps)
    if dtype == FLOAT and abs(largest) <= 1e20:
        # One key has all weight, so that dS is dlse, of rms 1, beside two products of n = v_dim terms that
        # cancel. Each of their 2 n additions rounds a sum of rms sqrt(n / 2) by eps / sqrt(12) of it: a walk
        # of eps n / sqrt(12).
        _within(problem, "dq dk", eps * case.v_dim / 12**0.5)


OPTIONS = [("softcap", "sinks"), ("alibi", "dropout"), ("dense, float32", "sinks")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", Q_LENS)
def test_options_next_to_huge_scores(options: tuple[str, ...], rows: str) -> None:
    _within(_huge(replace(SMALL, q_len=Q_LENS[rows], options=options), 1e30), "out lse dv", 1e-6)


@pytest.mark.parametrize("rows", Q_LENS)
def test_a_row_with_a_score_above_floats_is_nan_as_in_framework_code(rows: str) -> None:
    case = replace(SMALL, q_len=Q_LENS[rows], mask="full", runs=1)
    problem = _huge(case, 2e39)
    out, _ = forward(problem)
    scores = (problem.q @ problem.k.repeat_interleave(HEADS, 1).mT) * problem.case.factor
    assert scores.isinf().any()
    assert torch.equal(out.isnan().all(-1), (scores == torch.inf).any(-1))
    assert torch.equal(out.isnan().any(-1), (scores == torch.inf).any(-1))


def _part(problem: Problem, first: int, last: int) -> Problem:
    """The problem on some of its keys."""
    case, options, keys = problem.case, problem.options, slice(first, last)
    bounds = (problem.bounds - first).clamp(0, last - first)
    if options.bias_kind == DENSE:
        options = options._replace(bias=options.bias[..., keys].contiguous())
    else:
        index = torch.arange(case.k_len) if options.k_index is None else options.k_index[0]
        q_index = torch.arange(case.k_len - case.q_len, case.k_len)[None].int()
        q_index = q_index if options.q_index is None else options.q_index
        options = options._replace(k_index=index[None, keys].int().contiguous(), q_index=q_index)
    case, k, v = replace(case, k_len=last - first), problem.k[:, :, keys], problem.v[:, :, keys]
    return replace(problem, case=case, k=k, v=v, bounds=bounds, options=options)


@pytest.mark.compiled_module("the runner has one softmax for each call")
@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("depth", [0.0, -1e3, -1e6, -1e9])
@pytest.mark.parametrize("bias", BIASES)
def test_parts_of_a_softmax_merge_by_a_wide_lse(bias: str, depth: float, rows: str) -> None:
    case = replace(SMALL, q_len=Q_LENS[rows])
    whole = _with(case, bias, depth)
    parts, found = [_part(whole, 0, 60), _part(whole, 60, 150)], []
    for part in parts:
        out, lse = torch.full_like(whole.dout, torch.nan), torch.full(whole.dlse.shape, torch.nan).double()
        call = {"scale": 0.125, "num_threads": 2, "options": part.options}
        cpu.forward(*part.inputs.values(), part.bounds, out, lse, **call)
        found.append((out, lse))
    lse = torch.logaddexp(found[0][1], found[1][1])
    weights = [torch.where(each == -torch.inf, 0.0, (each - lse).exp()) for _, each in found]
    out = sum(out * weight[..., None] for (out, _), weight in zip(found, weights, strict=True)).float()
    grads = []
    for part in parts:
        grad = [torch.full_like(x, torch.nan) for x in part.inputs.values()]
        given = (part.dout, part.dlse, *part.inputs.values(), out, lse, part.bounds)
        cpu.backward(*given, *grad, scale=0.125, num_threads=2, options=part.options, part=True)
        grads.append(grad)
    (dq, *first), (other, *second) = grads
    dk, dv = (torch.cat(pair, 2) for pair in zip(first, second, strict=True))
    got = {"out": out, "lse": lse, "dq": dq + other, "dk": dk, "dv": dv}
    compare(got, whole.oracle(), {**dict.fromkeys(got, 3e-6), "out": 1e-6, "lse": 1e-7})


@pytest.mark.parametrize("rows", Q_LENS)
def test_scores_far_below_zero_weigh_as_much_as_others(rows: str) -> None:
    """Equal scores of -8 million: what is hidden gets no weight next to them."""
    problem = make(replace(SMALL, heads=1, q_len=Q_LENS[rows], head_dim=64, mask="causal"))
    problem.q[:], problem.k[:] = 1000.0, -1000.0
    compare({"out": forward(problem)[0]}, problem.oracle(), {"out": 1e-5})


@pytest.mark.parametrize("bias", ["", "table", "dense", "slopes", "a few large entries"])
@pytest.mark.parametrize("large", [1, 35])
def test_rows_with_large_scores_stand_next_to_ordinary_ones(large: int, bias: str) -> None:
    dropped = {"dropout_p": 0.3, "dropout_seed": torch.tensor(3)}
    problem = _with(SMALL, bias, 0.0, softcap=1e5, sinks=torch.tensor([1.0, 1500.0]), **dropped)
    if bias:
        problem = _with(SMALL, bias.replace("a few large entries", "table"), 0.0)
    if bias == "slopes":
        problem.options = Options(bias=torch.tensor([[0.1, 2.0]]), bias_kind=ALIBI)
    if "few" in bias:
        problem.options.bias[:, 30:34] += 1e6
        problem.options.bias[:, 60:70] -= 1e6
    problem.q[:, :, 1 : 1 + large] *= 3000.0
    assert (problem.oracle()["lse"][:, :, 1 : 1 + large] > 1024).any()
    _within(problem, " ".join(run(problem)), 1e-5)


def _with_key_bias(problem: Problem, size: float) -> None:
    """Two dims have a large mean, as in Qwen2: all scores are about ``size``."""
    problem.q[..., :2] += 30.0
    problem.k[..., :2] += size / 60.0 / problem.case.factor


def _far_apart(problem: Problem, size: float) -> None:
    """The largest scores are about ``size``."""
    for x in (problem.q, problem.k):
        x *= (size / 3) ** 0.5


def _by_flash(problem: Problem) -> dict[str, Tensor]:
    """Of ATen's flash kernel, with all keys."""
    inputs = [x.clone().requires_grad_() for x in problem.inputs.values()]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(*inputs, enable_gqa=problem.case.heads > problem.case.kv_heads)
    found = [out.detach(), *torch.autograd.grad(out, inputs, problem.dout)]
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


EVERY = Case(heads=4, kv_heads=4, q_len=192, k_len=192, mask="full", empty=False)
SHAPES = {"D64": EVERY, "D128, grouped": replace(EVERY, head_dim=128, v_dim=128, kv_heads=1)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [300.0, 1500.0, 1e4])
@pytest.mark.parametrize("kind", [_with_key_bias, _far_apart])
def test_errors_at_large_scores_are_at_most_those_of_atens_flash_kernel(
    kind: Callable[[Problem, float], None], size: float, shape: str, dtype: str
) -> None:
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(4):
        problem = make(replace(SHAPES[shape], dtype=DTYPES[dtype], seed=seed))
        problem.dlse[:] = 0.0
        kind(problem, size)
        for who, results in (
            ("exact", problem.oracle()), ("ours", run(problem)), ("flash", _by_flash(problem)),
        ):  # fmt: skip
            for name in ("out", "dq", "dk", "dv"):
                found.setdefault(f"{who} {name}", []).append(
                    np.asarray(torch.as_tensor(results[name]).double())
                )
    for name in ("out", "dq", "dk", "dv"):
        exact, ours, flash = (np.stack(found[f"{who} {name}"]) for who in ("exact", "ours", "flash"))
        assert error(ours, exact) <= 1.5 * error(flash, exact), name


@pytest.mark.parametrize("rows", Q_LENS)
@pytest.mark.parametrize("gap", [17.4, 20.0, 33.3, 50.0, 87.1])
def test_rows_of_one_key_have_its_value_where_atens_flash_kernel_has(gap: float, rows: str) -> None:
    problem = make(replace(EVERY, q_len=Q_LENS[rows], k_len=64))
    # Row i has the score `gap` with key i, 0 with the next one, and -300 with others.
    key = torch.arange(64)
    scores = torch.full((64, 64), -300.0).index_put((key, key), torch.tensor(gap))
    scores[key, (key + 1) % 64] = 0.0
    of_row = torch.arange(Q_LENS[rows]) % 64
    problem.q[:], problem.k[:] = scores[of_row] / problem.case.factor, torch.eye(64)
    value, out, flash = problem.v[:, :, of_row], forward(problem)[0], _by_flash(problem)["out"]
    exact = flash == value
    assert exact.float().mean() > 0.5
    assert torch.equal(out[exact], value[exact])


def _seconds(problem: Problem) -> float:
    """Of both directions on one thread, whatever else runs."""
    times = []
    for _ in range(4):
        start = time.thread_time()
        run(problem, threads=1)
        times.append(time.thread_time() - start)
    return min(times)


# Options, the factor of all or of one row, and the queries and keys.
UNUSUAL = {
    "large scores": ("", 900, slice(None), (384, 384)),
    "one row of large scores, slopes": ("slopes", 900, slice(-1, None), (384, 384)),
    "a table beside large scores": ("table", 60, slice(None), (384, 384)),
    "decoding with large scores": ("slopes", 60, slice(None), (1, 4096)),
    "steep slopes": ("steep", 1, slice(None), (384, 384)),
    "NaN": ("NaN", 1, slice(None), (384, 384)),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_numbers_do_not_stop_a_call(what: str) -> None:
    kind, factor, rows, (q_len, k_len) = UNUSUAL[what]
    problems = []
    for usual in (True, False):
        problem = make(Case(kv_heads=1, q_len=q_len, k_len=k_len, mask="causal"))
        if kind in ("slopes", "steep"):
            slope = -1.5 if kind == "steep" and not usual else 0.1
            problem.options = Options(bias=torch.full((1, HEADS), slope), bias_kind=SIGNED_ALIBI)
        elif kind == "table":
            problem.options = Options(bias=_normal(HEADS, 65), bias_kind=DISTANCE)
        elif kind == "NaN":  # It leaves the tiles in both calls.
            problem.v[0, 0, 0, 0], problem.k[0, 0, 3, 0] = torch.inf, 1.0 if usual else torch.nan
        problem.q[:, :, rows] *= 1 if usual else factor
        problems.append(problem)
    usual, unusual = map(_seconds, problems)
    assert unusual <= 3 * usual + 4e-4
