"""Score functions of attention-gym and of FlexAttention's documents, compared with their originals.

Their masks are in samples/library.py. Each original is written anew as it stands there, in the signature of
FlexAttention, which runs it. Everything is float64.
"""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import math

import numpy as np
import pytest
import torch
from eager_flex import eager
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import attnspan as a
from attnspan.torch import attention

B, H, S, D = 2, 4, 24, 8


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _inputs(rows: int = S, kv_heads: int = H) -> list[Tensor]:
    shapes = ((B, H, rows, D), (B, kv_heads, S, D), (B, kv_heads, S, D))
    return [_normal(*shape, seed=1 + n).requires_grad_() for n, shape in enumerate(shapes)]


def _check(ours, inputs, score_mod=None, mask_mod=lambda b, h, i, j: j >= 0, params=()):
    """Output, log-sum-exp, and the gradients of both to everything."""
    q, k, v = inputs
    blocks = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], device="cpu")
    with eager():
        wanted = AuxRequest(lse=True)
        theirs, aux = flex_attention(q, k, v, score_mod, blocks, enable_gqa=True, return_aux=wanted)
        results = []
        for out, lse in (ours(), (theirs, aux.lse)):
            loss = (out * _normal(*out.shape, seed=9)).sum() + (lse * _normal(*lse.shape, seed=8)).sum()
            results.append((out, lse, *torch.autograd.grad(loss, (*inputs, *params))))
    for n, (got, want) in enumerate(zip(*results, strict=True)):
        assert want.isfinite().all()
        assert (got - want).norm() / want.norm().clamp_min(1) < 1e-12, f"{n} of out, lse and gradients"


SLOPES = torch.exp2(-8.0 * torch.arange(1, H + 1, dtype=torch.float64) / H)
BUCKETS = torch.from_numpy(a.t5_buckets(8, 12))
# Graphormer: distances of a random graph.
HOPS = torch.from_numpy(np.random.default_rng(0).integers(0, 5, (B, S, S)))
CU = torch.tensor([0, 7, 8, 19, 24])
SEQUENCE = torch.searchsorted(CU, torch.arange(S), right=True) - 1
PLACE = torch.arange(S) - CU[SEQUENCE]
#: attention-gym, sandwich: of each head and distance j - i.
WAVES = torch.cos(
    torch.arange(1 - S, S, dtype=torch.float64)[:, None]
    * 10000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 16)
)
SANDWICH = WAVES.sum(-1) * H / (8.0 * torch.arange(1, H + 1, dtype=torch.float64))[:, None]

#: Code of a mask_mod, and the same mask.
MASKS = {
    "all": ("j >= 0", a.full()),
    "causal": ("i >= j", a.causal()),
    "jagged": ("SEQUENCE[i] == SEQUENCE[j]", a.documents(CU)),
}
#: Each score function: its name | a parameter p | the score of (p, x, b, h, i, j) | our keywords | the mask.
#: Sources: FlexAttention's blog and walkthrough, attention-gym, Gemma 2, Graphormer.
SCORES = """
relative position | -torch.ones(H).double() | x - p[h] * (i - j) | bias=a.alibi(p, signed=True) | all
ALiBi | SLOPES | x + p[h] * (j - i) | bias=a.alibi(p) | causal
ALiBi of jagged tensors | SLOPES | x + p[h] * (PLACE[j] - PLACE[i]) | bias=a.alibi(p, signed=True) | jagged
tanh softcap | SLOPES | 2.0 * torch.tanh(x / 2.0) | softcap=2.0 | causal
sandwich | SANDWICH | x + p[h, j - i + (S - 1)] | bias=a.relative(p) | causal
T5 | _normal(H, 8) | x + p[h, BUCKETS[(j - i).clamp(-12, 12) + 12]] | bias=a.relative(p, BUCKETS) | all
Graphormer | _normal(H, 5) | x + p[h, HOPS[b, i, j]] | bias=a.dense_bias(p[:, HOPS].transpose(0, 1)) | all
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", SCORES.strip().splitlines(), ids=lambda row: row.partition(" |")[0])
def test_score_function(row):
    name, param, score, keywords, kind = row.split(" | ")
    (mask_code, mask), inputs, p = MASKS[kind], _inputs(), eval(param).clone().requires_grad_()
    params = [] if "softcap" in name else [p]

    def ours():
        options = eval(f"dict({keywords})", globals(), {"p": p})
        return attention(*inputs, mask=mask, **options, return_lse=True, backend="math")

    mask_mod, score_mod = eval(f"lambda b, h, i, j: {mask_code}"), eval(f"lambda p, x, b, h, i, j: {score}")
    _check(ours, inputs, lambda *at: score_mod(p, *at), mask_mod, params)


@pytest.mark.slow
def test_latent_attention_is_two_products_in_one():
    # attention-gym, latent_attention: one latent key head, and a score that adds a product of rotated parts.
    q, k, v = _inputs(kv_heads=1)
    q_rope, k_rope = (_normal(B, heads, S, 4, seed=7 + heads).requires_grad_() for heads in (H, 1))

    rotated = 0.3 * q_rope @ k_rope.mT

    def ours():
        scale = 1 / math.sqrt(D)
        queries, keys = torch.cat([q, q_rope * (0.3 / scale)], -1), torch.cat([k, k_rope], -1)
        return attention(queries, keys, v, scale=scale, mask=a.causal(), return_lse=True, backend="math")

    _check(ours, (q, k, v), lambda x, *at: x + rotated[at], lambda b, h, i, j: i >= j, (q_rope, k_rope))


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


def test_decoding_with_an_offset_by_row_is_an_index():
    # attention-gym, paged attention: the rows of a step are at off[b], off[b] + 1, ...
    inputs, offsets = _inputs(rows=3), torch.tensor([9, 17])

    def ours():
        q_index = offsets[:, None] + torch.arange(3)
        return attention(*inputs, mask=a.causal(), q_index=q_index, return_lse=True, backend="math")

    _check(ours, inputs, mask_mod=lambda b, h, i, j: i + offsets[b] >= j)
