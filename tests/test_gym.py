"""Score functions of attention-gym and of FlexAttention's documents, compared with their originals.

Their masks are in samples/library.py. Each original is written anew as it stands there, in the signature of
FlexAttention. It is applied twice: by FlexAttention itself, forward, and by a plain softmax that autograd
differentiates. Everything is float64.
"""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import math
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


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _inputs(rows: int = S, kv_heads: int = H) -> list[Tensor]:
    shapes = ((B, H, rows, D), (B, kv_heads, S, D), (B, kv_heads, S, D))
    return [_normal(*shape, seed=1 + n).requires_grad_() for n, shape in enumerate(shapes)]


def plain(q, k, v, score_mod, mask_mod):
    """Softmax attention with every score written out: output and log-sum-exp."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    b, h, i, j = (torch.tensor(x) for x in np.ogrid[: q.shape[0], : q.shape[1], : q.shape[2], : k.shape[2]])
    scores = score_mod(q @ k.mT / math.sqrt(q.shape[-1]), b, h, i, j)
    scores = scores.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def _close(got: Tensor, want: Tensor, what: str) -> None:
    assert want.isfinite().all(), what
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm().clamp_min(1) < 1e-12, what


def _check(ours, inputs, score_mod=lambda x, b, h, i, j: x, mask_mod=everything, params=()):
    """Output, log-sum-exp, and the gradients of both to everything; the output of FlexAttention too."""
    q, k, v, *_ = inputs
    results = []
    for out, lse in (ours(), plain(q, k, v, score_mod, mask_mod)):
        loss = (out * _normal(*out.shape, seed=9)).sum() + (lse * _normal(*lse.shape, seed=8)).sum()
        results.append((out, lse, *torch.autograd.grad(loss, (*inputs, *params))))
    for n, (got, want) in enumerate(zip(*results, strict=True)):
        _close(got, want, f"result {n} of out, lse and gradients")
    blocks = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], device="cpu")
    q, k, v = (x.detach() for x in (q, k, v))
    want = flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)
    _close(results[0][0], want, "FlexAttention")


SLOPES = torch.exp2(-8.0 * torch.arange(1, H + 1, dtype=torch.float64) / H)
BUCKETS = torch.from_numpy(a.t5_buckets(8, 12))
# Graphormer: distances of a random graph.
HOPS = torch.from_numpy(np.random.default_rng(0).integers(0, 5, (B, S, S)))
CU = torch.tensor([0, 7, 8, 19, 24])
SEQUENCE = torch.searchsorted(CU, torch.arange(S), right=True) - 1
BY_HEAD = 2.0 * torch.arange(H, dtype=torch.float64)[:, None, None].expand(H, 1, S)


def sandwich_table(reach: int) -> Tensor:
    """attention-gym, sandwich: (H, 2 * reach + 1), of distances j - i."""
    frequencies = 10000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 16)
    waves = torch.cos(torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None] * frequencies).sum(-1)
    return waves * H / (8.0 * torch.arange(1, H + 1, dtype=torch.float64))[:, None]


def _in_sequence(i):
    return i - CU[SEQUENCE[i]]


ALL = everything, a.full()
CAUSAL = causal, a.causal()
JAGGED = (lambda b, h, i, j: SEQUENCE[i] == SEQUENCE[j]), a.documents(CU)
#: Name -> its parameter, the score_mod with it, the keywords of `attention` with it, the mask of both.
SCORES: dict[str, tuple[Tensor | None, Any, Any, tuple[Any, a.Mask]]] = {
    # FlexAttention, blog; attention-gym, benchmark "rel"
    "relative position": (
        None,
        lambda _: lambda x, b, h, i, j: x + (i - j),
        lambda _: {"bias": a.alibi(-torch.ones(H, dtype=torch.float64), signed=True)},
        ALL,
    ),
    # attention-gym, benchmark "head_bias"
    "bias by head": (
        None,
        lambda _: lambda x, b, h, i, j: x + 2 * h,
        lambda _: {"bias": a.dense_bias(BY_HEAD)},
        ALL,
    ),
    # attention-gym, alibi; FlexAttention, blog
    "ALiBi": (
        SLOPES,
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * (j - i),
        lambda slopes: {"bias": a.alibi(slopes, signed=True)},
        ALL,
    ),
    "ALiBi, causal": (
        SLOPES,
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * (j - i),
        lambda slopes: {"bias": a.alibi(slopes)},
        CAUSAL,
    ),
    # FlexAttention, walkthrough: nested indices
    "ALiBi of jagged tensors": (
        SLOPES,
        lambda slopes: lambda x, b, h, i, j: x + slopes[h] * (_in_sequence(j) - _in_sequence(i)),
        lambda slopes: {"bias": a.alibi(slopes, signed=True)},
        JAGGED,
    ),
    # attention-gym, softcapping; Gemma 2
    "tanh softcap": (
        None,
        lambda _: lambda x, b, h, i, j: 2.0 * torch.tanh(x / 2.0),
        lambda _: {"softcap": 2.0},
        CAUSAL,
    ),
    "sandwich": (
        sandwich_table(S - 1),
        lambda table: lambda x, b, h, i, j: x + table[h, j - i + (S - 1)],
        lambda table: {"bias": a.relative(table)},
        CAUSAL,
    ),
    "T5": (
        _normal(H, 8, seed=3),
        lambda table: lambda x, b, h, i, j: x + table[h, BUCKETS[(j - i).clamp(-12, 12) + 12]],
        lambda table: {"bias": a.relative(table, BUCKETS)},
        ALL,
    ),
    # attention-gym, graphormer
    "Graphormer, spatial": (
        _normal(H, 5, seed=4),
        lambda table: lambda x, b, h, i, j: x + table[h, HOPS[b, i, j]],
        lambda table: {"bias": a.dense_bias(table[:, HOPS].transpose(0, 1))},
        ALL,
    ),
    "a tensor of biases": (
        _normal(B, H, S, S, seed=6),
        lambda values: lambda x, b, h, i, j: x + values[b, h, i, j],
        lambda values: {"bias": values},
        CAUSAL,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_function(name):
    param, original, options, (mask_mod, mask) = SCORES[name]
    inputs, params = _inputs(), [] if param is None else [param.clone().requires_grad_()]
    given = params[0] if params else None

    def ours():
        return attention(*inputs, mask=mask, **options(given), return_lse=True, backend="math")

    _check(ours, inputs, original(given), mask_mod, params)


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

    _check(ours, (q, k, v), with_rope, causal, (q_rope, k_rope))


def test_a_factor_by_class_of_pair_is_one_call_for_each_class():
    # FlexAttention, documents: checkerboard. A score that multiplies is no option; its classes can be merged.
    inputs = _inputs()

    def ours():
        parts = []
        for parity, factor in ((0, 2.0), (1, 0.5)):
            mask = a.from_predicate(lambda b, h, i, j, parity=parity: (i - j) % 2 == parity)
            scale = factor / math.sqrt(D)
            parts.append(attention(*inputs, mask=mask, scale=scale, return_lse=True, backend="math"))
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(out * torch.exp(part - lse)[..., None] for out, part in parts), lse

    _check(ours, inputs, lambda x, b, h, i, j: torch.where((i - j) % 2 == 1, 0.5 * x, 2.0 * x))


OFFSETS = torch.tensor([9, 17])


def test_decoding_with_an_offset_by_row_is_an_index():
    # attention-gym, paged attention: the rows of a step are at off[b], off[b] + 1, ...
    inputs = _inputs(rows=3)

    def ours():
        q_index = OFFSETS[:, None] + torch.arange(3)
        return attention(*inputs, mask=a.causal(), q_index=q_index, return_lse=True, backend="math")

    _check(ours, inputs, mask_mod=lambda b, h, i, j: i + OFFSETS[b] >= j)
