"""Score functions of attention-gym and of FlexAttention's documents, compared with their originals.

Their masks are in samples/library.py.

Each original is written anew as it stands there, in the signature of FlexAttention. It is applied twice: by
FlexAttention itself, forward, and by a plain softmax that autograd differentiates. Everything is float64.
"""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnspan as a
from attnspan.torch import attention

# FlexAttention is the judge here, not what is measured.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, H, S, D = 2, 4, 24, 8


def everything(b, h, i, j):
    return j >= 0


def causal(b, h, i, j):
    return i >= j


def unchanged(x, b, h, i, j):
    return x


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _inputs(rows: int = S, keys: int = S, kv_heads: int = H, seed: int = 1) -> list[Tensor]:
    shapes = ((B, H, rows, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D))
    return [_normal(*shape, seed=seed + n).requires_grad_() for n, shape in enumerate(shapes)]


def plain(q, k, v, score_mod=unchanged, mask_mod=everything):
    """Softmax attention with every score written out: output and log-sum-exp."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    b, h, i, j = (torch.tensor(x) for x in np.ogrid[: q.shape[0], : q.shape[1], : q.shape[2], : k.shape[2]])
    scores = score_mod(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), b, h, i, j)
    scores = scores.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    empty = torch.isneginf(lse)[..., None]
    weights = torch.exp(scores - lse.masked_fill(empty[..., 0], 0)[..., None])
    return weights @ v, lse


def flex(q, k, v, score_mod=None, mask_mod=everything):
    blocks = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], device="cpu")
    q, k, v = (x.detach() for x in (q, k, v))
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)


def _close(got: Tensor, want: Tensor, what: str) -> None:
    assert want.isfinite().all(), what
    assert got.shape == want.shape
    error = (got - want).norm() / want.norm().clamp_min(1)
    assert error < 1e-12, f"{what}: {error}"


def _check(ours, original, inputs, params=()):
    """Output, log-sum-exp, and the gradients of both to everything."""
    dout, dlse = (
        _normal(*inputs[0].shape[:-1], inputs[2].shape[-1], seed=9),
        _normal(*inputs[0].shape[:-1], seed=8),
    )
    results = []
    for run in (ours, original):
        out, lse = run()
        seen = ~torch.isneginf(lse)
        loss = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
        results.append((out, lse[seen], *torch.autograd.grad(loss, (*inputs, *params))))
    names = ["out", "lse", "dq", "dk", "dv", *(f"parameter {n}" for n in range(len(params)))]
    for name, got, want in zip(names, *results, strict=True):
        _close(got, want, name)


@dataclass(frozen=True)
class Score:
    """`original(*params)` is the score_mod; `options(*params)` the keywords of `attention`."""

    name: str
    original: Callable[..., Any]
    options: Callable[..., dict[str, Any]]
    params: tuple[Tensor, ...] = ()
    mask_mod: Callable[..., Any] = everything
    mask: a.Mask = field(default_factory=a.full)


SLOPES = torch.exp2(-8.0 * torch.arange(1, H + 1, dtype=torch.float64) / H)
BUCKETS = torch.from_numpy(a.t5_buckets(8, 12))
# Graphormer: distances of a random graph.
HOPS = torch.from_numpy(np.random.default_rng(0).integers(0, 5, (B, S, S)))
CU = torch.tensor([0, 7, 8, 19, 24])
SEQUENCE = torch.searchsorted(CU, torch.arange(S), right=True) - 1


def sandwich_table(reach: int) -> Tensor:
    """attention-gym, sandwich: (H, 2 * reach + 1), of distances j - i."""
    frequencies = 10000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 16)
    waves = torch.cos(torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None] * frequencies).sum(-1)
    return waves * H / (8.0 * torch.arange(1, H + 1, dtype=torch.float64))[:, None]


CAUSAL: dict[str, Any] = {"mask_mod": causal, "mask": a.causal()}
SCORES = [
    Score(
        "causal as a score",  # FlexAttention, walkthrough
        lambda: lambda x, b, h, i, j: torch.where(i >= j, x, -math.inf),
        lambda: {"mask": a.causal()},
    ),
    Score(
        "relative position",  # FlexAttention, blog; attention-gym, benchmark "rel"
        lambda: lambda x, b, h, i, j: x + (i - j),
        lambda: {"bias": a.alibi(-torch.ones(H, dtype=torch.float64), signed=True)},
    ),
    Score(
        "bias by head",  # attention-gym, benchmark "head_bias"
        lambda: lambda x, b, h, i, j: x + 2 * h,
        lambda: {
            "bias": a.dense_bias(2.0 * torch.arange(H, dtype=torch.float64)[:, None, None].expand(H, 1, S))
        },
    ),
    Score(
        "ALiBi",  # attention-gym, alibi; FlexAttention, blog
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * (j - i),
        lambda slopes: {"bias": a.alibi(slopes, signed=True)},
        (SLOPES,),
    ),
    Score(
        "ALiBi, causal",
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * (j - i),
        lambda slopes: {"bias": a.alibi(slopes)},
        (SLOPES,),
        **CAUSAL,
    ),
    Score(
        "ALiBi of jagged tensors",  # FlexAttention, walkthrough: nested indices
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * ((j - CU[SEQUENCE[j]]) - (i - CU[SEQUENCE[i]])),
        lambda slopes: {"bias": a.alibi(slopes, signed=True)},
        (SLOPES,),
        lambda b, h, i, j: SEQUENCE[i] == SEQUENCE[j],
        a.documents(CU),
    ),
    Score(
        "tanh softcap",  # attention-gym, softcapping; Gemma 2
        lambda: lambda x, b, h, i, j: 2.0 * torch.tanh(x / 2.0),
        lambda: {"softcap": 2.0},
        **CAUSAL,
    ),
    Score(
        "sandwich",  # attention-gym, sandwich
        lambda table: lambda x, b, h, i, j: x + table[h, j - i + (S - 1)],
        lambda table: {"bias": a.relative(table)},
        (sandwich_table(S - 1),),
        **CAUSAL,
    ),
    Score(
        "T5",
        lambda table: lambda x, b, h, i, j: x + table[h, BUCKETS[(j - i).clamp(-12, 12) + 12]],
        lambda table: {"bias": a.relative(table, BUCKETS)},
        (_normal(H, 8, seed=3),),
    ),
    Score(
        "Graphormer, spatial",  # attention-gym, graphormer
        lambda table: lambda x, b, h, i, j: x + table[h, HOPS[b, i, j]],
        lambda table: {"bias": a.dense_bias(table[:, HOPS].transpose(0, 1))},
        (_normal(H, 5, seed=4),),
    ),
    Score(
        "a tensor of biases",
        lambda values: lambda x, b, h, i, j: x + values[b, h, i, j],
        lambda values: {"bias": values},
        (_normal(B, H, S, S, seed=6),),
        **CAUSAL,
    ),
]


@pytest.mark.parametrize("score", SCORES, ids=[score.name for score in SCORES])
def test_score_function(score):
    inputs = _inputs()
    params = tuple(x.clone().requires_grad_() for x in score.params)
    score_mod, options = score.original(*params), {"mask": score.mask, **score.options(*params)}

    def ours():
        return attention(*inputs, **options, return_lse=True, backend="math")

    _check(ours, lambda: plain(*inputs, score_mod, score.mask_mod), inputs, params)
    fixed = score.original(*score.params)
    _close(ours()[0].detach(), flex(*inputs, fixed, score.mask_mod), "FlexAttention")


def test_latent_attention_is_two_products_in_one():
    # attention-gym, latent_attention: one latent key head, and a score that adds a product of rotated parts.
    q, k, v = _inputs(kv_heads=1)
    q_rope, k_rope = (_normal(B, heads, S, 4, seed=7 + heads).requires_grad_() for heads in (H, 1))

    def with_rope(x, b, h, i, j):
        return x + 0.3 * (q_rope[b, h, i] * k_rope[b, 0, j]).sum(-1)

    def ours():
        scale = 1 / math.sqrt(D)
        queries, keys = torch.cat([q, q_rope * (0.3 / scale)], -1), torch.cat([k, k_rope], -1)
        return attention(queries, keys, v, scale=scale, mask=a.causal(), return_lse=True, backend="math")

    _check(ours, lambda: plain(q, k, v, with_rope, causal), (q, k, v), (q_rope, k_rope))


def test_a_factor_by_class_of_pair_is_one_call_for_each_class():
    # FlexAttention, documents: checkerboard. A score that multiplies is no option; its classes can be merged.
    inputs = _inputs()

    def checkerboard(x, b, h, i, j):
        return torch.where((i - j) % 2 == 1, 0.5 * x, 2.0 * x)

    def ours():
        parts = []
        for parity, factor in ((0, 2.0), (1, 0.5)):
            mask = a.from_predicate(lambda b, h, i, j, parity=parity: (i - j) % 2 == parity)
            scale = factor / math.sqrt(D)
            parts.append(attention(*inputs, mask=mask, scale=scale, return_lse=True, backend="math"))
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(out * torch.exp(part - lse)[..., None] for out, part in parts), lse

    _check(ours, lambda: plain(*inputs, checkerboard), inputs)
    _close(ours()[0].detach(), flex(*inputs, checkerboard), "FlexAttention")


OFFSETS = torch.tensor([9, 17])


def test_decoding_with_an_offset_by_row_is_an_index():
    # attention-gym, paged attention: the rows of a step are at off[b], off[b] + 1, ...
    inputs = _inputs(rows=3)

    def offset_causal(b, h, i, j):
        return i + OFFSETS[b] >= j

    def ours():
        q_index = OFFSETS[:, None] + torch.arange(3)
        return attention(*inputs, mask=a.causal(), q_index=q_index, return_lse=True, backend="math")

    _check(ours, lambda: plain(*inputs, mask_mod=offset_causal), inputs)
