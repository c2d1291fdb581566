# ruff: noqa: ARG002 -- methods of one name take the same arguments
"""Sick models whose masks show wrong pairs or hide too many, and masks that are needlessly dense."""

import math

import torch
import torch.nn.functional as F
from small_models import (
    CAUSAL,
    DIM,
    EARLIER,
    HEADS,
    IDS,
    INDEX,
    LENGTH,
    SDPA,
    SIZE,
    VOCABULARY,
    Block,
    Model,
    builder,
    fused,
    heads_of,
    merged_heads,
    model_of,
    of_segments,
    tokens,
)
from torch import nn
from torch_runner import attends, sick

from attnspan import alibi, causal, keys, segments, window
from attnspan.torch import attention

SAME = IDS[:, None, :, None] == IDS[:, None, None]
IS_CAUSAL = "=Pass is_causal=True. Or: pass mask=causal() to attnspan.torch.attention"
CHANGES_NO_OTHER = "changes no other result"


# Later tokens


@attends("causality-lost", fused, cause="=This call has no mask", remedy=IS_CAUSAL, tried=CHANGES_NO_OTHER)
def no_mask(q, k, v):
    return SDPA(q, k, v)  # sick


def earlier(q, k, v):
    return SDPA(q, k, v, attn_mask=EARLIER)


@attends(
    "causality-lost",
    fused,
    right=earlier,
    cause="=This call's mask also shows each token the next token",
    remedy=IS_CAUSAL,
    tried=CHANGES_NO_OTHER,
)
def next_token(q, k, v):
    return SDPA(q, k, v, attn_mask=EARLIER | EARLIER.roll(-1, 0))  # sick


@attends(
    "causality-lost",
    fused,
    right=earlier,
    cause="=The causal mask is inverted: it shows later tokens and hides earlier ones",
    remedy=IS_CAUSAL,
    tried=CHANGES_NO_OTHER,
)
def inverted_causal(q, k, v):
    return SDPA(q, k, v, attn_mask=EARLIER.mT)  # sick


@attends("causality-lost", tried="")
def not_replaced(q, k, v):
    """The call is attnspan's, and the doctor replaces torch's function."""
    return attention(q, k, v)  # sick


def with_sinks(scores, v):
    sinks = torch.zeros(HEADS, 1, 1).expand(*scores.shape[:-1], 1)
    both = torch.cat([sinks, scores], -1)
    both = both - both.max(-1, keepdim=True).values
    return F.softmax(both, -1)[..., 1:] @ v  # sick


def beside_sinks(q, k, v):
    """The first column is a sink: the diagonal above the main one is seen."""
    return with_sinks(q @ k.mT + torch.ones(LENGTH, LENGTH).triu(2) * -1e9, v)


sick("causality-lost", with_sinks, model_of(beside_sinks), name="beside sinks")


class Convolved(Block):
    """A convolution that sees the next token, or only earlier ones."""

    padding = (1, 1)

    def __init__(self, attend):
        super().__init__(attend)
        self.mix = nn.Conv1d(DIM, DIM, 3)

    def forward(self, x):
        return super().forward(self.mix(F.pad(x.mT, self.padding)).mT)


class CausalConvolved(Convolved):
    padding = (2, 0)


_CAUSAL = model_of(block=CausalConvolved)
sick("causality-lost", None, model_of(block=Convolved), _CAUSAL, name="convolution", right=_CAUSAL,
     remedy="pad a convolution on the left")  # fmt: skip


def late(q, k, v):
    weights = (q @ k.mT / SIZE**0.5).softmax(-1)
    return weights.tril() @ v  # sick


def late_filled(q, k, v):
    weights = (q @ k.mT / SIZE**0.5).softmax(-1)
    return weights.masked_fill(~EARLIER, 0.0) @ v  # sick


def late_divided(q, k, v):
    """The mask behind the softmax is right if the weights are divided by their sum again."""
    weights = (q @ k.mT / SIZE**0.5).softmax(-1).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


_BEFORE = {
    "cause": "A mask sets weights to 0 after the softmax",
    "remedy": "Hide pairs before the softmax",
    "model": {"layers": 2},
    "right": fused,
}
for _attend in (late, late_filled):
    attends("causality-lost", late_divided, **_BEFORE)(_attend)


class Mixer(Block):
    """A block without attention."""

    def forward(self, x, **_):
        return x + self.kv(x)[..., :DIM] * self.gate(x)


