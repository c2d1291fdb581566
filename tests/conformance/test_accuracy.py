"""Errors of the kernel against float64, next to those of other people's implementations on the same inputs.

At most 1.5 times the error of the best of them is allowed. Rounding the exact result to the dtype is the
least error that any implementation has; where one is luckier than that, it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from closeness import relative_error
from covering import cells
from samples.parts import Case
from samples.problems import DTYPES, Problem, make
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import attnspan
from attnspan import Spans, t5_buckets
from attnspan.call.options import Options
from attnspan.torch import attention

FACTOR = 1.5
BUCKETS = torch.from_numpy(t5_buckets(12, 40))
NAMES = ("out", "dq", "dk", "dv")

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")


@dataclass(frozen=True)
class Asked:
    """What is asked: a bool mask (B|1, H|1, Sq, Sk), and a bias with a value for each pair in float32."""

    mask: Tensor
    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None
    sinks: Tensor | None = None


Peer = Callable[[Tensor, Tensor, Tensor, Asked], Tensor]


def flash(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """ATen's flash kernel, which wants a dense mask and D == Dv (zero columns change nothing)."""
    dense = None if bool(asked.mask.all()) else asked.mask.expand(*q.shape[:2], -1, -1)
    v_dim, dim = v.shape[3], max(q.shape[3], v.shape[3])
    q, k, v = (pad(x, (0, dim - x.shape[3])) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=dense, scale=asked.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[..., :v_dim]


def sdpa(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """torch's own function with an additive mask of q's dtype, as it demands."""
    added = torch.where(asked.mask, asked.bias.to(q.dtype), -torch.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=added, scale=asked.scale)


def eager(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """The eager attention of transformers: Gemma 2's softcap, T5's position bias, gpt-oss's sinks."""
    weights = torch.matmul(q, k.transpose(2, 3)) * asked.scale
    if asked.softcap:
        weights = torch.tanh(weights / asked.softcap) * asked.softcap
    if asked.bias is not None:
        weights = weights + asked.bias.to(q.dtype)
    weights = weights + torch.where(asked.mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    if asked.sinks is None:
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    else:
        sinks = asked.sinks.to(q.dtype).reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        logits = torch.cat([weights, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(weights, v)


def flex(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """FlexAttention with the option as score_mod; sinks after the fact, as its users write them."""
    shape = (*q.shape[:3], k.shape[2])
    visible = asked.mask.expand(shape)
    bias = None if asked.bias is None else asked.bias.expand(shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        if asked.softcap:
            score = asked.softcap * torch.tanh(score / asked.softcap)
        if bias is not None:
            score = score + bias[b, h, i, j]
        return torch.where(visible[b, h, i, j], score, -torch.inf)

    # It has no backward pass on CPU.
    q, k, v = (x.detach() for x in (q, k, v))
    given = {"score_mod": score_mod, "scale": asked.scale}
    if asked.sinks is None:
        return flex_attention(q, k, v, **given)
    out, aux = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(aux.lse - asked.sinks[:, None])[..., None]).to(q.dtype)


def _asked(problem: Problem) -> Asked:
    """Biases from their parameters, by their definitions."""
    case, given = problem.case, problem.setting.parameters
    bias, distance = given.get("values"), torch.arange(case.k_len) - torch.arange(case.q_len)[:, None]
    if "slopes" in given:
        bias = -(given["slopes"][:, None, None] * distance.abs())[None]
    elif "table" in given:
        reach = len(BUCKETS) // 2
        bias = given["table"][:, BUCKETS[distance.clamp(-reach, reach) + reach].long()][None]
    mask, softcap = Spans(problem.bounds, case.k_len).dense(), (problem.options or Options()).softcap
    return Asked(mask, case.factor, softcap, None if bias is None else bias.float(), given.get("sinks"))


def _results(attend, inputs, dout, *given, **keywords):
    """The output and the gradients, where there are any."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, *given, **keywords)
    gradients = torch.autograd.grad(out, inputs, dout) if out.requires_grad else ()
    return [x.detach() for x in (out, *gradients)]


def _pooled(results: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat([x.flatten() for x in column]) for column in zip(*results, strict=True)]


def _assert_no_worse(cases: list[Case], peers: Sequence[Peer]) -> None:
    """Pool the errors of several problems: on a single small one, who rounds better is luck."""
    found: dict[str, list[list[Tensor]]] = {}
    for case in cases:
        problem = make(case)
        exact = replace(problem, dlse=torch.zeros_like(problem.dlse)).oracle()
        found.setdefault("exact", []).append([torch.from_numpy(exact[name]) for name in NAMES])
        call, given = problem.keywords(problem.setting.parameters), (problem.inputs.values(), problem.dout)
        found.setdefault("ours", []).append(_results(attention, *given, backend="cpu", **call))
        for peer in peers:
            found.setdefault(peer.__name__, []).append(_results(peer, *given, _asked(problem)))
    pooled = {name: _pooled(results) for name, results in found.items()}
    exact, ours = pooled.pop("exact"), pooled.pop("ours")
    for i, name in enumerate(NAMES):
        least = relative_error(exact[i].to(ours[i].dtype), exact[i])
        best = min(relative_error(x[i], exact[i]) for x in pooled.values() if i < len(x))
        # One that answers another question would make any error look small; large logits err more.
        steep = max(case.factor * case.head_dim**0.5 for case in cases)
        assert best < min(10 * max(least, 2**-21) * max(steep, 1.0), 0.1), name
        error, allowed = relative_error(ours[i], exact[i]), FACTOR * max(best, least)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


PLAIN = Case(batch=2, heads=4, mask_batch=1, mask_heads=1, stored="bshd", empty=False)
SHAPES = {
    "square": replace(PLAIN, q_len=96, k_len=96),
    "odd": replace(PLAIN, q_len=61, k_len=173, head_dim=40, v_dim=40, runs=2),
    "decode": replace(PLAIN, q_len=1, k_len=259, heads=8, kv_heads=1),
    "long queries": replace(PLAIN, q_len=150, k_len=33, head_dim=72, v_dim=72),
    "D8": replace(PLAIN, q_len=45, k_len=70, head_dim=8, v_dim=8, runs=4),
    "D128": replace(PLAIN, q_len=70, k_len=131, head_dim=128, v_dim=128, runs=3),
    "D256": replace(PLAIN, q_len=35, k_len=67, head_dim=256, v_dim=256, heads=2),
    "odd D": replace(PLAIN, q_len=37, k_len=53, head_dim=37, v_dim=37),
    "v_dim": replace(PLAIN, q_len=50, k_len=90, head_dim=48, v_dim=80),
    "gqa8": replace(PLAIN, q_len=40, k_len=60, head_dim=32, v_dim=32, heads=8, kv_heads=1),
    "mask per head": replace(
        PLAIN, q_len=40, k_len=60, head_dim=16, v_dim=16, mask_batch=2, mask_heads=4, runs=2
    ),
    "large logits": replace(PLAIN, q_len=64, k_len=80, scale=2500.0 / 8),
    "all of 64": replace(PLAIN, batch=1, mask="full"),
    "all of 257": replace(PLAIN, batch=1, mask="full", q_len=257, k_len=257),
}
PROBLEMS = {"decode": 24, "all of 64": 3, "all of 257": 3}
# The kernel has another way for few rows in each dtype, and where all is visible; one key that has all the
# weight shows how weights are rounded.
NAMED = [(shape, dtype) for shape in (*PROBLEMS, "large logits") for dtype in DTYPES]
CELLS = cells(SHAPES, DTYPES, strength=1, named=NAMED)


@pytest.mark.parametrize(("shape", "dtype"), CELLS)
def test_no_less_accurate_than_aten(shape: str, dtype: str) -> None:
    seeds = range(10, 10 + PROBLEMS.get(shape, 6))
    _assert_no_worse([replace(SHAPES[shape], dtype=DTYPES[dtype], seed=seed) for seed in seeds], [flash])


#: Those that have an option.
PEERS: dict[str, list[Peer]] = {
    "softcap": [eager, flex],
    "alibi": [sdpa, eager, flex],
    "T5": [sdpa, eager, flex],
    "dense": [sdpa, eager, flex],
    "sinks": [eager, flex],
}


@pytest.mark.slow
@pytest.mark.compiled_module("errors are those of this machine's kernel")
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", PEERS)
def test_no_less_accurate_than_the_best_other_implementation(option: str, dtype: str) -> None:
    case = Case((option,), "causal", DTYPES[dtype], 2, 4, 4, 96, 96, stored="bshd")
    _assert_no_worse([replace(case, seed=seed) for seed in (10, 20)], PEERS[option])


#: What is added to standard-normal numbers of one of the inputs; "constant": all of them are equal.
SHIFTS = {"randn + 1": 1.0, "randn + 3": 3.0, "constant": None}


@pytest.mark.compiled_module("errors are those of this machine's kernel")
@pytest.mark.covering(1)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("shifted", ["q", "k", "v", "dout", "v and dout"])
@pytest.mark.parametrize("length", [96, 512])
def test_no_less_accurate_than_aten_where_means_are_not_zero(
    length: int, shifted: str, shift: str, causal: bool
) -> None:
    """Long sums of numbers of one sign lose digits, and so do differences of large products."""
    errors: dict[str, list[Tensor]] = {"ours": [], "flash": []}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        given = {name: torch.randn(1, 2, length, 64, generator=generator) for name in ("q", "k", "v", "dout")}
        for name in given:
            if name in shifted.replace(",", "").split():
                mean = SHIFTS[shift]
                given[name] = torch.full_like(given[name], 1.2345) if mean is None else given[name] + mean
        *inputs, dout = given.values()

        def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask=attnspan.causal() if causal else None, backend="cpu")

        exact = _results(peer, [x.double() for x in inputs], dout.double())
        for name, attend in (("ours", ours), ("flash", peer)):
            pairs = zip(_results(attend, inputs, dout), exact, strict=True)
            errors[name].append(torch.stack([(x.double() - y).square().sum() for x, y in pairs]))
    ratios = (sum(errors["ours"]) / sum(errors["flash"])).sqrt()
    assert (ratios <= FACTOR).all(), dict(zip(NAMES, ratios.tolist(), strict=True))
