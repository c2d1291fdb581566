"""Small models whose scores have a wrong scale, and twins whose scale is usual or a choice.

`PAIRS` has the fault, the block and the block with the remedy. The lines to name end in ``# sick``. `CHOICES`
has blocks whose scale is right or deliberate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from patients import DIM, HEADS, heads_of
from torch import Tensor, nn
from wired import SDPA, Attend

from attnspan.torch import attention

SIZE = DIM // HEADS
PAIRS: dict[str, tuple[str, Any, Any]] = {}


def written(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(SIZE // 2)
    cos, sin = (torch.cat([y, y], -1) for y in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Heads(Attend):
    """Subclasses attend with q, k and v of shape (B, heads, S, head dim)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.of_heads(*(heads_of(x) for x in (q, k, v))).transpose(1, 2).flatten(2)

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)


class Written(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return written(q, k, v, SIZE**-0.5)


class Scaled(Heads):
    """Scales the queries once, as Whisper, BART and OPT do."""

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(rotated(q * SIZE**-0.5), rotated(k), v, scale=1.0)


def pair(name: str, fault: str, right: Any = Heads) -> Any:
    def note(block: Any) -> Any:
        PAIRS[name] = fault, block, right
        return block

    return note


@pair("queries", "twice")
class Queries(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / math.sqrt(SIZE)  # sick
        return SDPA(q, k, v)  # sick


@pair("rotated queries", "twice", Scaled)
class Rotated(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * torch.tensor(SIZE**-0.5)  # sick
        return SDPA(rotated(q), rotated(k), v, scale=SIZE**-0.5)  # sick


@pair("before the heads", "twice")
class BeforeHeads(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q *= SIZE**-0.5  # sick
        q, k, v = (heads_of(x) for x in (q, k, v))
        return attention(q, k, v).transpose(1, 2).flatten(2)  # sick


@pair("both", "twice")
class Both(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x * SIZE**-0.25 for x in (q, k))  # sick
        return SDPA(q, k, v)  # sick


@pair("written out", "twice", Written)
class TwiceWritten(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q * SIZE**-0.5, k)  # sick
        scores = scores / SIZE**0.5  # sick
        return scores.softmax(-1) @ v  # sick


@pair("module", "twice")
class InModule(Attend):
    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * SIZE**-0.5  # sick
        return self.inner(q, k, v, need_weights=False)[0]  # sick


@pair("none", "none", Written)
class Unscaled(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v  # sick


@pair("none, rotated", "none", Scaled)
class UnscaledRotated(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(rotated(q), rotated(k), v, scale=1.0)  # sick


@pair("width", "width", Written)
class OfWidth(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * DIM**-0.5  # sick
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1) @ v  # sick


@pair("width in the call", "width")
class WidthInCall(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, scale=DIM**-0.5)  # sick


# Choices


class T5(Heads):
    """The scale is part of the weights, and a learned bias depends on the distance."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.bias = nn.Embedding(64, HEADS)

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        bias = self.bias(index[:, None] - index + 32).permute(2, 0, 1)
        return (q @ k.mT + bias).softmax(-1) @ v


class T5InCall(T5):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        bias = self.bias(index[:, None] - index + 32).permute(2, 0, 1)
        return SDPA(q, k, v, attn_mask=bias[None], scale=1.0)


class Folded(Heads):
    def __init__(self, _: Any = None) -> None:
        super().__init__()
        with torch.no_grad():
            self.qkv.weight[:DIM] *= SIZE**-0.5
            self.qkv.bias[:DIM] *= SIZE**-0.5

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return written(q, k, v)


class Gemma(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * 12**-0.5) @ k.mT
        return (torch.tanh(scores / 50.0) * 50.0).softmax(-1) @ v


class MuP(Heads):
    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, scale=1 / SIZE)


class Cosine(Heads):
    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (scores * self.temperature.exp()).softmax(-1) @ v


class Temperature(Heads):
    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * self.temperature).softmax(-1) @ v


class Normalized(Heads):
    """A root mean square norm of q and k, in operators."""

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x in (q, k))
        return SDPA(q * SIZE**-0.5, k, v)


class ByLayer(Heads):
    """Divides by the number of the layer too, as an option of GPT-2 does."""

    number = 0

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        ByLayer.number += 1
        self.layer = math.sqrt(SIZE) if ByLayer.number % 2 else 1.0

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(SIZE) / self.layer
        return scores.softmax(-1) @ v


class Unprojected(Heads):
    """Tokens that attend without projections, as in the attention of Luong."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.mT).softmax(-1) @ x


CHOICES = (
    *(Heads, Written, Scaled, T5, T5InCall, Folded, Gemma, MuP, Cosine, Temperature, Normalized, ByLayer),
    Unprojected,
)