class ExpertsChoose(Mixer):
    dim, most = 1, 4

    def gate(self, x):
        top, chosen = self.q(x)[..., :4].softmax(-1).topk(self.most, dim=self.dim)  # sick
        return torch.zeros(*x.shape[:2], 4).scatter(self.dim, chosen, top).sum(-1, keepdim=True)


class TokensChoose(ExpertsChoose):
    dim, most = -1, 1


class Centred(Mixer):
    dim = 1

    def gate(self, x):
        mean = x.mean(self.dim, keepdim=True)  # sick
        return x - mean


class CentredByToken(Centred):
    dim = -1


class Grouped(Mixer):
    first = 1

    def gate(self, x):
        size = x.flatten(self.first).std(-1)  # sick
        return x / size.view(len(x), -1, 1)


class GroupedByToken(Grouped):
    first = 2


class Mixed(Model):
    """A block of attention, and one that mixes."""

    def __init__(self, attend, mixer):
        super().__init__(attend)
        self.blocks.append(mixer(attend))


@builder
def mixing(mixer, documents=False):
    if documents:
        return Mixed(of_segments, mixer), tokens(segment_ids=IDS), {"causal": False}
    return Mixed(fused, mixer), tokens(), CAUSAL


_MIXED = {"evidence": "changing these tokens changes"}
for _bad, _good, _operator in (
    (ExpertsChoose, TokensChoose, "topk"),
    (Centred, CentredByToken, "mean"),
    (Grouped, GroupedByToken, "std"),
):
    sick("causality-lost", _bad, mixing(_bad), mixing(_good), cause=f"{_operator} ",
         remedy="not over the tokens", **_MIXED)  # fmt: skip
sick("leak", Centred, mixing(Centred, documents=True), mixing(CentredByToken, documents=True),
     cause="mean ", remedy="stop at document borders", **_MIXED)  # fmt: skip


def shared_line(q, k, v, *, causal):
    return SDPA(q, k, v, is_causal=causal)  # sick


class TwoLayers(Model):
    """Two layers share the line of attention, and only the second one sees later tokens."""

    def __init__(self):
        super().__init__(shared_line, layers=2)

    def forward(self, input_ids):
        x = self.blocks[0](self.embed(input_ids), causal=True)
        x = self.blocks[1](x, causal=False)
        return self.head(x)


@builder
def two_layers():
    return TwoLayers(), tokens(), CAUSAL


_ONE = "1 of the 2 calls of this line show them"
_TRIED = "=with this mask, changing these tokens changes no other result"
_LINE = "x = self.blocks[1](x, causal=False)"
sick("causality-lost", shared_line, two_layers(), evidence=_ONE, tried=_TRIED, lines=_LINE)


# Keys of a cache

CACHED = 11


class Cached(nn.Module):
    """Decoding: keys of earlier tokens are in a buffer, in front of the keys of these tokens."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("cache", torch.randn(1, HEADS, CACHED, SIZE, generator=generator))

    def __call__(self, q, k, v):
        cache = self.cache.to(k.dtype).expand(len(k), -1, -1, -1)
        return self.attend(q, torch.cat([cache, k], 2), torch.cat([cache, v], 2))


@builder
def cached(attend, length=5):
    return Model(Cached(attend)), tokens((length,)), CAUSAL


@builder
def with_attention(attention_of, length=5):
    """The same with a module of its own."""
    return Model(attention_of()), tokens((length,)), CAUSAL


def by_mask(mask, **more):
    """Make attention of attnspan."""
    return lambda q, k, v, **_: attention(q, k, v, mask=mask, **more)


OURS = by_mask(causal())


def from_the_end(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])  # sick
    return SDPA(q, k, v, attn_mask=mask)


def from_the_first_key(q, k, v):
    return SDPA(q, k, v, is_causal=True)  # sick


def tril_from_the_first_key(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return SDPA(q, k, v, attn_mask=mask)  # sick


for _attend, _length in ((from_the_first_key, 5), (from_the_first_key, 1), (tril_from_the_first_key, 5)):
    sick("causal-alignment", _attend, cached(_attend, _length), cached(OURS, _length),
         right=cached(from_the_end, _length), name=f"{_attend.__name__}, {_length} queries",
         remedy="Pass mask=causal() to attnspan.torch.attention. Or: pass attn_mask=")  # fmt: skip
sick("causality-lost", no_mask, cached(no_mask), cached(OURS), name="in a cache", not_remedy="is_causal",
     remedy="Pass mask=causal() to attnspan.torch.attention")  # fmt: skip


class Static(nn.Module):
    """The first tokens of a static cache: its later keys are empty, and the first ones are these tokens'."""

    def __call__(self, q, k, v):
        k, v = (F.pad(x, (0, 0, 0, CACHED)) for x in (k, v))
        return fused(q, k, v)


