# ruff: noqa: ARG002 -- methods of one name take the same arguments
"""Sick models that mix up heads, tokens, samples, sequences or keys, or whose attention chooses nothing."""

import torch
import torch.nn.functional as F
from small_models import (
    CAUSAL,
    DIM,
    EARLIER,
    HEADS,
    LENGTH,
    SDPA,
    SIZE,
    VOCABULARY,
    Attend,
    Block,
    Cross,
    builder,
    fused,
    heads_of,
    latents,
    merged_heads,
    model_of,
    tokens,
    written,
)
from torch import nn
from torch_runner import attends, sick

# Heads and tokens


def split(*operands):
    """Split heads, and leave the tokens in front of them."""
    return (x.unflatten(-1, (HEADS, -1)) for x in operands)


def attends_here(q, k, v):
    return SDPA(q, k, v)  # sick


def normed_causal(q, k, v):
    return SDPA(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, is_causal=True)  # sick


def hidden_later(q, k, v):
    return written(q, k, v, EARLIER)


class Swapped(Attend):
    def of_tokens(self, q, k, v):
        return self.attend(*split(q, k, v)).flatten(2)


class Split(Attend):
    def of_tokens(self, q, k, v):
        return merged_heads(self.attend(*(x.reshape(len(x), HEADS, LENGTH, -1) for x in (q, k, v))))


class Merged(Attend):
    def of_tokens(self, q, k, v):
        return self.attend(*map(heads_of, (q, k, v))).reshape(q.shape)


class Windows(Attend):
    """One head, and windows of 6 tokens in the dim of heads."""

    def of_tokens(self, q, k, v):
        return SDPA(*(x.unflatten(1, (-1, 6)) for x in (q, k, v))).flatten(1, 2)


def channels(q, k, v):
    """Channels attend to each other, as in XCiT: the last dim has the tokens."""
    return SDPA(q.mT, k.mT, v.mT).mT


def in_batch(q, k, v):
    """Heads in the dim of the batch."""
    return SDPA(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (-1, HEADS))


_RIGHT = (
    latents(),
    latents(block=Windows),
    latents(channels),
    latents(in_batch),
    model_of(block=Attend, layers=2),
)
_TRIED = "=split so, changing token 12 changes query 12 of each head alone"
for _attend, _block, _says in (
    (
        attends_here,
        Swapped,
        {
            "evidence": "in all 4 rows that attend to each other",
            "remedy": "q.transpose(1, 2)",
            "tried": "changes the results of 23 other tokens in this call",
        },
    ),
    (written, Swapped, {}),
    (attends_here, Split, {"remedy": "view(B, S, heads, -1).transpose(1, 2)", "tried": _TRIED}),
    (written, Split, {"tried": _TRIED, "evidence": "changes (head, query) (2, 0), (2, 1), (2, 2), (2, 3)"}),
    (attends_here, Merged, {"tried": "the result of query 12 changes token 12 alone"}),
    (written, Merged, {}),
):
    _name = f"{_block.__name__}, {_attend.__name__}"
    sick("token-axis", _attend, latents(_attend, _block), *_RIGHT, name=_name, **_says)
_FEW = latents(attends_here, Swapped, length=HEADS), latents(length=HEADS)
sick("token-axis", attends_here, *_FEW, name="as many heads as tokens")
sick("token-axis", written, latents(hidden_later, Split), latents(hidden_later), name="hides later keys")
_NARROW = {"expected": {}, "dtype": torch.bfloat16}
_MADE = model_of(written, Split, **_NARROW), model_of(written, Attend, **_NARROW)
sick("token-axis", written, *_MADE, name="bfloat16")
sick("token-axis", normed_causal, model_of(normed_causal, Swapped, layers=2))


class OneHead(Attend):
    heads = HEADS

    def of_tokens(self, q, k, v):
        return SDPA(q, k, v)  # sick


