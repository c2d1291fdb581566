"""Sick models that store scores, copy operands, convert them, or wait for values on the host."""

import math
import re
from functools import partial

import torch
import torch.nn.functional as F
from small_models import (
    DIM,
    EARLIER,
    HEADS,
    LENGTH,
    SDPA,
    SIZE,
    VALID,
    Model,
    builder,
    fused,
    model_of,
    tokens,
)
from torch import nn
from torch_runner import attends, lines_of, sick

from attnspan import causal
from attnspan.torch import attention
from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import KINDS

# Scores that are stored

FREE = {"expected": {}}
written_out = partial(attends, "unfused")


@written_out(SDPA, model=FREE, remedy="(q, k, v)")
def with_usual_scale(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v  # sick


@written_out(SDPA, model=FREE)
def by_einsum(q, k, v):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(q.shape[-1] ** -0.5)
    weights = F.dropout(F.softmax(weights, dim=-1), 0.0)  # sick
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@written_out(partial(SDPA, is_causal=True, scale=1.0), remedy="(q, k, v, is_causal=True, scale=1)")
def without_scale(q, k, v):
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v  # sick


@written_out(fused, remedy="(q, k, v, is_causal=True)")
def with_maximum(q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v  # sick


@written_out(lambda q, k, v: SDPA(q * 0.2, k, v, scale=0.5), model=FREE, remedy="(q, k, v, scale=0.5)")
def with_two_scales(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", ((q * 0.2) @ k.mT * 0.5).softmax(-1), v)  # sick


@written_out(lambda q, k, v: attention(q, k, v, softcap=5.0, scale=1.0), model=FREE, remedy="softcap=")
def with_softcap(q, k, v):
    return (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v  # sick


def ours_with_sinks(q, k, v):
    return attention(q, k, v, mask=causal(), sinks=torch.zeros(HEADS), scale=1.0)


@written_out(ours_with_sinks, remedy="sinks=(your sinks), scale=1")
def sinks(q, k, v):
    scores = q @ k.mT + torch.ones(LENGTH, LENGTH).triu(1) * -1e9
    both = torch.cat([torch.zeros(HEADS, 1, 1).expand(*scores.shape[:-1], 1), scores], -1)
    both = both - both.max(-1, keepdim=True).values
    return F.softmax(both, -1)[..., 1:] @ v  # sick


class Maps(nn.Module):
    """Another line needs the weights."""

    def __init__(self):
        super().__init__()
        self.maps = []

    def __call__(self, q, k, v):
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # sick
        self.maps[:] = [weights.detach().mean(1)]  # use
        return weights @ v


@builder
def with_maps():
    return Model(Maps()), tokens()


_USE = f"Keep these lines where sick_costs.py:{lines_of((Maps, '# use'))[0]} needs the weights"
sick("unfused", Maps, with_maps(), remedy=_USE, lines="# use")


def bert_padding(number):
    """A number is added to the scores of padding."""

    def attend(q, k, v, attention_mask):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + (1.0 - attention_mask[:, None, None].float()) * number
        return scores.softmax(-1) @ v  # sick

    return attend


@builder
def padded_second(number):
    """The first batch has no padding, so its mask hides nothing."""
    batches = [tokens(attention_mask=x)[0] for x in (torch.ones_like(VALID), VALID)]
    return Model(bert_padding(number)), batches


for _number in (-30.0, -100.0, -1e9):
    _says = {"name": f"padding adds {_number}", "remedy": "attn_mask=(your mask)"}
    sick("unfused", bert_padding, padded_second(_number), **_says)


# Windows: q, k and v have more elements than the batch

WINDOW, WINDOWS = 8, 3
_REGIONS = torch.tensor([0] * 5 + [1] * 3)
#: Windows of a shifted grid: the last one has tokens of two regions.
SHIFTED = torch.ones(WINDOWS, WINDOW, WINDOW, dtype=torch.bool)
SHIFTED[-1] = _REGIONS[:, None] == _REGIONS


def windows_of(x):
    return x.unflatten(2, (WINDOWS, WINDOW)).transpose(1, 2).flatten(0, 1)


def joined(x):
    return x.unflatten(0, (-1, WINDOWS)).transpose(1, 2).flatten(2, 3)


_KEPT = {
    "remedy": "Keep the mask",
    "not_tried": "heads",
    "not_evidence": "32,768",
    "not_cause": "quadratically",
}


@attends("dense-mask", model=FREE, **_KEPT)
def fused_windows(q, k, v):
    mask = SHIFTED[:, None].repeat(len(q), 1, 1, 1)  # sick
    return joined(SDPA(*map(windows_of, (q, k, v)), attn_mask=mask))


@attends("dense-mask", model=FREE, **_KEPT)
def float_windows(q, k, v):
    mask = torch.zeros(SHIFTED.shape).masked_fill(~SHIFTED, -100.0)[:, None]
    mask = mask.repeat(len(q), 1, 1, 1)  # sick
    return joined(SDPA(*map(windows_of, (q, k, v)), attn_mask=mask))


class WrittenWindows(nn.Module):
    """Attention of windows, whose mask adds a number. Only some calls have the mask."""

    calls = 0

    def __init__(self, number, every):
        super().__init__()
        self.number, self.every = number, every

    def __call__(self, q, k, v):
        batch, (q, k, v) = len(q), map(windows_of, (q, k, v))
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        if self.calls % self.every == self.every - 1:
            scores = (
                scores.unflatten(0, (batch, -1)).masked_fill(~SHIFTED[:, None], self.number).flatten(0, 1)
            )
        self.calls += 1
        return joined(scores.softmax(-1) @ v)  # sick


@builder
def written_windows(number, every=1):
    return Model(WrittenWindows(number, every), layers=2), tokens()


_MASK, _SOME = "attn_mask=(your mask)", "1 of the 2 calls here have a mask"
for _number, _every in ((-100.0, 1), (float("-inf"), 2), (-100.0, 2)):
    _says = {"remedy": _MASK, "not_remedy": _SOME} if _every == 1 else {"remedy": (_MASK, _SOME)}
    _name = f"windows, {_number}, {_every}"
    sick("unfused", WrittenWindows, written_windows(_number, _every), name=_name, **_says)


# Calls of torch's function that its fused kernels refuse: the change that lets one run


def refused(cause, remedy, *wells, **more):
    says = {"cause": (cause, "torch 2"), "remedy": remedy, "tried": "flash_attention_for_cpu runs"}
    return attends("unfused", *wells, **says, **more)


def mask_of_heads():
    return torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool).tril()


@refused(
    "mask has 3 dims", "attn_mask=mask[None]", lambda q, k, v: SDPA(q, k, v, attn_mask=mask_of_heads()[None])
)
def three_dims(q, k, v):
    return SDPA(q, k, v, attn_mask=mask_of_heads())  # sick


@refused("dropout_p is not 0", "Call attnspan.torch.attention, which stores no scores and")
def dropout(q, k, v):
    return SDPA(q, k, v, dropout_p=0.1 * torch.is_grad_enabled(), is_causal=True)  # sick


def padded_values(q, k, v):
    out = fused(q, k, F.pad(v[..., :4], (0, SIZE - 4)))[..., :4]
    return torch.cat([out, out], -1)


@refused("different head dims", "Pad v", padded_values)
def other_dim(q, k, v):
    out = SDPA(q, k, v[..., :4], is_causal=True)  # sick
    return torch.cat([out, out], -1)


@refused("not contiguous", "Keep the head dim last", fused)
def columns(q, k, v):
    q = q.mT.contiguous().mT
    return SDPA(q, k, v, is_causal=True)  # sick


@refused("3 dims instead of 2 or 4; q and v", "attn_mask=mask[None]. Pad v")
def two_reasons(q, k, v):
    return SDPA(q, k, v[..., :4], attn_mask=mask_of_heads()).repeat(1, 1, 1, 2)  # sick


@refused("requires a gradient", "bias=mask", model=FREE)
def learned_mask(q, k, v):
    mask = torch.zeros(q.shape[2], q.shape[2], requires_grad=True)
    return SDPA(q, k, v, attn_mask=mask)  # sick


class Multihead(nn.Module):
    weights = True

    def __init__(self, _):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=self.weights)[0]  # sick


class MultiheadUsed(Multihead):
    def forward(self, x):
        out, weights = self.inner(x, x, x)  # sick
        return x + out * weights.sum()


class MultiheadFused(Multihead):
    weights = False


class EncoderLayer(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)  # sick


def of_blocks(*blocks):
    return (model_of(block=x, expected={}) for x in blocks)


_WEIGHTS = "need_weights=False"
_REFUSE = {
    "cause": "torch's fused kernels refuse dropout on cpu with torch 2",
    "tried": "with need_weights=False and dropout=0.0, aten._scaled_dot_product_flash",
}
for _block, _wells, _says in (
    (Multihead, [MultiheadFused], {"remedy": _WEIGHTS, "tried": "for_cpu runs"}),
    (MultiheadUsed, [], {"remedy": _WEIGHTS, "tried": "the weights are used"}),
    (EncoderLayer, [], _REFUSE),
):
    sick("unfused", _block, *of_blocks(_block, *_wells), **_says)


# Copies of keys and values for more heads

SHARED = {"kv_heads": 2}


def shared(q, k, v):
    return SDPA(q, k, v, is_causal=True, enable_gqa=True)


def gathered(x):
    index = torch.tensor([0, 0, 1, 1]).view(1, -1, 1, 1).expand(len(x), -1, *x.shape[2:])
    return x.gather(1, index)  # sick


def by_view(x, dim):
    """Copy heads in groups (2), or all heads (1)."""
    b, h, s, d = x.shape
    return x.unsqueeze(dim).expand(b, *((2, h) if dim == 1 else (h, 2)), s, d).reshape(b, 2 * h, s, d)  # sick


_TILED = "order = torch.arange(4).view(2, 2).T.flatten(): call"
_MIRRORED, _SWAPPED = (f"order = torch.tensor([{x}]): call" for x in ("0, 3, 1, 2", "2, 3, 0, 1"))
#: Ways to copy heads, and the order of query heads in the remedy, or what else it says.
COPIED = {
    "tiled": (lambda x: x.repeat(1, 2, 1, 1), _TILED),  # sick
    "tiled by cat": (lambda x: torch.cat([x, x], 1), _TILED),  # sick
    "tiled by view": (partial(by_view, dim=1), _TILED),
    "tiled tokens": (lambda x: x.transpose(1, 2).repeat(1, 1, 2, 1).transpose(1, 2), _TILED),  # sick
    "mirrored": (lambda x: x[:, torch.tensor([0, 1, 1, 0])], _MIRRORED),  # sick
    "swapped": (lambda x: x[:, torch.tensor([1, 1, 0, 0])], _SWAPPED),  # sick
    "uneven": (lambda x: x[:, torch.tensor([0, 0, 0, 1])], "Keep the copy"),  # sick
    "interleaved": (lambda x: x.repeat_interleave(2, 1), ""),  # sick
    "grouped by stack": (lambda x: torch.stack([x, x], 2).flatten(1, 2), ""),  # sick
    "grouped by repeat": (lambda x: x[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2), ""),  # sick
    "grouped by view": (partial(by_view, dim=2), ""),
    "indexed": (lambda x: x[:, torch.tensor([0, 0, 1, 1])], ""),  # sick
    "gathered": (gathered, ""),
    "scaled": (lambda x: x.repeat(1, 2, 1, 1).mul_(2), "Check first that the copy does so"),  # sick
}
#: The usual remedy.
GQA = "=" + KINDS["kv-copy"].remedy


def with_copies(copied):
    def attend(q, k, v):
        return SDPA(q, copied(k), copied(v), is_causal=True)

    return attend


def written_with_copies(copied):
    def attend(q, k, v):
        return (q @ copied(k).mT).softmax(-1) @ copied(v)

    return attend


def with_order(order):
    return lambda q, k, v: shared(q[:, order], k, v)[:, order.argsort()]


for _name, (_copied, _said) in COPIED.items():
    _order = re.search("order = (.*): call", _said)
    _well = shared if _said == "" else with_order(eval(_order[1])) if _order else None
    _made, *_wells = (model_of(x, **SHARED) for x in (with_copies(_copied), _well) if x is not None)
    sick("kv-copy", _copied, _made, *_wells, name=_name, remedy=_said or GQA)
    if _name in ("tiled", "mirrored", "uneven", "interleaved", "scaled"):
        _made, _name = model_of(written_with_copies(_copied), **SHARED, **FREE), f"{_name}, written out"
        sick("kv-copy", _copied, _made, name=_name, remedy=_said or GQA)


@builder
def in_inference(attend):
    class Decoder(Model):
        @torch.inference_mode()
        def forward(self, input_ids):
            return super().forward(input_ids)

    return Decoder(attend, **SHARED), tokens()


for _name in ("tiled", "interleaved", "grouped by view"):
    _copied, _said = COPIED[_name]
    _made = in_inference(written_with_copies(_copied))
    sick("kv-copy", _copied, _made, name=f"{_name}, in inference mode", remedy=_said or GQA)


# Copies that only make operands contiguous


def with_copy(copied):
    return lambda q, k, v: SDPA(copied(q), copied(k), copied(v), is_causal=True)


def into_zeros(x):
    room = torch.zeros(x.shape)
    room[:] = x  # sick
    return room


for _name, _copied in {
    "contiguous": lambda x: x.contiguous(),  # sick
    "into empty": lambda x: torch.empty(x.shape).copy_(x),  # sick
    "into new": lambda x: x.new_empty(x.shape).copy_(x),  # sick
    "into zeros": into_zeros,
}.items():
    sick("copy", _copied, model_of(with_copy(_copied)), model_of(fused), name=_name, remedy="Remove the copy")


# Wider dtypes


HALF = {"dtype": torch.bfloat16}
PAIRS = 2 * HEADS * LENGTH**2  # scores of a call
WIDE_SCORES = "Scores of bfloat16 are computed in float32"


def rotated(q, k, wide):
    cos = torch.linspace(0, 1, q.shape[2])[:, None].cos()
    return (q * cos, k * cos) if wide else ((q * cos).to(q), (k * cos).to(k))


def narrow_rotated(q, k, v):
    return SDPA(*rotated(q, k, wide=False), v, is_causal=True)


@attends("upcast", narrow_rotated, model=HALF, remedy="Convert q, k and v")
def wide_rotated(q, k, v):
    cos = torch.linspace(0, 1, q.shape[2])[:, None].cos()
    q, k = q * cos, k * cos  # sick
    return SDPA(q, k, v.float(), is_causal=True).to(v.dtype)


@attends("upcast")
def double(q, k, v):
    turn = torch.arange(q.shape[2], dtype=torch.float64)[:, None].cos()
    q, k, v = q * turn, k * turn, v.double()  # sick
    return SDPA(q, k, v, is_causal=True).float()


def unscaled(q, k, v):
    return SDPA(q, k, v, is_causal=True, scale=1.0)


def wide(what, size, **more):
    return attends("upcast", unscaled, model=HALF, what=what, evidence=bytes_text(size), **more)


@wide(WIDE_SCORES, 2 * 4 * PAIRS, remedy="F.scaled_dot_product_attention")
def wide_softmax(q, k, v):
    scores = (q @ k.mT).masked_fill(~EARLIER, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v  # sick


@wide(WIDE_SCORES, 3 * 4 * PAIRS)
def wide_scores(q, k, v):
    scores = (q @ k.mT).float()  # sick
    return scores.masked_fill(~EARLIER, -torch.inf).softmax(-1).to(v.dtype) @ v


@wide("Attention runs in float32", 4 * PAIRS)
def wide_product(q, k, v):
    q, k = q.float(), k.float()  # sick
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1).to(v.dtype) @ v


# Values that the host reads


def raises(x):
    if x.abs().max().item() > 1e4:  # sick
        raise ValueError("q is too large")
    return 0


def asserts(x):
    torch._assert_async(x.abs().max() <= 1e4)
    return 0


def adding(read):
    return model_of(lambda q, k, v: fused(q, k, v) + 0 * read(q.detach()))


#: Ways to read a value on the host, and to keep it in a tensor.
READS = {
    "tolist": (lambda x: x.mean(dim=(0, 2, 3)).tolist()[0], lambda x: x.mean(dim=(0, 2, 3))[0]),  # sick
    "numpy": (lambda x: float(x.mean().numpy()), lambda x: x.mean()),  # sick
    "nonzero": (lambda x: len((x > 1).nonzero()), lambda x: (x > 1).sum()),  # sick
    "selected": (lambda x: x[x > 1].sum(), lambda x: torch.where(x > 1, x, 0.0).sum()),  # sick
    "unique": (lambda x: len((x > 0).long().unique()), lambda _: 2),  # sick
    "text": (lambda x: 0 * len(str(x.sum())), lambda _: 0),  # sick
    "if": (raises, asserts),
}
for _name, (_read, _keep) in READS.items():
    sick("sync", _read, adding(_read), adding(_keep), name=_name, remedy="keep it in a tensor")


# Copies of a mask


def copied_mask(q, batch, heads):
    slopes = 0.5 ** torch.arange(1, HEADS + 1).view(1, -1, 1, 1)[:, : 1 if heads > 1 else HEADS]
    distance = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
    bias = (slopes * distance).masked_fill(distance > 0, -torch.inf)
    return bias.repeat(batch, heads, 1, 1).to(q)  # sick


def copies(batch, heads, kept=slice(None)):
    return lambda q, k, v: SDPA(q, k, v, attn_mask=copied_mask(q, batch, heads)[:, kept])


#: Sick models, and twins with one copy.
ONE_COPY = {}
for _name, _times, _well, _evidence, _index in (
    ("batch", (2, 1), copies(1, 1), "2 equal copies along the batch: 9.00 KiB", "mask[:1]"),
    ("heads", (1, HEADS), copies(1, HEADS, slice(1)), "4 equal copies along the heads", "mask[:, :1]"),
    ("both", (2, HEADS), copies(1, HEADS, slice(1)), "2 equal copies along the batch and 4", "mask[:1, :1]"),
):
    ONE_COPY[_name] = model_of(copies(*_times)), model_of(_well)
    _says = {"remedy": "Pass one copy, shape (1, ", "tried": f"{_index}: results differ by "}
    sick(
        "dense-mask", copied_mask, ONE_COPY[_name][0], name=f"copies of {_name}", evidence=_evidence, **_says
    )
