# ruff: noqa: ARG002 -- methods of twins take the same arguments
"""Small models that compute in vain, or whose positions and queries cannot work, and healthy twins.

`PAIRS` has the kind of the finding, the code with the line to name, the sick factory and its twins. The
first twin has the remedy. The line to name ends in ``# sick``. `COSTS` names the pairs whose first twin must
have the same results.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, HEADS, LENGTH, VOCABULARY, Model, fused, heads_of, of_segments, tokens
from torch import Tensor, nn

SDPA = F.scaled_dot_product_attention
FEATURES = 5
PAIRS: dict[str, tuple[str, Any, Any, tuple[Any, ...]]] = {}
COSTS: list[str] = []


def pair(name: str, kind: str, code: Any, sick: Any, *twins: Any, same: bool = False) -> None:
    PAIRS[name] = (kind, code, sick, twins)
    COSTS.extend([name] if same else [])


# One key


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(*map(heads_of, self.qkv(x).chunk(3, -1))).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)  # sick


class Written(Fused):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v  # sick


class Unattended(Fused):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x)[0]  # sick


class WithoutWeights(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.inner.in_proj_bias[2 * DIM :]
        return x + self.inner.out_proj(F.linear(x, self.inner.in_proj_weight[2 * DIM :], bias))


class Table(nn.Module):
    """Features of a table are one token."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Linear(FEATURES, DIM), block(), nn.Linear(DIM, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(features)).mean(1))

    def tokens(self, features: Tensor) -> Tensor:
        return self.embed(features)[:, None]


class ByFeature(Table):
    def tokens(self, features: Tensor) -> Tensor:
        return features[..., None] * self.embed.weight.T + self.embed.bias


class Sequences(Table):
    def tokens(self, features: Tensor) -> Tensor:
        return self.embed(features)


def table(block: Any, kind: Any = Table) -> Any:
    return lambda: (kind(block), [{"features": torch.randn(n, FEATURES)} for n in (6, 4)])


def lengths(*sizes: int) -> Any:
    return lambda: (Sequences(Fused), [{"features": torch.randn(2, n, FEATURES)} for n in sizes])


pair("one key", "one-key", Fused, table(Fused), table(Unattended), table(Fused, ByFeature), same=True)
pair("one key, written out", "one-key", Written, table(Written), table(Unattended), lengths(1, 7), same=True)
pair("one key of a module", "one-key", Weighted, table(Weighted), table(WithoutWeights), same=True)


class Patched(Table):
    """An image of one patch. Larger images have more patches."""

    def __init__(self) -> None:
        super().__init__(Fused)
        self.patch = nn.Conv2d(3, DIM, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.patch(images).flatten(2).mT).mean(1))


def patched() -> Any:
    return Patched(), [{"images": torch.randn(2, 3, 4, 4)}]