class MeansOneHead(OneHead):
    heads = 1


sick("one-head", OneHead, latents(block=OneHead), latents(block=MeansOneHead))


# Samples of the batch


class BatchFirst(nn.Module):
    """Tokens with positions, and one of torch's modules. `dim` is the dim of the tokens."""

    def __init__(self, batch_first, dim=1, places=True):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM) if places else None
        self.dim, self.head = dim, nn.Linear(DIM, VOCABULARY)
        self.attend = self.made(batch_first)

    def made(self, batch_first):
        return nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.places is not None:
            index = torch.arange(x.shape[self.dim])
            x = x + self.places(index if self.dim == 1 else index[:, None])
        return self.head(self.mix(x))

    def mix(self, x):
        return x + self.attend(x, x, x, need_weights=False)[0]  # sick


class LayerFirst(BatchFirst):
    def made(self, batch_first):
        return nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=batch_first)

    def mix(self, x):
        return self.attend(x)  # sick


class Patches(nn.Module):
    """Cuts a signal into patches of 4 numbers, attends, and returns one result for each sample."""

    def __init__(self, batch_first, weights=False):
        super().__init__()
        self.cut, self.places = nn.Conv1d(3, DIM, 4, 4), nn.Parameter(torch.randn(1, 8, DIM))
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.norm, self.head, self.weights = nn.LayerNorm(DIM), nn.Linear(DIM, 5), weights

    def forward(self, signal):
        x = self.cut(signal.mT).mT + self.places
        return self.head(self.norm(self.mix(x)).mean(1))

    def mix(self, x):
        return x + self.inner(x, x, x, need_weights=self.weights)[0]  # sick


class AlsoOverSamples(Patches):
    """Attends over the patches, and then over the samples, as some models do on purpose."""

    def mix(self, x):
        x = x + self.inner(x, x, x)[0]
        y = x.transpose(0, 1)
        return x + self.inner(y, y, y)[0].transpose(0, 1)


@builder
def batch_first(model=BatchFirst, *options, **more):
    batch = tokens(batch=3) if issubclass(model, BatchFirst) else [{"signal": torch.randn(4, 32, 3)}]
    return model(*options, **more), batch


#: Right models for which dim 0 may be the sequence.
TOKENS_FIRST = batch_first(BatchFirst, False, dim=0), batch_first(BatchFirst, False, places=False)
_FIRST = {
    "remedy": "=Make the module with batch_first=True",
    "tried": "with batch_first=True, a changed sample changes no other sample",
}
_SAMPLES = batch_first(AlsoOverSamples, False)
for _model, _options, _twins, _says in (
    (BatchFirst, {}, TOKENS_FIRST, _FIRST),
    (LayerFirst, {}, (), {}),
    (Patches, {}, [_SAMPLES], {}),
    (Patches, {"weights": True}, (), {"name": "patches with weights"}),
):
    _made, _well = (batch_first(_model, x, **_options) for x in (False, True))
    sick("sample-axis", _model, _made, _well, *_twins, **_says)


class Joined(Attend):
    """Samples stand behind each other in one row."""

    mask = None

    def of_tokens(self, q, k, v):
        joined = (heads_of(x.flatten(0, 1)[None]) for x in (q, k, v))
        return merged_heads(SDPA(*joined, attn_mask=self.mask)).view(q.shape)  # sick


class Separated(Joined):
    rows = torch.arange(2).repeat_interleave(LENGTH)
    mask = rows[:, None] == rows


sick("samples", Joined, latents(block=Joined), latents(block=Separated))


class Placed(nn.Module):
    """Positions along the axis of the batch, or of the tokens."""

    axis = 0

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)
        self.table, self.position = torch.randn(LENGTH, DIM), nn.Embedding(LENGTH, DIM)

    def forward(self, input_ids):
        return self.block(self.encode(self.embed(input_ids)))

    def along(self, rows):
        return rows[:, None] if self.axis == 0 else rows

    def encode(self, x):
        return x + self.along(self.table[: x.shape[self.axis]])  # sick


