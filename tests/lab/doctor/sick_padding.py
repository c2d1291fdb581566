# ruff: noqa: ARG002 -- methods of one name take the same arguments
"""Sick models whose padding is seen: in attention, across to another sequence, or behind attention."""

import torch
from small_models import (
    CAUSAL,
    DIM,
    EARLIER,
    HEADS,
    INDEX,
    LENGTH,
    SDPA,
    SIZE,
    VALID,
    VOCABULARY,
    Block,
    Model,
    builder,
    heads_of,
    merged_heads,
    model_of,
    tokens,
    written,
)
from torch import nn
from torch_runner import attends, sick

from attnspan import key_padding
from attnspan.torch import attention

PADDED = {"expected": {}, "batch": {"attention_mask": VALID}}
CHANGES_NO_OTHER = "changes no other result"


# In attention: no mask, an inverted mask, a mask of 0 and 1


def adds(mask_of):
    """Give torch's function a mask, made from the padding (B, 1, 1, S) of 1 and 0."""

    def attend(q, k, v, attention_mask):
        return SDPA(q, k, v, attn_mask=mask_of(attention_mask[:, None, None]))  # sick

    return attend


def writes(change):
    """Write attention out, and change the scores by the padding."""

    def attend(q, k, v, attention_mask):
        scores = change(q @ k.mT, attention_mask[:, None, None])
        return scores.softmax(-1) @ v  # sick

    return attend


hides_keys = adds(lambda m: m != 0)
hides_scores = writes(lambda scores, m: (scores * SIZE**-0.5).masked_fill(m == 0, -torch.inf))
hides_numbers = adds(lambda m: (1.0 - m) * -1e9)
_INVERTED, _ADDED = "The padding mask is inverted", "A mask of 0 and 1 is added"


def unmasked(q, k, v, attention_mask):
    return SDPA(q, k, v)  # sick


def unmasked_scores(q, k, v, attention_mask):
    return (q @ k.mT).softmax(-1) @ v  # sick


