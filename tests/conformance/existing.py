"""Other people's implementations of the options, as their users have them.

A peer takes q, k, v (B, H, S, D), a bool mask (B|1, H|1, Sq, Sk) that leaves no row empty, and what is asked;
it gives the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Asked:
    """What is asked of an implementation; `bias` holds a value for each pair, in float32."""

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


Peer = Callable[[Tensor, Tensor, Tensor, Tensor, Asked], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, asked: Asked) -> Tensor:
    """torch's own function with an additive mask of q's dtype, as it demands."""
    assert asked.softcap is asked.sinks is None
    assert asked.bias is not None
    added = torch.where(mask, asked.bias.to(q.dtype), -torch.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=added, scale=asked.scale)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, asked: Asked) -> Tensor:
    """The eager attention of transformers: Gemma 2's softcap, T5's position bias, gpt-oss's sinks."""
    weights = torch.matmul(q, k.transpose(2, 3)) * asked.scale
    if asked.softcap is not None:
        weights = torch.tanh(weights / asked.softcap) * asked.softcap
    if asked.bias is not None:
        weights = weights + asked.bias.to(q.dtype)
    weights = weights + torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    if asked.sinks is None:
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    else:
        sinks = asked.sinks.to(q.dtype).reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        logits = torch.cat([weights, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(weights, v)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, asked: Asked) -> Tensor:
    """FlexAttention with the option as score_mod; sinks after the fact, as its users write them."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        if asked.softcap is not None:
            score = asked.softcap * torch.tanh(score / asked.softcap)
        if asked.bias is not None:
            score = score + bias[b, h, i, j]
        return torch.where(visible[b, h, i, j], score, -torch.inf)

    shape = (*q.shape[:3], k.shape[2])
    visible = mask.expand(shape)
    bias = None if asked.bias is None else asked.bias.expand(shape)
    given = {"score_mod": score_mod, "scale": asked.scale}
    if asked.sinks is None:
        return flex_attention(q, k, v, **given)
    out, aux = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(aux.lse - asked.sinks[:, None])[..., None]).to(q.dtype)