class OtherSequence(nn.Module):
    """Keys of another sequence too: no key is a token's own."""

    def __call__(self, q, k, v):
        memory = torch.randn(1, HEADS, 9, SIZE, generator=torch.Generator().manual_seed(1))
        memory = memory.expand(len(q), -1, -1, -1).to(q.dtype)
        return fused(q, k, v) + SDPA(q, memory, memory)


# Documents


def documents_unseen(q, k, v, segment_ids):
    return SDPA(q, k, v, is_causal=True)  # sick


def mask_without_documents(q, k, v, segment_ids):
    return SDPA(q, k, v, attn_mask=EARLIER)  # sick


def later_documents(q, k, v, segment_ids):
    shown = segment_ids[:, None, :, None] >= segment_ids[:, None, None]
    return SDPA(q, k, v, attn_mask=shown & EARLIER)  # sick


def exact_documents(q, k, v, segment_ids):
    return SDPA(q, k, v, attn_mask=SAME & EARLIER)


PACKED = {"batch": {"segment_ids": IDS}}
for _attend, _cause in (
    (documents_unseen, "This call has no mask except is_causal=True"),
    (mask_without_documents, "This call's mask is not made from documents"),
    (later_documents, "is made from segment_ids, but it shows pairs of different documents"),
):
    attends("leak", of_segments, right=exact_documents, model=PACKED, cause=_cause,
            remedy="mask=causal() & segments(segment_ids)")(_attend)  # fmt: skip


class Shifting(Block):
    def forward(self, x, **given):
        return super().forward(x + 0.1 * x.roll(1, 1), **given)  # sick


sick("leak", Shifting, model_of(of_segments, Shifting, {}, **PACKED), model_of(of_segments, **PACKED),
     remedy="token shift, stop at document borders")  # fmt: skip


class Kept(nn.Module):
    """Keeps a mask for each length, or for each content."""

    by_content = False

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, q, k, v, segment_ids):
        key = (id(segment_ids), tuple(segment_ids.flatten().tolist())) if self.by_content else LENGTH
        if key not in self.known:
            self.known[key] = (segment_ids[:, None, :, None] == segment_ids[:, None, None]) & EARLIER
        return SDPA(q, k, v, attn_mask=self.known[key])  # sick


class KeptByContent(Kept):
    by_content = True


@builder
def two_batches(attention_of):
    batches = [tokens(segment_ids=(INDEX // n).expand(2, -1))[0] for n in (9, 5)]
    return Model(attention_of()), batches, CAUSAL


_CONTENT = two_batches(KeptByContent)
sick("leak", Kept, two_batches(Kept), _CONTENT, right=_CONTENT, remedy="keep it by these values")


class KnownTokens(Model):
    """It takes the tokens that it knows, and no others."""

    def forward(self, input_ids, **given):
        if not torch.equal(input_ids, tokens()[0]["input_ids"]):
            raise ValueError("unknown tokens")
        return super().forward(input_ids, **given)


def positions_unseen(q, k, v, position_ids):
    return SDPA(q, k, v, is_causal=True)  # sick


@builder
def known_tokens():
    return KnownTokens(positions_unseen), tokens(position_ids=(INDEX % 9).expand(2, -1)), CAUSAL


sick("leak", positions_unseen, known_tokens(), name="known tokens")


class Packed(nn.Module):
    """A model of tokens without a batch axis, which is called with a tuple."""

    def __init__(self, attend):
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, DIM), attend

    def forward(self, input_ids, cu_seqlens):
        x = heads_of(self.embed(input_ids)[None])
        return merged_heads(self.attend(x, x, x))[0]


@builder
def packed(attend):
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0))
    return Packed(attend), [(ids, torch.tensor([0, 9, 18, 24]))], CAUSAL


sick("leak", from_the_first_key, packed(from_the_first_key), packed(by_mask(causal() & segments(IDS[0]))),
     name="packed", tried=CHANGES_NO_OTHER,
     remedy="mask=causal() & segments(torch.arange(len(cu_seqlens) - 1)")  # fmt: skip