def folded(q, k, v, mask=None, **_):
    """Heads are folded into the batch."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask[:, 0].repeat_interleave(HEADS, 0), -torch.inf)
    return (scores.softmax(-1) @ v).unflatten(0, (-1, HEADS))  # sick


def nearly(q, k, v, mask):
    """The last query sees all keys, so that an inverted mask is not the opposite of the right one."""
    last = torch.arange(q.shape[2])[:, None] == q.shape[2] - 1
    return folded(q, k, v, mask | last)


def inverted_pairs(q, k, v, attention_mask):
    valid = attention_mask.bool()
    hidden = ~(valid[:, None, :, None] & valid[:, None, None])
    return SDPA(q, k, v, attn_mask=hidden)  # sick


def without_data(scores, _):
    return scores.masked_fill(~EARLIER.mT, -torch.inf)


def fill(scores, m):
    return scores.masked_fill(m.bool(), -torch.inf)


def where(scores, m):
    return torch.where(~m.bool(), scores, -torch.inf)


def where_hidden(scores, m):
    return torch.where(m.bool(), -torch.inf, scores)


_SEEN, _MULTIPLIED = "Valid tokens", "A mask of 0 and 1 is multiplied"
_LOW = "adds 0 to padding and -1e+09 to valid tokens"
_TO_0, _TO_1 = "masked_fill(mask == 0", "masked_fill(mask != 0"
for _attend, _name, _what, _cause, _remedy in (
    (unmasked, "unmasked", _SEEN, "this call has no mask", "mask=keys(attention_mask != 0)"),
    (unmasked_scores, "unmasked scores", _SEEN, "has no mask", "keys(attention_mask != 0)"),
    (writes(without_data), "only causal", _SEEN, "has no data of attention_mask", ()),
    (adds(lambda m: ~m.bool()), "inverted", _INVERTED, "True for padding", "pass ~mask"),
    (writes(fill), "inverted fill", _INVERTED, "True for valid", "~mask"),
    (adds(lambda m: m.float() * -1e9), "inverted numbers", _INVERTED, _LOW, "Add 0 to valid tokens"),
    (writes(lambda x, m: x + m.float() * -1e9), "inverted sum", _INVERTED, _LOW, "Add 0 to valid tokens"),
    (folded, "heads in the batch", _SEEN, "has no mask", "keys(attention_mask != 0)"),
    (writes(where_hidden), "inverted where, hidden first", _INVERTED, "where hides pairs with True", "~mask"),
    (writes(where), "inverted where", _INVERTED, "torch.where keeps", "~mask"),
    (inverted_pairs, "inverted pairs", _INVERTED, "True for padding", "~mask"),
    (adds(lambda m: (1 - m.float()) * -5), "too small", _SEEN, "adds -5 to scores", "(attention_mask != 0)"),
    (adds(lambda m: m.float()), "added", _ADDED, "at most 1", "attn_mask=(mask != 0)"),
    (writes(lambda x, m: x + m), "added to scores", _ADDED, "at most 1", _TO_0),
    (writes(lambda x, m: x + (1.0 - m.float())), "added inverted", _ADDED, "at most 1", _TO_1),
    (writes(lambda x, m: x * m), "multiplied", _MULTIPLIED, "only -inf", _TO_0),
):
    _well = hides_numbers if _name == "inverted numbers" else hides_scores
    _made, _twin, _right = (model_of(x, **PADDED) for x in (_attend, _well, hides_keys))
    _says = {"what": _what, "cause": _cause, "remedy": _remedy, "tried": _remedy and CHANGES_NO_OTHER}
    sick("mask-lost", _attend, _made, _twin, _right, name=_name, right=_right, **_says)


def ours(q, k, v, attention_mask):
    return attention(q, k, v, mask=key_padding(attention_mask.sum(1)))


# Queries that see no key: what the call returns for them

NOT_OWN = INDEX[:, None] > INDEX  # query 0 sees nothing
MEAN = ": the mean of all values"


def adds_rows(mask):
    def attend(q, k, v):
        return SDPA(q, k, v, attn_mask=mask)  # sick

    return model_of(attend)


def writes_rows(number, weights=lambda x: x):
    def attend(q, k, v):
        scores = (q @ k.mT).masked_fill(~NOT_OWN, number)
        return torch.einsum("bhqk,bhkd->bhqd", weights(scores.softmax(-1)), v)  # sick

    return model_of(attend)


for _name, _code, _made, _what in (
    ("in the function", adds_rows, adds_rows(NOT_OWN), ": 0"),
    ("by a number", adds_rows, adds_rows(torch.where(NOT_OWN, 0.0, -1e9)), MEAN),
    (
        "by a small number",
        adds_rows,
        adds_rows(torch.where(NOT_OWN, 0.0, -1e4)),
        ": nearly the result without a mask",
    ),
    ("in the softmax", writes_rows, writes_rows(-torch.inf), ": NaN"),
    ("by a number in the softmax", writes_rows, writes_rows(-1e9), MEAN),
    ("cleared", writes_rows, writes_rows(-torch.inf, torch.nan_to_num), ": 0"),
):
    _says = {"not_remedy" if _what == ": 0" else "remedy": "attnspan"}
    sick("hidden-rows", _code, _made, adds_rows(EARLIER), name=_name, what=_what, **_says)


@attends(
    "hidden-rows", model={"batch": {"attention_mask": VALID}}, cause="True for valid tokens (attention_mask)"
)
def inverted_and_causal(q, k, v, attention_mask):
    """With padding at the end, valid tokens see nothing at all."""
    hidden = attention_mask[:, None, None].bool()
    scores = (q @ k.mT).masked_fill(~EARLIER, -torch.inf).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v  # sick


_WHOLE = {"batch": {"attention_mask": torch.ones_like(VALID)}}
sick(
    "hidden-rows",
    adds,
    model_of(adds(lambda m: ~m.bool()), **_WHOLE),
    name="inverted, without padding",
    remedy="=Invert the padding mask: pass ~mask",
)


class PerImage(nn.Module):
    """A learned query for each image of a row. Rows have different numbers of images."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps, self.query = keeps, nn.Parameter(torch.randn(DIM))
        self.embed, self.kv = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, input_ids, image_ids):
        shown = torch.arange(3)[:, None] == image_ids[:, None]
        q = heads_of(self.query.expand(len(input_ids), 3, -1))
        k, v = map(heads_of, self.kv(self.embed(input_ids)).chunk(2, -1))
        out = merged_heads(masked(q, k, v, shown[:, None]))
        return out if self.keeps else out[shown.any(-1)]


