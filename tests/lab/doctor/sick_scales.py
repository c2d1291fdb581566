"""Scores with a wrong scale, and twins whose scale is usual or a choice."""

import math

import torch
import torch.nn.functional as F
from sick import sick
from small_models import DIM, HEADS, SDPA, SIZE, Attend, Written, latents
from torch import nn

from attnspan.torch import attention


def rotated(x):
    angle = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(SIZE // 2)
    cos, sin = (torch.cat([y, y], -1) for y in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Scaled(Attend):
    """Scales the queries once, as Whisper, BART and OPT do."""

    def of_heads(self, q, k, v):
        return SDPA(rotated(q * SIZE**-0.5), rotated(k), v, scale=1.0)


class Queries(Attend):
    def of_heads(self, q, k, v):
        q = q / math.sqrt(SIZE)  # sick
        return SDPA(q, k, v)  # sick


class RotatedQueries(Attend):
    def of_heads(self, q, k, v):
        q = q * torch.tensor(SIZE**-0.5)  # sick
        return SDPA(rotated(q), rotated(k), v, scale=SIZE**-0.5)  # sick


class BeforeHeads(Attend):
    def attend(self, q, k, v):
        q *= SIZE**-0.5  # sick
        return super().attend(q, k, v)

    def of_heads(self, q, k, v):
        return attention(q, k, v)  # sick


class Both(Attend):
    def of_heads(self, q, k, v):
        q, k = (x * SIZE**-0.25 for x in (q, k))  # sick
        return SDPA(q, k, v)  # sick


class TwiceWritten(Attend):
    def of_heads(self, q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q * SIZE**-0.5, k)  # sick
        scores = scores / SIZE**0.5  # sick
        return scores.softmax(-1) @ v  # sick


class InModule(Attend):
    def __init__(self, _=None):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def attend(self, q, k, v):
        q = q * SIZE**-0.5  # sick
        return self.inner(q, k, v, need_weights=False)[0]  # sick


class Unscaled(Attend):
    def of_heads(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v  # sick


class UnscaledRotated(Attend):
    def of_heads(self, q, k, v):
        return SDPA(rotated(q), rotated(k), v, scale=1.0)  # sick


class OfWidth(Attend):
    def of_heads(self, q, k, v):
        scores = q @ k.mT * DIM**-0.5  # sick
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1) @ v  # sick


class WidthInCall(Attend):
    def of_heads(self, q, k, v):
        return SDPA(q, k, v, scale=DIM**-0.5)  # sick


TWICE, NONE, WIDTH = (
    ("0.125", "Keep one"),
    ("1,", "Multiply the scores by 0.3536"),
    ("0.1768", "use head_dim**-0.5"),
)
for _block, _well, (_total, _remedy) in (
    (Queries, Attend, TWICE),
    (RotatedQueries, Scaled, TWICE),
    (BeforeHeads, Attend, TWICE),
    (Both, Attend, TWICE),
    (TwiceWritten, Written, TWICE),
    (InModule, Attend, TWICE),
    (Unscaled, Written, NONE),
    (UnscaledRotated, Scaled, NONE),
    (OfWidth, Written, WIDTH),
    (WidthInCall, Attend, WIDTH),
):
    _tried = ("results of the model change by", "does not show which scale is right")
    sick(
        "scale",
        _block,
        latents(_block),
        latents(_well),
        remedy=_remedy,
        tried=() if _block in (InModule, BeforeHeads) else _tried,
        evidence=(f"the effective scale is {_total}", "1/sqrt(head dim 8) is 0.3536"),
    )


# Choices


class T5(Attend):
    """The scale is part of the weights, and a learned bias depends on the distance."""

    def __init__(self, _=None):
        super().__init__()
        self.bias = nn.Embedding(64, HEADS)

    def of_heads(self, q, k, v):
        index = torch.arange(q.shape[2])
        return self.with_bias(q, k, v, self.bias(index[:, None] - index + 32).permute(2, 0, 1))

    def with_bias(self, q, k, v, bias):
        return (q @ k.mT + bias).softmax(-1) @ v


class T5InCall(T5):
    def with_bias(self, q, k, v, bias):
        return SDPA(q, k, v, attn_mask=bias[None], scale=1.0)


class Folded(Attend):
    def __init__(self, _=None):
        super().__init__()
        with torch.no_grad():
            self.qkv.weight[:DIM] *= SIZE**-0.5
            self.qkv.bias[:DIM] *= SIZE**-0.5

    def of_heads(self, q, k, v):
        return (q @ k.mT * 1.0).softmax(-1) @ v


class Gemma(Attend):
    def of_heads(self, q, k, v):
        scores = (q * 12**-0.5) @ k.mT
        return (torch.tanh(scores / 50.0) * 50.0).softmax(-1) @ v


class MuP(Attend):
    def of_heads(self, q, k, v):
        return SDPA(q, k, v, scale=1 / SIZE)


class Temperature(Attend):
    def __init__(self, _=None):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def of_heads(self, q, k, v):
        return (q @ k.mT * self.temperature).softmax(-1) @ v


class Cosine(Temperature):
    def of_heads(self, q, k, v):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (scores * self.temperature.exp()).softmax(-1) @ v


class Normalized(Attend):
    """A root mean square norm of q and k, in operators."""

    def of_heads(self, q, k, v):
        q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x in (q, k))
        return SDPA(q * SIZE**-0.5, k, v)


class ByLayer(Attend):
    """Divides by the number of the layer too, as an option of GPT-2 does."""

    number = 0

    def __init__(self, _=None):
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


CHOICES = (T5, T5InCall, Folded, Gemma, MuP, Cosine, Temperature, Normalized, ByLayer, Unprojected)
sick("scale", Both, latents(Both, 1), *map(latents, CHOICES), name="choices")