class Embedded(Placed):
    def encode(self, x):
        return x + self.along(self.position(torch.arange(x.shape[self.axis])))  # sick


class Sloped(Placed):
    def encode(self, x):
        return x * self.along(1 / (1 + torch.arange(x.shape[self.axis])[:, None]))  # sick


@builder
def placed(model, axis):
    made = model()
    made.axis = axis
    return made, tokens(batch=3), {}


for _model in (Placed, Embedded, Sloped):
    _says = {"name": _model.__name__, "remedy": "along the axis of the tokens"}
    sick("sample-axis", _model.encode, placed(_model, 0), placed(_model, 1), **_says)


# Keys of another sequence


class Crossing(nn.Module):
    """An encoder, and a decoder that sees the encoder's results."""

    def __init__(self, attend, cross):
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Embedding(VOCABULARY, DIM), Attend(), Attend(fused)
        self.cross, self.head = cross(attend), nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids, decoder_input_ids):
        memory = self.encoder(self.embed(input_ids))
        x = self.decoder(self.embed(decoder_input_ids))
        return self.head(x + self.cross(x, memory))


class SharedKeys(Cross):
    """Keys of the same tokens, from an earlier layer, as in YOCO."""

    def forward(self, x, memory):
        return super().forward(x, x.flip(-1)) + memory.mean(1, keepdim=True)


def earlier(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def causally(q, k, v):
    return SDPA(q, k, v, is_causal=True)  # sick


def by_mask(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2]).masked_fill(~earlier(q, k), -1e9)
    return SDPA(q, k, v, attn_mask=mask)  # sick


def written_causally(q, k, v):
    return written(q, k, v, earlier(q, k))


@builder
def crossing(attend=SDPA, cross=Cross, length=15, **more):
    ids = tokens()[0]["input_ids"]
    batch = {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :length]}
    return Crossing(attend, cross), [batch], CAUSAL | more


_RIGHT = crossing(), crossing(causally, SharedKeys), crossing(causally, streaming=True)
_TRIED = "without the mask, results of this call change by"
_LAST = "no query sees the last 9 keys"
sick("cross-causal", causally, crossing(causally), *_RIGHT, evidence=_LAST, tried=_TRIED)
sick("cross-causal", causally, crossing(causally, length=LENGTH), name="of one length")
sick("cross-causal", by_mask, crossing(by_mask))
sick("cross-causal", written, crossing(written_causally))


# Softmax over another dim than the keys


def over_queries(q, k, v):
    return (q @ k.mT / SIZE**0.5).softmax(-2) @ v  # sick


def over_heads(q, k, v):
    return F.softmax(q @ k.mT / SIZE**0.5, dim=1) @ v  # sick


class ByEinsum(Attend):
    """Scores (B, Sq, Sk, H), as in a popular page about diffusion models."""

    dim = 1

    def of_tokens(self, q, k, v):
        q, k, v = split(q, k, v)
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(self.dim + 1)  # sick
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class ByEinsumRight(ByEinsum):
    dim = 2


class Slots(Attend):
    """Slot attention: inputs are shared among slots, and each slot's weights are divided by their sum."""

    def of_tokens(self, q, k, v):
        shares = (q @ k.mT).softmax(1)
        return (shares / shares.sum(-1, keepdim=True)) @ v


class TransposedScores(Attend):
    """Scores (Sk, Sq): the softmax over dim -2 is the one over the keys."""

    def of_tokens(self, q, k, v):
        return (k @ q.mT).softmax(-2).mT @ v


def blind(q, k, v):
    """The first query sees no key, so its weights are NaN. This is no softmax over another dim."""
    return written(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1))