@builder
def per_image(keeps):
    return PerImage(keeps), tokens(image_ids=torch.stack([INDEX // 8, INDEX // 12])), {}


def masked(q, k, v, mask):
    return SDPA(q, k, v, attn_mask=mask)  # sick


sick("hidden-rows", masked, per_image(True), per_image(False), name="spare queries", what=": 0")


# Padding of another sequence


class Captioned(nn.Module):
    """Image tokens attend to each other, and to a caption with padding."""

    def __init__(self, fault, attend):
        super().__init__()
        self.fault, self.attend, self.norm = fault, attend, nn.LayerNorm(DIM)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.multihead = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def mask(self, shown):
        shown = shown[:, None, None]
        faults = {"none": None, "inverted": shown == 0, "added": shown.float()}
        return faults.get(self.fault, shown != 0)

    def across(self, x, caption, shown):
        k, v = self.kv(caption).chunk(2, -1)
        q, k, v = map(heads_of, (self.q(x), k, v))
        return merged_heads(self.attend(q, k, v, self.mask(shown)))

    def forward(self, image, caption, caption_mask):
        y = heads_of(self.norm(image))
        image = image + merged_heads(SDPA(y, y, y))
        for _ in range(2):
            image = image + self.out(self.across(image, caption, caption_mask))
        return image.unflatten(1, (4, -1)).permute(0, 3, 1, 2)


class CaptionedByModule(Captioned):
    def across(self, x, caption, shown):
        hidden = {"": shown == 0, "inverted": shown != 0}.get(self.fault)
        return self.multihead(x, caption, caption, hidden, need_weights=False)[0]  # sick


class Joint(Captioned):
    """Keys are the image's, then the caption's."""

    def across(self, x, caption, shown):
        shown = torch.cat([torch.ones(x.shape[:2]), shown], 1)
        return super().across(x, torch.cat([x, caption], 1), shown)


class Returning(Captioned):
    """Results have the caption's rows, padding included."""

    def forward(self, image, caption, caption_mask):
        return super().forward(image, caption, caption_mask), self.out(caption)


class Pooling(Captioned):
    """Attention hides the caption's padding, and the mean over the caption does not."""

    def forward(self, image, caption, caption_mask):
        mean = caption.mean(1, keepdim=True)  # sick
        return super().forward(image + mean, caption, caption_mask)


class CaptionEncoder(Captioned):
    """Self-attention over the caption, and one result for each sample."""

    def forward(self, caption, caption_mask):
        for _ in range(2):
            caption = caption + self.out(self.across(caption, caption, caption_mask))
        return caption[:, 0]


@builder
def captioned(model=Captioned, fault="", size=16, attend=masked):
    """An image of `size` tokens, and captions of 16 tokens, some padded."""
    generator = torch.Generator().manual_seed(0)
    image, caption = (torch.randn(2, n, DIM, generator=generator) for n in (size, 16))
    shown = (torch.arange(16) < torch.tensor([[5], [12]])).long()
    batch = {} if model is CaptionEncoder else {"image": image}
    return model(fault, attend), [batch | {"caption": caption, "caption_mask": shown}], {}


_HIDDEN = "=with padding hidden in this call, changed padding changes no result"
_MODULE = "=Pass key_padding_mask=(caption_mask == 0) to the module"
for _model, _fault, _code, _says in (
    (Captioned, "none", masked, {}),
    (Captioned, "added", masked, {"tried": _HIDDEN, "remedy": "=Pass a boolean mask: attn_mask=(mask != 0)"}),
    (Captioned, "inverted", masked, {"remedy": "pass ~mask"}),
    (Captioned, "none", written, {}),
    (CaptionedByModule, "none", CaptionedByModule, {"remedy": _MODULE}),
    (
        CaptionedByModule,
        "inverted",
        CaptionedByModule,
        {"remedy": "=Invert the padding mask", "tried": _HIDDEN},
    ),
    (Captioned, "none", folded, {"remedy": ".repeat_interleave(4, 0)[:, None], float(", "tried": _HIDDEN}),
    (Captioned, "inverted", folded, {"what": _INVERTED, "remedy": "pass ~mask", "tried": _HIDDEN}),
    (Joint, "none", masked, {}),
    (CaptionEncoder, "none", masked, {}),
    (CaptionEncoder, "added", masked, {}),
):
    _attend = _code if _code in (written, folded) else masked
    _sick, _well = (captioned(_model, x, attend=_attend) for x in (_fault, ""))
    _name = f"{_model.__name__}, {_fault}, {_attend.__name__}"
    sick("mask-lost", _code, _sick, _well, captioned(_model, size=20), name=_name, **_says)
sick("mask-lost", masked, captioned(Captioned, "none", 20), captioned(Returning), name="returned")
_BLIND = {"cause": "hides real keys", "remedy": "Make the mask", "tried": "38 queries would see no key"}
_sick = captioned(Captioned, "inverted", 20, attend=nearly)
sick("mask-lost", folded, _sick, captioned(size=20, attend=folded), name="blind", **_BLIND)
sick("mask-lost", Pooling, captioned(Pooling))


class Translating(nn.Module):
    """Self-attention and cross-attention share a function, and have equal numbers of queries and keys."""

    def __init__(self, right, attend, size):
        super().__init__()
        self.right, self.attend, self.size = right, attend, size
        self.embed, self.q, self.kv = (
            nn.Embedding(VOCABULARY, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * DIM),
        )

    def attended(self, x, memory, mask):
        q, k, v = map(heads_of, (self.q(x), *self.kv(memory).chunk(2, -1)))
        return x + merged_heads(self.attend(q, k, v, mask))

    def forward(self, src, src_mask, tgt):
        x, memory = self.embed(tgt), self.embed(src)
        x = self.attended(x, x, EARLIER[: self.size, : self.size])
        hidden = (src_mask != 0)[:, None, None] if self.right else None
        return self.attended(x, memory, hidden).relu()  # names the call without a mask


@builder
def translating(right, attend, size=16):
    generator = torch.Generator().manual_seed(0)
    src, tgt = torch.randint(VOCABULARY, (2, 2, 16), generator=generator)
    shown = (torch.arange(16) < torch.tensor([[5], [12]])).long()
    return Translating(right, attend, size), [{"src": src, "src_mask": shown, "tgt": tgt[:, :size]}], CAUSAL


for _attend in (masked, written):
    for _size in (16, 8):
        _sick, _well = (translating(x, _attend, _size) for x in (False, True))
        _says = {"evidence": "1 of the 2 calls of this line", "tried": "changes no"}
        _says |= {"cause": "this call has no mask", "lines": "# names the call without a mask"}
        _name = f"of two calls, {_attend.__name__}, {_size}"
        sick("mask-lost", _attend, _sick, _well, name=_name, not_lines="EARLIER", **_says)


# Padding that reaches results behind attention


def shows_real(q, k, v, attention_mask):
    return SDPA(q, k, v, attn_mask=attention_mask[:, None, None] != 0)  # sick


class Pooled(Model):
    """An encoder with one result for each sample."""

    def __init__(self, pool):
        super().__init__(shows_real, layers=2)
        self.pool, self.places = pool, nn.Parameter(torch.randn(LENGTH, DIM))

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        return self.head(self.pool(self.mixed(x, attention_mask=attention_mask), attention_mask))


def last(x, _):
    return x[:, -1]  # sick


def last_real(x, attention_mask):
    return x[torch.arange(len(x)), attention_mask.sum(1) - 1]


def mean(x, _):
    return x.mean(1)  # sick


def mean_of_real(x, attention_mask):
    return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def maximum(x, _):
    return x.amax(1)  # sick


def maximum_of_real(x, attention_mask):
    return x.masked_fill(attention_mask[..., None] == 0, float("-inf")).amax(1)


@builder
def pooled(pool):
    return Pooled(pool), tokens(attention_mask=(torch.tensor([[LENGTH], [15]]) > INDEX).long()), {}


_BEFORE = ("the first operator that padding changes: mean", "attention hides the padding: 2 calls")
for _bad, _good, _remedy, _evidence in (
    (last, last_real, "attention_mask.sum(1) - 1]", ()),
    (mean, mean_of_real, "(x * attention_mask[..., None]).sum(1)", _BEFORE),
    (maximum, maximum_of_real, "float('-inf')).amax(1)", ()),
):
    sick("mask-lost", _bad, pooled(_bad), pooled(_good), remedy=_remedy, evidence=_evidence)


def mean_of_columns(x, attention_mask):
    return (x * attention_mask[..., None]).mean(1)  # sick


_LENGTH = {
    "what": "The padded length",
    "cause": "The number of padded tokens",
    "remedy": ".sum(1) / attention",
}
sick("mask-lost", mean_of_columns, pooled(mean_of_columns), pooled(mean_of_real), **_LENGTH)


class Ramped(Model):
    """Positions run from -1 to 1."""

    def __init__(self, places):
        super().__init__(shows_real)
        self.places = places

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.places(attention_mask)[..., None] * self.embed.weight[0]
        return self.head(self.mixed(x, attention_mask=attention_mask)[:, 0])


@builder
def ramped(places):
    return Ramped(places), tokens(attention_mask=(torch.tensor([[LENGTH], [15]]) > INDEX).long()), {}


def over_columns(attention_mask):
    return torch.linspace(-1, 1, attention_mask.shape[1])  # sick


def over_tokens(attention_mask):
    return 2 * INDEX[: attention_mask.shape[1]] / (attention_mask.sum(1, keepdim=True) - 1) - 1


_LENGTH = {
    "what": "The padded length",
    "cause": "linspace makes this tensor from the padded length",
    "remedy": "attention_mask.sum(1)",
    "tried": "the same results as without its padding",
    "evidence": "Other numbers in the padding change no result",
}
sick("mask-lost", over_columns, ramped(over_columns), ramped(over_tokens), **_LENGTH)

STRIDE = 4


class Subsampled(nn.Module):
    """Features (B, C, T) or (B, T, C), a layer with a stride, and attention with a mask of T / 4."""

    def __init__(self, right, channels_first):
        super().__init__()
        self.right, self.channels_first = right, channels_first
        self.inner, self.block = nn.Conv1d(10, DIM, STRIDE, STRIDE), Block(shows_real)

    def forward(self, features, attention_mask):
        x = self.inner(features if self.channels_first else features.mT).mT
        mask = attention_mask[:, ::STRIDE] if self.right else attention_mask[:, : x.shape[1]]
        return self.block(x, attention_mask=mask)


def features(real, channels_first):
    mask = (torch.arange(64) < torch.tensor([[64], [real]])).long()
    x = torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(0)) * mask[..., None]
    return {"features": x.mT.contiguous() if channels_first else x, "attention_mask": mask}


@builder
def subsampled(right, real, channels_first):
    return Subsampled(right, channels_first), [features(real, channels_first)], {}


_MASK = {"remedy": "attention_mask[:, ::stride]", "lines": "attention_mask[:, ::STRIDE] if self.right"}
for _real, _first in ((32, True), (32, False), (29, True)):
    _sick, _well = (subsampled(x, _real, _first) for x in (False, True))
    _name = f"mask of channels {'first' if _first else 'last'}, {_real} of 64"
    sick("mask-lost", shows_real, _sick, _well, name=_name, **_MASK)


class Convolved(nn.Module):
    """Padding reaches the last real token through a convolution, as in many speech encoders."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Conv1d(10, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 5, 2, padding=2))

    def forward(self, features, attention_mask):
        return self.mix(features).mT


@builder
def convolved():
    return Convolved(), [features(31, channels_first=True)], {}


sick("mask-lost", None, convolved(), name="convolution", severity="note")