def document_case(**batch):
    """Documents in some spelling: their sick model and its twin."""
    return (
        model_of(lambda q, k, v, **_: fused(q, k, v), batch=batch),
        model_of(by_mask(causal() & segments(IDS)), batch=batch),
    )


_PAIRS = SAME[0, 0].tril()
#: Spellings of three documents of 9, 9 and 6 tokens in both rows.
SPELLINGS = {
    "cu_seqlens of a row": {"cu_seqlens": torch.tensor([0, 9, 18, 24])},
    "cu_seq_lens_q of all rows": {"cu_seq_lens_q": torch.tensor([0, 9, 18, 24, 33, 42, 48])},
    "sequence_id": {"sequence_id": IDS},
    "1-D segment_ids": {"segment_ids": IDS[0]},
    "flat doc_ids": {"doc_ids": torch.cat([IDS[0], IDS[0] + 3])},
    "1-D position_ids": {"position_ids": INDEX % 9},
    "4-D bool mask": {"attention_mask": _PAIRS.expand(2, 1, -1, -1)},
    "4-D additive mask": {"attention_mask": torch.where(_PAIRS, 0.0, -1e9).expand(2, 1, -1, -1)},
    "3-D inverted mask": {"attn_mask": ~_PAIRS.expand(2, -1, -1)},
}
_IN_TIME = torch.tensor([0, 1, 2, 2, 2, 2, 3, *range(4, 21)])
#: Tensors with such names that state nothing of the kind.
OTHERS = {
    "one document": {"segment_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
    "a window of pairs": {"attention_mask": torch.ones(LENGTH, LENGTH).tril().triu(-6).bool()[None, None]},
    "which tokens have a loss": {"loss_mask": (INDEX % 3 != 0).long().expand(2, -1)},
    "positions in time": {"position_ids": _IN_TIME.expand(3, 2, -1)},
}
for _name, _batch in SPELLINGS.items():
    sick("leak", None, *document_case(**_batch), name=_name, remedy="mask=causal() & segments(",
         tried="=with this mask, changing these tokens changes no other result")  # fmt: skip


# Masks that are needlessly dense. The first twin has the form of the remedy


FORM = {"tried": "these forms: results of 1 call differ by at most"}


@attends("dense-mask", fused, remedy="is_causal=True", **FORM)
def causal_mask(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()  # sick
    return SDPA(q, k, v, attn_mask=mask)


sick("dense-mask", from_the_end, cached(from_the_end), cached(OURS), remedy="mask=causal()",
     not_remedy="is_causal", name="decoding",
     tried=(*FORM.values(), "is_causal=True, without attn_mask: results would differ by"))  # fmt: skip


class Kept(nn.Module):
    """Attention to keys that this call and earlier calls wrote."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        for name in "kv":
            self.register_buffer(name, torch.zeros(2, HEADS, LENGTH, SIZE))

    def forward(self, q, k, v, start):
        end = start + q.shape[2]
        for store, new in (self.k, k), (self.v, v):
            store[:, :, start:end] = new
        return self.attend(q, self.k[:, :, :end], self.v[:, :, :end])


@builder
def kept(attend, starts, around=torch.enable_grad, *, frozen=True, training=True):
    """Make a decoder and its steps: new sequences, parts of a prompt, and steps of one token."""

    class Decoder(Model):
        @around()
        def forward(self, input_ids, **given):
            return super().forward(input_ids, **given)

    ((ids,),) = (x.values() for x in tokens())
    batches = [{"input_ids": ids[:, a:b], "start": a} for a, b in starts]
    return Decoder(Kept(attend)).requires_grad_(not frozen).train(training), batches, CAUSAL


def by_product(q, k, v, mask):
    scores = q @ k.mT / SIZE**0.5
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1) @ v  # sick


def by_einsum(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / SIZE**0.5
    scores = scores if mask is None else scores + mask
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)  # sick


def in_prefill(attend):
    """Only calls with several queries have a mask."""

    def masked(q, k, v):
        many, k_len = q.shape[2], k.shape[2]
        mask = None
        if many > 1:
            mask = torch.full((many, k_len), -torch.inf).triu(k_len - many + 1)  # sick
        return attend(q, k, v, mask)

    return masked


#: Tokens of each step, and the text of the trial. torch's form breaks a step with the shapes of an earlier
#: step ("parts"), or the fourth step with other shapes ("late").
STEPS = {
    "decode": (((0, 12), (12, 13), (13, 14)), "it would change results of 2 of 3 calls of this line"),
    "parts": (((0, 8), (8, 16), (16, 24)), "hides other pairs in some calls"),
    "late": (((0, 8), (0, 10), (0, 12), (12, 13)), "it would change results of 1 of 4 calls of this line"),
}
_AROUND = (torch.enable_grad, torch.no_grad, torch.inference_mode)
for _name, (_starts, _refused) in STEPS.items():
    _well = kept(OURS, _starts)
    for _attend, _around in [(by_product, x) for x in _AROUND] + [(by_einsum, torch.no_grad)]:
        _made, _call = kept(in_prefill(_attend), _starts, _around), f"{_name} {_attend.__name__}"
        sick("dense-mask", in_prefill, _made, _well, name=f"{_call} {_around.__name__}",
             remedy="=Pass mask=causal() to attnspan.torch.attention",
             tried=f"=these forms: they hide the same pairs in {len(_starts)} calls; is_causal=True, without "
             f"attn_mask: {_refused}")  # fmt: skip
        sick("unfused", _attend, _made, _well, name=f"{_call} {_around.__name__}",
             remedy="attn_mask=(your mask)", not_remedy="is_causal")  # fmt: skip


@attends("dense-mask", by_mask(window(6)), remedy="mask=window(6)", **FORM)
def window_mask(q, k, v):
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-6)  # sick
    return SDPA(q, k, v, attn_mask=mask)


@attends("dense-mask", of_segments, model=PACKED, remedy="mask=causal() & segments(segment_ids)", **FORM)
def document_mask(q, k, v, segment_ids):
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
    mask = same.tril()  # sick
    return SDPA(q, k, v, attn_mask=mask)


def valid_and_causal(q, k, v, attention_mask):
    return attention(q, k, v, mask=causal() & keys(attention_mask != 0))


@attends(
    "dense-mask",
    valid_and_causal,
    model={"batch": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}},
    remedy="mask=causal() & keys(attention_mask != 0)",
    not_remedy="Pass is_causal",
    **FORM,
)
def padding_mask(q, k, v, attention_mask):
    """Nothing is padded in this batch, but the next one may be."""
    valid = attention_mask[:, None, None].bool().expand(-1, 1, q.shape[2], -1)
    mask = valid.tril()  # sick
    return SDPA(q, k, v, attn_mask=mask)


SLOPES = 0.5 ** torch.arange(1, HEADS + 1)


@attends(
    "dense-mask", by_mask(causal(), bias=alibi(SLOPES)), remedy="mask=causal(), bias=alibi(slopes)", **FORM
)
def alibi_mask(q, k, v):
    bias = SLOPES[:, None, None] * (INDEX - INDEX[:, None])
    bias = bias.masked_fill(~EARLIER, -math.inf)  # sick
    return SDPA(q, k, v, attn_mask=bias[None].to(q.dtype))


@attends("dense-mask", model={"expected": {}})
def symmetric_bias(q, k, v):
    bias = -SLOPES[:, None, None] * (INDEX[:, None] - INDEX).abs()  # sick
    return SDPA(q, k, v, attn_mask=bias[None])


_NO_FORM = (torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5) | (
    INDEX[:, None] == INDEX
)


@attends(
    "dense-mask",
    model={"expected": {}},
    remedy="=Keep the mask: the doctor knows no shorter form with the same results",
)
def mask_without_form(q, k, v):
    mask = _NO_FORM & True  # sick
    return SDPA(q, k, v, attn_mask=mask)


class LearnedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))

    def __call__(self, q, k, v):
        bias = self.bias[None]
        return SDPA(q, k, v, attn_mask=bias)  # sick


@builder
def learned_bias():
    return Model(LearnedBias()), tokens()


sick("dense-mask", LearnedBias, learned_bias(), remedy="Keep the mask", tried="requires a gradient")


def finite_number(number):
    """A causal mask of a finite number, for torch's function."""

    def attend(q, k, v):
        mask = torch.full((q.shape[2], q.shape[2]), number).triu(1)  # sick
        return SDPA(q, k, v, attn_mask=mask)

    return attend


for _number in (-30.0, -100.0, -1e4):
    sick("dense-mask", finite_number, model_of(finite_number(_number)), model_of(fused), name=f"{_number}",
         remedy="=Pass is_causal=True, without attn_mask. Or: Pass mask=causal() to attnspan.torch.attention",
         )  # fmt: skip