class Pooled(nn.Module):
    """Patches attend to one pooled condition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(FEATURES, 2 * DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        k, v = self.kv(condition)[:, None].chunk(2, -1)
        out = SDPA(heads_of(self.q(x)), heads_of(k), heads_of(v))
        return x + out.transpose(1, 2).flatten(2)


def pooled() -> Any:
    return Pooled(), [{"x": torch.randn(2, 9, DIM), "condition": torch.randn(2, FEATURES)}]


# The same product again


class Denoiser(nn.Module):
    """A few steps over latents (B, S, C), with a text that does not change."""

    steps = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def read(self, text: Tensor) -> tuple[Tensor, ...]:
        return self.kv(text).chunk(2, -1)  # sick

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for _ in range(self.steps):
            k, v = self.read(text)
            x = x - self.step(x, k, v)
        return x

    def step(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.out(SDPA(heads_of(self.q(x)), heads_of(k), heads_of(v)).transpose(1, 2).flatten(2))


class ReadOnce(Denoiser):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        k, v = self.read(text)
        for _ in range(self.steps):
            x = x - self.step(x, k, v)
        return x


class Normed(Denoiser):
    """The text is normalised again too, so its values are equal, and not its memory."""

    def read(self, text: Tensor) -> tuple[Tensor, ...]:
        return self.kv(self.norm(text)).chunk(2, -1)  # sick


class NormedOnce(ReadOnce):
    read = Normed.read


class Encoded(Denoiser):
    """An encoder of two layers runs in each step: one finding at its first product."""

    def read(self, text: Tensor) -> tuple[Tensor, ...]:
        hidden = self.out(text).relu()  # sick
        return self.kv(hidden).chunk(2, -1)


class EncodedOnce(ReadOnce):
    read = Encoded.read


class Noised(Denoiser):
    """The text has other noise in each step."""

    def read(self, text: Tensor) -> tuple[Tensor, ...]:
        return self.kv(F.dropout(text, 0.1, self.training)).chunk(2, -1)


class InPlace(Denoiser):
    """The text has the same memory in each step, and other numbers."""

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.steps):
                k, v = self.read(text)
                x = x - self.step(x, k, v)
                text.mul_(0.9)
        return x


def denoised(kind: Any) -> Any:
    return lambda: (kind(), [{"x": torch.randn(2, 6, DIM), "text": torch.randn(2, 9, DIM)}])


pair("text again", "repeat", Denoiser, denoised(Denoiser), denoised(ReadOnce), denoised(InPlace), same=True)
pair(
    "normed text again", "repeat", Normed, denoised(Normed), denoised(NormedOnce), denoised(Noised), same=True
)
pair("encoder again", "repeat", Encoded, denoised(Encoded), denoised(EncodedOnce), same=True)


# Layers outside of attention that mix tokens


class Mixer(nn.Module):
    def __init__(self, _: Any) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(DIM, 4), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + self.up(x) * self.gate(x)

    def gate(self, x: Tensor) -> Tensor:
        top, chosen = self.router(x).softmax(-1).topk(4, dim=1)  # sick
        return torch.zeros(*x.shape[:2], 4).scatter(1, chosen, top).sum(-1, keepdim=True)


class ByToken(Mixer):
    def gate(self, x: Tensor) -> Tensor:
        top, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        return torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, top).sum(-1, keepdim=True)


class Centred(Mixer):
    def gate(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)  # sick
        return x - mean


class CentredByToken(Mixer):
    def gate(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Grouped(Mixer):
    def gate(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        size = flat.std(-1)  # sick
        return x / size[:, None, None]


class GroupedByToken(Mixer):
    def gate(self, x: Tensor) -> Tensor:
        return x / x.std(-1, keepdim=True)


def mixing(block: Any, expected: Any = CAUSAL) -> Any:
    def factory() -> Any:
        model = Model(fused)
        model.blocks.append(block(fused))
        return model, tokens(), expected

    return factory


def mixing_documents(block: Any) -> Any:
    def factory() -> Any:
        model = Model(of_segments)
        model.blocks.append(block(of_segments))
        return model, tokens(segment_ids=torch.arange(LENGTH).expand(2, -1) // 9), {"causal": False}

    return factory


pair("experts choose", "causality-lost", Mixer, mixing(Mixer), mixing(ByToken))
pair("mean of all tokens", "causality-lost", Centred, mixing(Centred), mixing(CentredByToken))
pair("mean of documents", "leak", Centred, mixing_documents(Centred), mixing_documents(CentredByToken))
pair("size of all tokens", "causality-lost", Grouped, mixing(Grouped), mixing(GroupedByToken))


# Rotary positions


class Rotary(nn.Module):
    """Halves are turned with tables for neighbours."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        return x + SDPA(self.turn(q), self.turn(k), v, is_causal=True).transpose(1, 2).flatten(2)

    def angles(self, x: Tensor) -> Tensor:
        rates = 0.3 ** torch.arange(x.shape[-1] // 2)
        return torch.outer(torch.arange(x.shape[-2]), rates).to(x)

    def tables(self, x: Tensor) -> Tensor:
        return self.angles(x).repeat_interleave(2, -1)

    def turn(self, x: Tensor) -> Tensor:
        angles = self.tables(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()  # sick


class RotaryHalves(Rotary):
    def tables(self, x: Tensor) -> Tensor:
        return torch.cat([self.angles(x)] * 2, -1)


class Neighbours(Rotary):
    """Neighbours are turned with tables for halves."""

    tables = RotaryHalves.tables

    def turn(self, x: Tensor) -> Tensor:
        angles = self.tables(x)
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angles.cos() + turned * angles.sin()  # sick


class NeighboursRight(Neighbours):
    tables = Rotary.tables


class Reflected(RotaryHalves):
    """A sign is wrong, so pairs are not turned."""

    def turn(self, x: Tensor) -> Tensor:
        angles = self.tables(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([b, a], -1) * angles.sin()  # sick


class Complex(Rotary):
    """The rotation as a product of complex numbers, of halves."""

    def turn(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)


class RotaryWritten(Rotary):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.turn(q) @ self.turn(k).mT * q.shape[-1] ** -0.5
        return x + (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class HalvesWritten(RotaryWritten):
    tables = RotaryHalves.tables


class Sines(nn.Module):
    """Positions are added to queries and keys in each layer, as in DETR."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(DIM)).to(x)
        q, k, v = heads_of(self.q(x + angles.sin())), heads_of(self.k(x + angles.sin())), heads_of(self.v(x))
        return x + SDPA(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def rotary(block: Any) -> Any:
    return lambda: (Model(fused, block=block), tokens(), CAUSAL)


pair("tables of neighbours", "rope", Rotary, rotary(Rotary), rotary(RotaryHalves), rotary(Sines))
pair("tables of halves", "rope", Neighbours, rotary(Neighbours), rotary(NeighboursRight), rotary(Complex))
pair("written out, tables of neighbours", "rope", Rotary, rotary(RotaryWritten), rotary(HalvesWritten))
pair("no rotation", "rope", Reflected, rotary(Reflected), rotary(RotaryHalves))


# A loop without a cache


class Forecast(nn.Module):
    """Predicts a few numbers, one after the other, from all numbers before."""

    horizon = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(1, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList([nn.Linear(DIM, 3 * DIM) for _ in range(2)])

    def block(self, inner: nn.Linear, x: Tensor, kept: list[Tensor]) -> Tensor:
        q, k, v = map(heads_of, inner(x).chunk(3, -1))
        return x + self.attend(q, k, v, kept).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]) -> Tensor:
        return SDPA(q, k, v, is_causal=True)  # sick

    @torch.no_grad()
    def forward(self, history: Tensor) -> Tensor:
        caches = [[torch.empty(0)] for _ in self.blocks]
        new = series = history
        for _ in range(self.horizon):
            x = self.embed(new)
            for inner, kept in zip(self.blocks, caches, strict=True):
                x = self.block(inner, x, kept)
            last = self.head(x[:, -1:])
            series = torch.cat([series, last], 1)
            new = self.following(series, last)
        return series[:, -self.horizon :]

    def following(self, series: Tensor, last: Tensor) -> Tensor:
        return series


class WrittenForecast(Forecast):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT * 0.2).masked_fill(later, -torch.inf).softmax(-1) @ v  # sick


class CachedForecast(Forecast):
    scale: float | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]) -> Tensor:
        if kept[0].numel():
            k, v = (torch.cat([a, b], 2) for a, b in zip(kept, (k, v), strict=True))
        kept[:] = k, v
        return SDPA(q, k, v, is_causal=q.shape[2] > 1, scale=self.scale)

    def following(self, series: Tensor, last: Tensor) -> Tensor:
        return last


class ScaledForecast(CachedForecast):
    scale = 0.2


class Bidirectional(Forecast):
    """Without a causal mask, a new number changes the second layer of all numbers. A cache cannot help."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]) -> Tensor:
        return SDPA(q, k, v)


def forecast(kind: Any) -> Any:
    return lambda: (kind(), [{"history": torch.randn(2, 9, 1)}])


cached = forecast(CachedForecast), forecast(Bidirectional)
pair("prefix again", "no-cache", Forecast, forecast(Forecast), *cached, same=True)
written = forecast(WrittenForecast)
pair("written prefix again", "no-cache", WrittenForecast, written, forecast(ScaledForecast), same=True)


# Equal queries


class Latents(nn.Module):
    """Learned queries read the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.read, self.head = nn.MultiheadAttention(DIM, HEADS, batch_first=True), nn.Linear(DIM, 3)
        self.latents = self.made()  # sick

    def made(self) -> nn.Parameter:
        return nn.Parameter(torch.zeros(6, DIM))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        return self.head(self.read(self.latents.expand(len(x), -1, -1), x, x, need_weights=False)[0].mean(1))


class RandomLatents(Latents):
    def made(self) -> nn.Parameter:
        return nn.Parameter(torch.randn(6, DIM) * 0.02)


class ZeroFirst(RandomLatents):
    """The projection of the queries begins with zeros: queries are equal, and training separates them."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.read.in_proj_weight[:DIM].detach())


class OneLatents(Latents):
    def made(self) -> nn.Parameter:
        return nn.Parameter(torch.full((6, DIM), 0.1))


class ExpandedLatents(Latents):
    """One row is copied, and the copies are parameters of their own."""

    def made(self) -> nn.Parameter:
        return nn.Parameter(torch.randn(1, DIM).repeat(6, 1))


def latents(kind: Any) -> Any:
    return lambda: (kind(), tokens())


for kind in (Latents, OneLatents, ExpandedLatents):
    twins = latents(RandomLatents), latents(ZeroFirst)
    pair(kind.__name__, "equal-queries", Latents, latents(kind), *twins[: 2 if kind is Latents else 1])


# Tensors that are kept from step to step

MAPS: list[Tensor] = []


class Kept(nn.Module):
    def __init__(self, _: Any) -> None:
        super().__init__()
        self.qkv, self.maps = nn.Linear(DIM, 3 * DIM), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        out = SDPA(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        self.keep(out)
        return x + out

    def keep(self, out: Tensor) -> None:
        self.maps.append(out.mean(-1))  # sick


class KeptNewest(Kept):
    def keep(self, out: Tensor) -> None:
        self.maps.clear()
        super().keep(out)


class KeptNumbers(Kept):
    def keep(self, out: Tensor) -> None:
        self.maps.append(out.mean(-1).detach())


class KeptOutside(Kept):
    def keep(self, out: Tensor) -> None:
        MAPS.append(out.mean(-1))  # sick


class Hooked(Kept):
    """A forward hook keeps results."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        found: list[Tensor] = []
        self.qkv.register_forward_hook(lambda *given: found.append(given[-1].square()))  # sick

    def keep(self, out: Tensor) -> None:
        pass


class Extractor:
    """Keeps results that its hook gets."""

    def __init__(self) -> None:
        self.found: deque[Tensor] = deque()

    def hook(self, *given: Any) -> None:
        self.found.append(given[-1].square())  # sick


class HookedByObject(Hooked):
    def __init__(self, attend: Any) -> None:
        super(Hooked, self).__init__(attend)
        self.qkv.register_forward_hook(Extractor().hook)


kept_twins = rotary(KeptNewest), rotary(KeptNumbers)
pair("maps in a module", "kept", Kept, rotary(Kept), *kept_twins, same=True)
pair("maps outside", "kept", KeptOutside, rotary(KeptOutside), kept_twins[0], same=True)
pair("maps of an object", "kept", Extractor, rotary(HookedByObject), kept_twins[0], same=True)
pair("maps of a hook", "kept", Hooked, rotary(Hooked), kept_twins[0], same=True)


# Copies of a mask


def copied_mask(q: Tensor, times: tuple[int, ...]) -> Tensor:
    slopes = 0.5 ** torch.arange(1, HEADS + 1).view(1, -1, 1, 1) * torch.ones(1, HEADS, 1, 1)
    distance = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
    bias = (slopes[:, : 1 if times[1] > 1 else HEADS] * distance).masked_fill(distance > 0, -torch.inf)
    return bias.repeat(*times, 1, 1).to(q)  # sick


def copying(*times: int) -> Any:
    return lambda: (Model(lambda q, k, v: SDPA(q, k, v, attn_mask=copied_mask(q, times))), tokens(), CAUSAL)


def one_copy(heads: int) -> Any:
    """The first of the copies, with the same numbers."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, attn_mask=copied_mask(q, (1, HEADS if heads == 1 else 1))[:, :heads])

    return lambda: (Model(attend), tokens(), CAUSAL)


#: The sick factory, its twin, words of the evidence, and the index of the remedy.
COPIED = {
    "batch": (copying(2, 1), one_copy(HEADS), "2 equal copies along the batch: 9.00 KiB", "mask[:1]"),
    "heads": (copying(1, HEADS), one_copy(1), "4 equal copies along the heads", "mask[:, :1]"),
    "both": (copying(2, HEADS), one_copy(1), "2 equal copies along the batch and 4", "mask[:1, :1]"),
}


def equal_padding() -> Any:
    """A mask made from the batch. In this batch, the samples have the same padding."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        shown = (attention_mask != 0)[:, None, None].expand(-1, 1, q.shape[2], -1).clone()
        return SDPA(q, k, v, attn_mask=shown)

    valid = (torch.arange(LENGTH) < 20).long().expand(2, -1)
    return Model(attend), tokens(attention_mask=valid), {"causal": False}
