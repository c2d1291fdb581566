"""Scores with a wrong scale, and twins whose scale is usual or a choice."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from small_models import (
    DIM,
    EARLIER,
    HEADS,
    INDEX,
    SDPA,
    SIZE,
    Attend,
    heads_of,
    latents,
    merged_heads,
    written,
)
from torch import nn
from torch_runner import attends, sick

from attnspan.torch import attention


def rotated(x):
    angle = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(SIZE // 2)
    cos, sin = (torch.cat([y, y], -1) for y in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def scaled_once(q, k, v):
    """Scales the queries once, as Whisper, BART and OPT do."""
    return SDPA(rotated(q * SIZE**-0.5), rotated(k), v, scale=1.0)


TWICE, NONE, WIDTH = (
    {"evidence": (f"the effective scale is {total}", "1/sqrt(head dim 8) is 0.3536"), "remedy": remedy}
    for total, remedy in (
        ("0.125", "Keep one"),
        ("1,", "Multiply the scores by 0.3536"),
        ("0.1768", "use head_dim**-0.5"),
    )
)
TRIED = {"tried": ("results of the model change by", "does not show which scale is right")}
scaled = partial(attends, "scale", build=latents)


@scaled(SDPA, **TWICE, **TRIED)
def queries_too(q, k, v):
    q = q / math.sqrt(SIZE)  # sick
    return SDPA(q, k, v)  # sick


@scaled(scaled_once, **TWICE, **TRIED)
def rotated_queries(q, k, v):
    q = q * torch.tensor(SIZE**-0.5)  # sick
    return SDPA(rotated(q), rotated(k), v, scale=SIZE**-0.5)  # sick


@scaled(SDPA, **TWICE, **TRIED)
def both(q, k, v):
    q, k = (x * SIZE**-0.25 for x in (q, k))  # sick
    return SDPA(q, k, v)  # sick


@scaled(written, **TWICE, **TRIED)
def twice_written(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q * SIZE**-0.5, k)  # sick
    scores = scores / SIZE**0.5  # sick
    return scores.softmax(-1) @ v  # sick


@scaled(written, **NONE, **TRIED)
def unscaled(q, k, v):
    return (q @ k.mT).softmax(-1) @ v  # sick


@scaled(scaled_once, **NONE, **TRIED)
def unscaled_rotated(q, k, v):
    return SDPA(rotated(q), rotated(k), v, scale=1.0)  # sick


@scaled(written, **WIDTH, **TRIED)
def of_width(q, k, v):
    scores = q @ k.mT * DIM**-0.5  # sick
    return scores.masked_fill(~EARLIER, -math.inf).softmax(-1) @ v  # sick


@scaled(SDPA, **WIDTH, **TRIED)
def width_in_call(q, k, v):
    return SDPA(q, k, v, scale=DIM**-0.5)  # sick


class BeforeHeads(Attend):
    def of_tokens(self, q, k, v):
        q = q.clone()
        q *= SIZE**-0.5  # sick
        q, k, v = map(heads_of, (q, k, v))
        return merged_heads(attention(q, k, v))  # sick


class InModule(Attend):
    def __init__(self, _):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def of_tokens(self, q, k, v):
        q = q * SIZE**-0.5  # sick
        return self.inner(q, k, v, need_weights=False)[0]  # sick


for _block in (BeforeHeads, InModule):
    sick("scale", _block, latents(block=_block), latents(), **TWICE)


# Choices


class T5(Attend):
    """The scale is part of the weights, and a learned bias depends on the distance."""

    def __init__(self, _):
        super().__init__()
        self.bias = nn.Embedding(64, HEADS)

    def of_heads(self, q, k, v):
        return self.with_bias(q, k, v, self.bias(INDEX[:, None] - INDEX + 32).permute(2, 0, 1))

    def with_bias(self, q, k, v, bias):
        return (q @ k.mT + bias).softmax(-1) @ v


class T5InCall(T5):
    def with_bias(self, q, k, v, bias):
        return SDPA(q, k, v, attn_mask=bias[None], scale=1.0)


class Folded(Attend):
    def __init__(self, _):
        super().__init__(lambda q, k, v: (q @ k.mT * 1.0).softmax(-1) @ v)
        with torch.no_grad():
            self.qkv.weight[:DIM] *= SIZE**-0.5
            self.qkv.bias[:DIM] *= SIZE**-0.5


def gemma(q, k, v):
    scores = (q * 12**-0.5) @ k.mT
    return (torch.tanh(scores / 50.0) * 50.0).softmax(-1) @ v


def mu_p(q, k, v):
    return SDPA(q, k, v, scale=1 / SIZE)


def normalized(q, k, v):
    """A root mean square norm of q and k, in operators."""
    q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x in (q, k))
    return SDPA(q * SIZE**-0.5, k, v)


class Temperature(Attend):
    def __init__(self, _):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def of_heads(self, q, k, v):
        return (q @ k.mT * self.temperature).softmax(-1) @ v


class Cosine(Temperature):
    def of_heads(self, q, k, v):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (scores * self.temperature.exp()).softmax(-1) @ v


class ByLayer(Attend):
    """Divides by the number of the layer too, as an option of GPT-2 does."""

    number = 0

    def __init__(self, _):
        super().__init__()
        ByLayer.number += 1
        self.layer = math.sqrt(SIZE) if ByLayer.number % 2 else 1.0

    def of_heads(self, q, k, v):
        scores = q @ k.mT / math.sqrt(SIZE) / self.layer
        return scores.softmax(-1) @ v


class Unprojected(Attend):
    """Tokens that attend without projections, as in the attention of Luong."""

    def forward(self, x):
        return x + (x @ x.mT).softmax(-1) @ x


_CHOICES = [latents(x) for x in (gemma, mu_p, normalized)]
_CHOICES += [latents(block=x) for x in (T5, T5InCall, Folded, Temperature, Cosine, ByLayer, Unprojected)]
sick("scale", both, latents(both, layers=1), *_CHOICES, name="choices", **TWICE)
