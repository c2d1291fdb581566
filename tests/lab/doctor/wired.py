"""Small models whose axes, samples, other sequences or caches are mixed up, and healthy twins.

`PAIRS` has the kind of the finding, the sick factory and its twins. The line to name ends in ``# sick``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, HEADS, LENGTH, VOCABULARY, Block, Model, fused, heads_of, tokens
from torch import Tensor, nn

from attnspan import keys
from attnspan.torch import attention

SDPA = F.scaled_dot_product_attention
ROOM = 32  # keys that a static cache has room for
#: Kind, line, sick factory, healthy twins.
PAIRS: dict[str, tuple[str, Any, Any, tuple[Any, ...]]] = {}


def pair(name: str, kind: str, code: Any, sick: Any, *twins: Any) -> None:
    PAIRS[name] = (kind, code, sick, twins)


# Heads and tokens


class Attend(nn.Module):
    """Self-attention over (B, S, C). Subclasses split heads and attend."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(self.attend(q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        return SDPA(q, k, v).transpose(1, 2).flatten(2)


class Swapped(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        return SDPA(q, k, v).flatten(2)  # sick


class SwappedCausal(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        return SDPA(q, k, v, is_causal=True).flatten(2)  # sick


class SwappedWritten(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # sick
        return (weights @ v).flatten(2)


class Split(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(len(x), HEADS, x.shape[1], -1) for x in (q, k, v))
        return SDPA(q, k, v).transpose(1, 2).flatten(2)  # sick


class Merged(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        return SDPA(q, k, v).reshape(*q.transpose(1, 2).shape[:2], -1)  # sick


class MergedWritten(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # sick
        return (weights @ v).reshape(*q.transpose(1, 2).shape[:2], -1)


class Causal(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(*(heads_of(x) for x in (q, k, v))).transpose(1, 2).flatten(2)


class Windows(Attend):
    """One head, and windows of 6 tokens in the dim of heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(*(x.unflatten(1, (-1, 6)) for x in (q, k, v))).flatten(1, 2)


class Channels(Attend):
    """Channels attend to each other, as in XCiT: the last dim has the tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(*(heads_of(x).mT for x in (q, k, v))).mT.transpose(1, 2).flatten(2)


class InBatch(Attend):
    """Heads in the dim of the batch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = SDPA(*(heads_of(x).flatten(0, 1) for x in (q, k, v)))
        return out.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


class Latents(nn.Module):
    """A diffusion transformer: tokens are numbers (B, S, C)."""

    def __init__(self, block: Any, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x + t[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def latents(block: Any, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(2, length, DIM, generator=generator), "t": torch.rand(2, generator=generator)}
    return lambda: (Latents(block), [batch])


def gpt(block: Any, **expected: Any) -> Any:
    return lambda: (Model(fused, block=block, layers=2), tokens(), expected)


_RIGHT = (latents(Attend), latents(Windows), latents(Channels), latents(InBatch), gpt(Causal, **CAUSAL))
pair("swapped", "token-axis", Swapped, latents(Swapped), *_RIGHT)
pair(
    "swapped, as many heads as tokens", "token-axis", Swapped, latents(Swapped, HEADS), latents(Attend, HEADS)
)
pair("swapped, causal", "token-axis", SwappedCausal, gpt(SwappedCausal, **CAUSAL))
pair("swapped, written out", "token-axis", SwappedWritten, latents(SwappedWritten))
pair("split by a view", "token-axis", Split, latents(Split))
pair("merged by a view", "token-axis", Merged, latents(Merged))
pair("merged by a view, written out", "token-axis", MergedWritten, latents(MergedWritten))


class OneHead(Attend):
    heads = HEADS

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)  # sick


class MeansOneHead(OneHead):
    heads = 1


pair("one head", "one-head", OneHead, latents(OneHead), latents(MeansOneHead))


# Samples of the batch


class Places(nn.Module):
    """Tokens with positions, and one of torch's modules. `dim` is the dim of the tokens."""

    def __init__(self, *, batch_first: bool, layer: bool = False, dim: int = 1, places: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM) if places else None
        self.dim, self.head = dim, nn.Linear(DIM, VOCABULARY)
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        if layer:
            self.attend = nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=batch_first)
        self.layer = layer

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.places is not None:
            index = torch.arange(x.shape[self.dim])
            x = x + self.places(index if self.dim == 1 else index[:, None])
        if self.layer:
            return self.head(self.attend(x))  # sick: layer
        return self.head(x + self.attend(x, x, x, need_weights=False)[0])  # sick: attention


def placed(**options: Any) -> Any:
    return lambda: (Places(**options), tokens(batch=3))


class Patches(nn.Module):
    """Cuts a signal into patches of 4 numbers, attends, and returns one result for each sample."""

    def __init__(self, *, batch_first: bool, weights: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.places = nn.Conv1d(3, DIM, 4, 4), nn.Parameter(torch.randn(1, 8, DIM))
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.norm, self.head, self.weights = nn.LayerNorm(DIM), nn.Linear(DIM, 5), weights

    def forward(self, signal: Tensor) -> Tensor:
        x = self.cut(signal.mT).mT + self.places
        x = x + self.attend(x, x, x, need_weights=self.weights)[0]  # sick
        return self.head(self.norm(x).mean(1))


class AlsoOverSamples(Patches):
    """Attends over the patches, and then over the samples, as some models do on purpose."""

    def forward(self, signal: Tensor) -> Tensor:
        x = self.cut(signal.mT).mT + self.places
        x = x + self.attend(x, x, x)[0]
        y = x.transpose(0, 1)
        return self.head(self.norm(x + self.attend(y, y, y)[0].transpose(0, 1)).mean(1))


def patched(kind: Any = Patches, **options: Any) -> Any:
    return lambda: (kind(**options), [{"signal": torch.randn(4, 32, 3)}])


class Joined(Attend):
    """Samples stand behind each other in one row."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        joined = (heads_of(x.flatten(0, 1)[None]) for x in (q, k, v))
        return SDPA(*joined).transpose(1, 2).flatten(2).view(q.shape)  # sick


class Separated(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        joined = (heads_of(x.flatten(0, 1)[None]) for x in (q, k, v))
        rows = torch.arange(len(q)).repeat_interleave(q.shape[1])
        out = SDPA(*joined, attn_mask=rows[:, None] == rows)
        return out.transpose(1, 2).flatten(2).view(q.shape)


_FIRST = placed(batch_first=True)
#: Right models for which dim 0 may be the sequence.
_LAST = (placed(batch_first=False, dim=0), placed(batch_first=False, places=False))
pair("batch last", "sample-axis", "attention", placed(batch_first=False), _FIRST, *_LAST)
_CUT = (patched(batch_first=True), patched(AlsoOverSamples, batch_first=False))
pair("batch last, of patches", "sample-axis", Patches.forward, patched(batch_first=False), *_CUT)
_SCORES = patched(batch_first=False, weights=True)
pair(
    "batch last, with weights",
    "sample-axis",
    Patches.forward,
    _SCORES,
    patched(batch_first=True, weights=True),
)
_LAYER = placed(batch_first=False, layer=True)
pair("batch last in a layer", "sample-axis", "layer", _LAYER, placed(batch_first=True, layer=True))
pair("joined", "samples", Joined, latents(Joined), latents(Separated))


# Keys of another sequence


class Cross(nn.Module):
    """An encoder, and a decoder that sees the encoder's results."""

    def __init__(self, cross: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder, self.decoder = nn.Embedding(VOCABULARY, DIM), Attend(), Causal()
        self.cross, self.head = cross(), nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(self.embed(input_ids))
        x = self.decoder(self.embed(decoder_input_ids))
        return self.head(x + self.cross(x, memory))


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, (k, v) = heads_of(self.q(x)), map(heads_of, self.kv(memory).chunk(2, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)


class SeeingCausally(Seeing):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, is_causal=True)  # sick


class SeeingByMask(Seeing):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        mask = torch.zeros(later.shape).masked_fill(later, -1e9)
        return SDPA(q, k, v, attn_mask=mask)  # sick


class SeeingWritten(Seeing):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v  # sick


class SeeingShared(nn.Module):
    """Keys of the same tokens, from an earlier layer, as in YOCO."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SeeingCausally()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x, x.flip(-1)) + memory.mean(1, keepdim=True)


def crossed(cross: Any, length: int = 15, **more: Any) -> Any:
    ids = tokens()[0]["input_ids"]
    batch = {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :length]}
    return lambda: (Cross(cross), [batch], CAUSAL | more)


_WELL = (crossed(Seeing), crossed(SeeingShared), crossed(SeeingCausally, streaming=True))
pair("causal across", "cross-causal", SeeingCausally, crossed(SeeingCausally), *_WELL)
pair("causal across, of one length", "cross-causal", SeeingCausally, crossed(SeeingCausally, LENGTH))
pair("causal across by a mask", "cross-causal", SeeingByMask, crossed(SeeingByMask))
pair("causal across, written out", "cross-causal", SeeingWritten, crossed(SeeingWritten))


# Empty slots of a cache


class Static(nn.Module):
    """Decoding with a cache that has room for more keys than were written."""

    written = 11

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        kept = torch.zeros(2, 1, HEADS, ROOM, DIM // HEADS)
        kept[..., : self.written, :] = torch.randn(kept[..., : self.written, :].shape)
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(y) for y in self.qkv(x).chunk(3, -1))
        k, v = (self.update(i, y) for i, y in enumerate((k, v)))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)

    def update(self, number: int, x: Tensor) -> Tensor:
        kept = self.kept[number].expand(len(x), -1, -1, -1).to(x.dtype)
        index = torch.arange(self.written, self.written + x.shape[2])
        return kept.index_copy(2, index, x)

    def mask(self, q: Tensor) -> Tensor:
        index = torch.arange(ROOM)
        return index <= self.written + torch.arange(q.shape[2])[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, attn_mask=self.mask(q))


class Unmasked(Static):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)  # sick


class UnmaskedWritten(Static):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v  # sick


class HalfMasked(Static):
    """The mask hides later tokens of this step, and shows the empty slots behind them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = self.written + q.shape[2]
        mask = self.mask(q) | (torch.arange(ROOM) >= stop)
        return SDPA(q, k, v, attn_mask=mask)  # sick


class Measured(Static):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=keys(torch.arange(ROOM) < self.written + q.shape[2]))


class Zero(nn.Module):
    """One key of zeros that is meant."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True, add_zero_attn=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def decoding(block: Any, length: int = 1) -> Any:
    return lambda: (Model(fused, block=block), tokens((length,)))


pair("empty slots", "empty-slots", Unmasked, decoding(Unmasked), decoding(Static), decoding(Measured))
pair(
    "empty slots, written out",
    "empty-slots",
    UnmaskedWritten,
    decoding(UnmaskedWritten, 3),
    decoding(Zero, 9),
)
pair("empty slots behind a mask", "empty-slots", HalfMasked, decoding(HalfMasked, 3), decoding(Static, 3))


# Softmax over another dim than the keys


class Written(Attend):
    """Attention that is written out. Subclasses make weights of scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        return (self.weights(q @ k.mT / math.sqrt(q.shape[-1])) @ v).transpose(1, 2).flatten(2)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class OverQueries(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)  # sick


class OverHeads(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=1)  # sick


class ByEinsum(Attend):
    """Scores (B, Sq, Sk, H), as in a popular page about diffusion models."""

    dim = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(self.dim + 1)  # sick
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class ByEinsumRight(ByEinsum):
    dim = 2


class Slots(Attend):
    """Slot attention: inputs are shared among slots, and each slot's weights are divided by their sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = (q @ k.mT).softmax(1)
        return (shares / shares.sum(-1, keepdim=True)) @ v


class Transposed(Attend):
    """Scores (Sk, Sq): the softmax over dim -2 is the one over the keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ q.mT).softmax(-2).mT @ v


class Blind(Written):
    """The first query sees no key, so its weights are NaN."""

    def weights(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0)
        return super().weights(scores.masked_fill(hidden, -torch.inf))


_SOFTMAX = (latents(Written), latents(Slots), latents(Transposed), latents(ByEinsumRight))
pair("softmax over queries", "softmax-axis", OverQueries, latents(OverQueries), *_SOFTMAX)
pair("softmax over heads", "softmax-axis", OverHeads, latents(OverHeads))
pair("softmax of an einsum", "softmax-axis", ByEinsum, latents(ByEinsum))


# Keys and values of different heads


def tiled_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1)  # sick
    return fused(q, k, v)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def indexed_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, [0, 0, 1, 1]], v[:, [0, 1, 0, 1]]  # sick
    return fused(q, k, v)


def shared(attend: Any) -> Any:
    return lambda: (Model(attend, kv_heads=2), tokens(), CAUSAL)


pair("tiled keys", "head-order", tiled_keys, shared(tiled_keys), shared(tiled))
pair("indexed values", "head-order", indexed_values, shared(indexed_values), shared(tiled))


# Padding in front of the tokens


class Padded(Model):
    """Learned positions. `moves` says whether padding in front moves them."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__(self.attended)
        self.position, self.moves, self.drop = nn.Embedding(LENGTH, DIM), moves, nn.Dropout(0.1)

    @staticmethod
    def attended(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        own = torch.eye(q.shape[2], dtype=torch.bool)
        seen = attention_mask[:, None, None].bool() & own.new_ones(own.shape).tril()
        return SDPA(q, k, v, attn_mask=seen | own)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **given: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        if not self.moves:
            places = given.get("position_ids", (attention_mask.cumsum(-1) - 1).clamp(min=0))
        x = self.drop(self.embed(input_ids) + self.encode(places))
        for block in self.blocks:
            x = block(x, attention_mask=attention_mask)
        return self.head(x)

    def encode(self, places: Tensor) -> Tensor:
        return self.position(places)  # sick


class PaddedRelative(Padded):
    """Without absolute positions, padding may move tokens."""

    def encode(self, places: Tensor) -> Tensor:
        return 0 * self.position(places)


def padded(kind: Any, *, positions: bool = False, **options: bool) -> Any:
    mask = torch.stack([torch.arange(LENGTH) >= 6, torch.ones(LENGTH)]).long()
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    return lambda: (kind(**options), tokens(attention_mask=mask, **more), CAUSAL)


_UNMOVED = (padded(Padded, moves=False), padded(Padded, positions=True, moves=False))
_RELATIVE = padded(PaddedRelative, moves=True)
pair("left padding", "positions", Padded.encode, padded(Padded, moves=True), *_UNMOVED, _RELATIVE)


# Masks behind the softmax


# Own keys in a decode step


class Decoder(nn.Module):
    """A prefill, and three decode steps with a cache. `shows` says whether keys see themselves in each."""

    def __init__(self, shows: tuple[bool, bool], window: int = LENGTH, adds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shows, self.window, self.adds = shows, window, adds
        self.embed, self.attend = nn.Embedding(VOCABULARY, DIM), DecoderAttention()
        self.head = nn.Linear(DIM, VOCABULARY)

    def mask(self, positions: Tensor, k_len: int, shows_own: bool) -> Tensor:
        distance = positions[:, None] - torch.arange(k_len)
        shown = (distance >= (0 if shows_own else 1)) & (distance < self.window)
        shown[:, 0] |= positions == 0  # The first query needs a key.
        return torch.zeros(shown.shape).masked_fill(~shown, -torch.inf) if self.adds else shown

    def forward(self, input_ids: Tensor) -> Tensor:
        x, index = self.embed(input_ids), torch.arange(input_ids.shape[1])
        x = x + (index[:, None] / torch.arange(1, DIM + 1)).sin()
        size = x.shape[1] - 3
        self.attend.cache = x.new_zeros(2, *x.shape)
        prefill = self.attend(x[:, :size], index[:size], self.mask(index[:size], size, self.shows[0]))
        steps = [
            self.attend(
                x[:, i : i + 1], index[i : i + 1], self.mask(index[i : i + 1], x.shape[1], self.shows[1])
            )
            for i in range(size, x.shape[1])
        ]
        return self.head(torch.cat([prefill, *steps], 1))


class DecoderAttention(Attend):
    cache: Tensor

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        q, *written = self.qkv(self.norm(x)).chunk(3, -1)
        self.cache[:, :, positions] = torch.stack(written)
        k, v = self.cache[:, :, : mask.shape[1]]
        out = SDPA(heads_of(q), heads_of(k), heads_of(v), attn_mask=mask)  # sick
        return x + self.out(out.transpose(1, 2).flatten(2))


def decoded(*shows: bool, **options: Any) -> Any:
    return lambda: (Decoder(shows, **options).requires_grad_(False), tokens(), CAUSAL)


for _name, _options in (("", {}), (" in a window", {"window": 6}), (" by added numbers", {"adds": True})):
    _sick, _well, _strict = (decoded(*x, **_options) for x in ((True, False), (True, True), (False, False)))
    # A model may hide own keys on purpose, everywhere.
    pair(
        f"own key hidden{_name}", "own-key", DecoderAttention, _sick, _well, decoded(False, False, **_options)
    )


# Padding of another sequence


class Captioned(nn.Module):
    """Image tokens attend to each other, and to a caption with padding. `sick` is the planted fault."""

    def __init__(self, sick: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sick, self.norm = sick, nn.LayerNorm(DIM)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.multihead = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def mask(self, shown: Tensor) -> Tensor | None:
        if self.sick in ("none", "joint"):
            return None
        if self.sick == "inverted":
            return (shown == 0)[:, None, None]
        if self.sick == "added":
            return shown[:, None, None].float()
        return (shown != 0)[:, None, None]

    def across(self, x: Tensor, caption: Tensor, shown: Tensor) -> Tensor:
        k, v = self.kv(caption).chunk(2, -1)
        q, k, v = map(heads_of, (self.q(x), k, v))
        return SDPA(q, k, v, attn_mask=self.mask(shown)).transpose(1, 2).flatten(2)  # sick

    def forward(self, image: Tensor, caption: Tensor, caption_mask: Tensor) -> Any:
        y = heads_of(self.norm(image))
        image = image + SDPA(y, y, y).transpose(1, 2).flatten(2)
        for _ in range(2):
            image = image + self.out(self.across(image, caption, caption_mask))
        return image.unflatten(1, (4, -1)).permute(0, 3, 1, 2)


class CaptionedByWeights(Captioned):
    def across(self, x: Tensor, caption: Tensor, shown: Tensor) -> Tensor:
        k, v = self.kv(caption).chunk(2, -1)
        scores = heads_of(self.q(x)) @ heads_of(k).mT
        if self.sick != "none":
            scores = scores.masked_fill((shown == 0)[:, None, None], -torch.inf)
        return (scores.softmax(-1) @ heads_of(v)).transpose(1, 2).flatten(2)  # sick


class CaptionedByModule(Captioned):
    def across(self, x: Tensor, caption: Tensor, shown: Tensor) -> Tensor:
        hidden = None if self.sick else shown == 0
        return self.multihead(x, caption, caption, hidden, need_weights=False)[0]  # sick


class Joint(Captioned):
    """Keys are the image's, then the caption's."""

    def across(self, x: Tensor, caption: Tensor, shown: Tensor) -> Tensor:
        q = heads_of(self.q(x))
        k, v = (heads_of(y) for y in self.kv(torch.cat([x, caption], 1)).chunk(2, -1))
        every = torch.cat([torch.ones(x.shape[:2]), shown], 1)[:, None, None] != 0
        mask = None if self.sick else every
        return SDPA(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)  # sick


class Returning(Captioned):
    """Results have the caption's rows, padding included."""

    def forward(self, image: Tensor, caption: Tensor, caption_mask: Tensor) -> Any:
        return super().forward(image, caption, caption_mask), self.out(caption)


class Pooling(Captioned):
    def forward(self, image: Tensor, caption: Tensor, caption_mask: Tensor) -> Any:
        return super().forward(image + caption.mean(1, keepdim=True), caption, caption_mask)


class CaptionEncoder(Captioned):
    """Self-attention over the caption, and one result for each sample."""

    def forward(self, caption: Tensor, caption_mask: Tensor) -> Any:
        for _ in range(2):
            caption = caption + self.out(self.across(caption, caption, caption_mask))
        return caption[:, 0]


def captioned(model: Any, sick: str = "", size: int = 16) -> Any:
    """An image of `size` tokens, and captions of 16 tokens, some padded."""

    def factory() -> Any:
        generator = torch.Generator().manual_seed(0)
        image, caption = (torch.randn(2, n, DIM, generator=generator) for n in (size, 16))
        shown = (torch.arange(16) < torch.tensor([[5], [12]])).long()
        batch = {"image": image, "caption": caption, "caption_mask": shown}
        if model is CaptionEncoder:
            del batch["image"]
        return model(sick), [batch]

    return factory


for _model, _faults in (
    (Captioned, ("none", "added", "inverted")),
    (CaptionedByWeights, ("none",)),
    (CaptionedByModule, ("none",)),
    (Joint, ("joint",)),
    (CaptionEncoder, ("none", "added")),
):
    for _fault in _faults:
        _code = _model if _model is not CaptionEncoder else Captioned
        _well = captioned(_model) if _fault == "none" else captioned(_model, size=20)
        _name = f"{_fault} padding mask of {_model.__name__}"
        pair(_name, "mask-lost", _code.across, captioned(_model, _fault), _well)
pair(
    "padding of a caption",
    "mask-lost",
    Captioned.across,
    captioned(Captioned, "none", 20),
    captioned(Returning),
)


class Late(Written):
    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        return weights.tril()  # sick


class LateFilled(Written):
    def weights(self, scores: Tensor) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.softmax(-1)
        return weights.masked_fill(later, 0.0)  # sick


class LateDivided(Written):
    """The mask behind the softmax is right if the weights are divided by their sum again."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1).tril()
        return weights / weights.sum(-1, keepdim=True)


#: Sick factory and the class with its line. Their kind is `causality-lost`.
LATE = {x.__name__: (gpt(x, **CAUSAL), x) for x in (Late, LateFilled)}
well_late = gpt(LateDivided, **CAUSAL)


# Counters and lists that change in each call


class Flagged(Block):
    """Counts its calls in a dict."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.flags: dict[str, Any] = {"calls": self.first()}

    def first(self) -> Any:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        self.flags["calls"] += 1  # sick
        return super().forward(x) + self.flags["calls"]


class FlaggedByTensor(Flagged):
    def first(self) -> Any:
        return torch.tensor(0)


STEPS = [0]


class Global(Block):
    def forward(self, x: Tensor) -> Tensor:
        STEPS[0] += 1  # sick
        return super().forward(x) * STEPS[0]


class Growing(Block):
    """Keeps a number of each call, which nothing uses."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept.append(out.detach().mean())  # sick
        return out


class Summed(Growing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(self.kept)


class Warmed(Block):
    """Receives a temperature, which the model sets to another Python number in each call."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.temperature = 1.0
        self.compile(backend="aot_eager")

    def number(self, calls: int) -> float:
        return calls

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature  # sick


class WarmedScale(Warmed):
    """The temperature is an argument that takes only a Python number."""

    def number(self, calls: int) -> float:
        return 1 + calls / 8

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        out = SDPA(heads_of(q), heads_of(k), heads_of(v), scale=self.temperature)  # sick
        return x + self.out(out.transpose(1, 2).flatten(2))


class Warming(Model):
    calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            block.temperature = block.number(self.calls)
        return super().forward(input_ids)


def warming(block: Any) -> Any:
    return lambda: (Warming(fused, block=block), tokens((LENGTH,) * 4), CAUSAL)


def counting(block: Any) -> Any:
    return lambda: (Model(fused, block=block), tokens((LENGTH,) * 4), CAUSAL)