_RIGHT = latents(written), *(latents(block=x) for x in (Slots, TransposedScores, ByEinsumRight))
sick("softmax-axis", over_queries, latents(over_queries), *_RIGHT)
sick("softmax-axis", over_heads, latents(over_heads), *_RIGHT)
sick("softmax-axis", ByEinsum, latents(block=ByEinsum), *_RIGHT)
sick("hidden-rows", written, latents(blind), name="blind")


# Keys and values of different heads


def tiled(q, k, v):
    return fused(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@attends("head-order", tiled, model={"kv_heads": 2})
def tiled_keys(q, k, v):
    k, v = k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1)  # sick
    return fused(q, k, v)


@attends("head-order", tiled, model={"kv_heads": 2})
def indexed_values(q, k, v):
    k, v = k[:, [0, 0, 1, 1]], v[:, [0, 1, 0, 1]]  # sick
    return fused(q, k, v)


# One key

FEATURES = 5


class Values(Attend):
    def of_heads(self, q, k, v):
        return v


class OneKeyOfModule(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x)[0]  # sick


class OnlyValuesOfModule(OneKeyOfModule):
    def forward(self, x):
        weight, bias = self.inner.in_proj_weight[2 * DIM :], self.inner.in_proj_bias[2 * DIM :]
        return x + self.inner.out_proj(F.linear(x, weight, bias))


