"""Architectures of two small layers, most of which have one thing wrong with their "attnspan"."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnspan.masks import causal, full, keys, segments
from attnspan.torch import attention
from attnspan_lab.zoo.architecture import Architecture

HEADS, WIDTH, VOCAB = 2, 32, 50

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def _ids(positions: Tensor) -> Tensor:
    return (positions == 0).long().cumsum(1)


def _visible(q: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    """(B|1, 1, S, S)."""
    index = torch.arange(q.shape[2])
    mask = (index[:, None] >= index)[None, None]
    if positions is not None:
        ids = _ids(positions)
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    return mask if valid is None else mask & valid.bool()[:, None, None, :]


def eager(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~_visible(q, positions, valid), torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, _visible(q, positions, valid))


def flex(q: Tensor, *_: Any) -> Tensor:
    if q.requires_grad:
        raise NotImplementedError("no backward on CPU")
    return eager(q, *_)


def ours(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    mask = causal() & (full() if positions is None else segments(_ids(positions)))
    return attention(q, k, v, mask=mask if valid is None else mask & keys(valid.bool()))


def identity(_q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v


def breaking(q: Tensor, *rest: Any) -> Tensor:
    torch._dynamo.graph_break()
    return ours(q, *rest)


def no_backward(q: Tensor, *rest: Any) -> Tensor:
    if q.requires_grad:
        raise NotImplementedError("no gradients here")
    return ours(q, *rest)


def crashing(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    if valid is not None:
        os.abort()
    return ours(q, k, v, positions, valid)


def hanging(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
    if positions is not None:
        time.sleep(3600)
    return ours(q, k, v, positions, valid)


OURS: dict[str, Attend] = {
    **dict.fromkeys(("sound", "own", "own_leak"), ours),
    "breaking": breaking,
    "leaking": lambda q, k, v, _, valid: ours(q, k, v, None, valid),
    "all_pairs": lambda q, k, *rest: ours(q, k, *rest) + 0 * (q @ k.mT).sum(),
    "wrong_gradients": lambda q, k, *rest: ours(q, k + (k - k.detach()) * 1e-3, *rest),
    "wrong": lambda q, k, *rest: ours(q, k * 1.0001, *rest),
    "no_backward": no_backward,
    "half_used": lambda *given: (ours(*given) + sdpa(*given)) / 2,
    "unused": sdpa,
    # A compiler that has to know whether it is 131 makes a program for 131 alone.
    "specialising": lambda q, *rest: ours(q, *rest) * (1 if q.shape[2] == 131 else 1.0),
    "crashing": crashing,
    "hanging": hanging,
}
OTHERS: dict[str, Attend] = {"eager": eager, "sdpa": sdpa, "flex": flex, "identity": identity}


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor | None, valid: Tensor | None) -> Tensor:
        q, k, v = self.mix(x).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        return x + self.out(self.attend(q, k, v, positions, valid).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A decoder of WIDTH; "own" breaks the graph itself, "own_leak" adds the token before."""

    def __init__(self, name: str, attend: Attend) -> None:
        super().__init__()
        self.name = name
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        if self.name == "own":
            torch._dynamo.graph_break()
        if self.name == "own_leak":
            x = x + x.roll(1, 1)
        for layer in self.layers:
            x = layer(x, position_ids, attention_mask)
        return {"logits": self.head(x)}


def make(name: str, implementation: str, _size: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(name, OURS[name] if implementation == "attnspan" else OTHERS[implementation])


def batch(layout: str, tokens: int, _size: str) -> dict[str, Any] | None:
    ids = torch.randint(VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1))
    if layout == "packed":
        positions = torch.cat([torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)])
        return {"input_ids": ids, "position_ids": positions.expand(2, -1)}
    if layout == "padded":
        valid = (torch.arange(tokens) < torch.tensor([tokens, tokens * 2 // 3])[:, None]).long()
        return {"input_ids": ids, "attention_mask": valid}
    return {"input_ids": ids}


def architectures() -> list[Architecture]:
    return [
        Architecture(name, "samples", "encoder", ("tiny", "bench"), partial(make, name), batch)
        for name in OURS
    ]