class Table(nn.Module):
    """Features of a table are one token."""

    def __init__(self, attend, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(FEATURES, DIM), block(attend), nn.Linear(DIM, 3)

    def forward(self, features):
        return self.head(self.block(self.tokens(features)).mean(1))

    def tokens(self, features):
        return self.embed(features)[:, None]


class ByFeature(Table):
    def tokens(self, features):
        return features[..., None] * self.embed.weight.T + self.embed.bias


class Sequences(Table):
    def tokens(self, features):
        return self.embed(features)


@builder
def table(attend, block=Attend, kind=Table, shapes=((6, FEATURES), (4, FEATURES))):
    return kind(attend, block), [{"features": torch.randn(x)} for x in shapes]


_VALUES = {"remedy": "out_proj(v_proj(x)) has the same results", "evidence": "other queries change no result"}
_LONGER = table(SDPA, kind=Sequences, shapes=((2, 1, FEATURES), (2, 7, FEATURES)))
for _code, _made, *_wells in (
    (attends_here, table(attends_here), table(SDPA, Values), table(SDPA, kind=ByFeature), _LONGER),
    (written, table(written), table(SDPA, Values)),
    (OneKeyOfModule, table(SDPA, OneKeyOfModule), table(SDPA, OnlyValuesOfModule)),
):
    sick("one-key", _code, _made, *_wells, right=_made, lines="self.embed(features)[:, None]", **_VALUES)


class Patched(Table):
    """An image of one patch. Larger images have more patches."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.patch = nn.Conv2d(3, DIM, 4, 4)

    def tokens(self, features):
        return self.patch(features).flatten(2).mT


class Conditioned(nn.Module):
    """Patches attend to one pooled condition."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(FEATURES, 2 * DIM)

    def forward(self, x, condition):
        k, v = self.kv(condition)[:, None].chunk(2, -1)
        return x + merged_heads(SDPA(heads_of(self.q(x)), heads_of(k), heads_of(v)))  # sick


@builder
def conditioned():
    return Conditioned(), [{"x": torch.randn(2, 9, DIM), "condition": torch.randn(2, FEATURES)}]


_SHORT = "If your sequences are really this short"
_PATCH = table(attends_here, kind=Patched, shapes=((2, 3, 4, 4),))
_ALONE = table(attends_here, kind=Sequences, shapes=((2, 1, FEATURES),) * 2)
for _name, _code, _made, _remedy in (
    ("condition", Conditioned, conditioned(), "If one key is meant"),
    ("patch", attends_here, _PATCH, _SHORT),
    ("sequences of 1", attends_here, _ALONE, _SHORT),
):
    sick("one-key", _code, _made, name=_name, severity="note", remedy=_remedy)


# Equal queries


class Queries(nn.Module):
    """Learned queries read the tokens."""

    def __init__(self, latents, zero=False):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.read, self.head = nn.MultiheadAttention(DIM, HEADS, batch_first=True), nn.Linear(DIM, 3)
        self.latents = nn.Parameter(latents())  # sick
        if zero:
            nn.init.zeros_(self.read.in_proj_weight[:DIM].detach())

    def forward(self, input_ids):
        x = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        return self.head(self.read(self.latents.expand(len(x), -1, -1), x, x, need_weights=False)[0].mean(1))


@builder
def queries(latents, zero=False):
    return Queries(latents, zero), tokens()


def different():
    return torch.randn(6, DIM) * 0.02


# If the projection begins with zeros, queries are equal, and training separates them.
_DIFFERENT = queries(different), queries(different, zero=True)
for _name, _latents in (
    ("zeros", lambda: torch.zeros(6, DIM)),
    ("ones", lambda: torch.full((6, DIM), 0.1)),
    ("copies of one row", lambda: torch.randn(1, DIM).repeat(6, 1)),
):
    _says = {"remedy": "torch.randn(rows, dim)", "evidence": "and so are their gradients"}
    sick("equal-queries", Queries, queries(_latents), *_DIFFERENT, name=_name, **_says)


# Inputs that nothing depends on


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = Attend(fused), Cross()

    def forward(self, x, memory):
        x = self.own(x)
        return x + self.across(x, memory)

    def across(self, x, memory):
        return self.cross(x, memory)


class Forgetful(Layer):
    def forward(self, x, memory):
        x = self.own(x)
        return x + self.cross(x, x)  # sick


class Gated(Layer):
    """A gate of 0 lets nothing pass before training."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def across(self, x, memory):
        return self.gate.tanh() * super().across(x, memory)


class Translator(nn.Module):
    """A decoder that sees an encoder, unless its layer forgets it."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Embedding(VOCABULARY, DIM), Attend(), layer()

    def forward(self, src, tgt):
        return self.decoder(self.embed(tgt), self.encoder(self.embed(src)))


class NeverPassed(Translator):
    def forward(self, src, tgt):  # sick
        self.encoder(self.embed(src))
        x = self.embed(tgt)
        return self.decoder(x, x)


class OfCaption(Translator):
    """Keys of an image's own tokens instead of its caption's, as numbers (B, S, C)."""

    def forward(self, image, caption):
        return self.decoder(image, caption)


@builder
def translating(layer=Layer, model=Translator):
    ids = tokens()[0]["input_ids"]
    first, second = ids, ids.flip(1)[:, :15]
    if model is OfCaption:
        first, second = (F.one_hot(x, VOCABULARY)[..., :DIM] + 0.1 * torch.ones(DIM) for x in (first, second))
        return model(layer), [{"image": first, "caption": second}], {}
    return model(layer), [{"src": first, "tgt": second}], CAUSAL


_TO_CROSS = "to the cross attention, for keys and values"
_READ = "decoder (Forgetful) receives a tensor that is made from "
_twins = translating(), translating(Gated)
for _name, _code, _made, _wells, _says in (
    ("source", Forgetful, translating(Forgetful), _twins, {"remedy": _TO_CROSS, "evidence": f"{_READ}src"}),
    ("not passed", NeverPassed, translating(model=NeverPassed), _twins, {"remedy": "on to the layers"}),
    (
        *("caption", Forgetful, translating(Forgetful, OfCaption)),
        *([translating(Layer, OfCaption)], {"remedy": _TO_CROSS, "evidence": f"{_READ}caption"}),
    ),
):
    # The decoder's own tokens take the place of the source, and no mask hides later ones.
    sick("ignored-input", _code, _made, *_wells, name=_name, beside=("causality-lost",), **_says)
