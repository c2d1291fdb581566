"""Attention in needless loops, padding that no sample needs, and healthy twins."""

from functools import partial

import torch
from small_models import (
    DIM,
    EARLIER,
    HEADS,
    INDEX,
    LENGTH,
    SDPA,
    SIZE,
    VOCABULARY,
    Attend,
    Model,
    builder,
    heads_of,
    latents,
    merged_heads,
    written,
)
from torch import nn
from torch_runner import sick

from attnspan import causal, full, segments
from attnspan.torch import attention

BATCH, LENGTHS = 4, (9, 7, 5, 3)


# Loops over heads, samples and documents


plain = partial(SDPA, is_causal=True)


def here(q, k, v):
    return SDPA(q, k, v, is_causal=True)  # sick


def written_here(q, k, v):
    return written(q, k, v, EARLIER)


class Head(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(DIM, SIZE, bias=False) for _ in range(3))

    def forward(self, x):
        return self.attend(self.q(x), self.k(x), self.v(x))  # sick


class OfHeads(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.heads = nn.ModuleList([Head(attend) for _ in range(HEADS)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.out(torch.cat([head(x) for head in self.heads], -1))  # the loop


class HeadsAtOnce(OfHeads):
    """The remedy, with the weights of the heads."""

    def forward(self, x):
        q, k, v = (torch.cat([getattr(y, n).weight for y in self.heads]) for n in "qkv")
        return x + self.out(merged_heads(SDPA(*(heads_of(x @ w.T) for w in (q, k, v)), is_causal=True)))


def each_head(q, k, v):
    out = [SDPA(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)]  # sick
    return torch.stack(out, 1)


def each_sample(q, k, v):
    out = []
    for i in range(len(q)):
        mask = (LENGTH - i > INDEX).expand(1, 1, LENGTH, -1)
        out.append(SDPA(q[i : i + 1], k[i : i + 1], v[i : i + 1], attn_mask=mask))  # sick
    return torch.cat(out)


def all_samples(q, k, v):
    mask = LENGTH - torch.arange(len(q))[:, None] > INDEX
    return SDPA(q, k, v, attn_mask=mask[:, None, None])


def each_document(q, k, v):
    parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
    out = [SDPA(*x, is_causal=True) for x in zip(*parts, strict=True)]  # sick
    return torch.cat(out, 2)


def each_document_written(q, k, v):
    parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
    scores = [a @ b.mT * SIZE**-0.5 for a, b in zip(*parts[:2], strict=True)]
    out = [x.softmax(-1) @ y for x, y in zip(scores, parts[2], strict=True)]  # sick
    return torch.cat(out, 2)


def all_documents(base):
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return lambda q, k, v: attention(q, k, v, mask=base & segments(ids))


class Sampled(nn.Module):
    """Calls a module once for each sample."""

    def __init__(self, attend):
        super().__init__()
        self.inner = Attend(attend)

    def forward(self, x):
        return torch.stack([self.inner(y[None])[0] for y in x])  # the loop


class NotSampled(Sampled):
    def forward(self, x):
        return self.inner(x)


# Calls that are needed


class Gated(Attend):
    """A layer whose gate is 0 before training."""

    def __init__(self, _):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * (super().forward(x) - x)


class SharedLayer(nn.Module):
    """One layer that is called six times."""

    def __init__(self, _):
        super().__init__()
        self.layer = Attend()

    def forward(self, x):
        for _ in range(6):
            x = self.layer(x)
        return x


def recurrent(q, k, v):
    """Each chunk of tokens gets a summary of the results of the chunk before it."""
    out = [torch.zeros(len(q), HEADS, 6, SIZE)]
    for a, b, c in zip(*(x.split(6, 2) for x in (q, k, v)), strict=True):
        out.append(SDPA(a + out[-1].mean(2, keepdim=True), b, c))
    return torch.cat(out[1:], 2)


def chunks(q, k, v):
    """Parts of the queries see all keys, which stores fewer scores at a time."""
    return torch.cat([SDPA(x, k, v) for x in q.split(6, 2)], 2)


def decoding(q, k, v):
    """One token at a time, over the keys so far."""
    out = [SDPA(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(LENGTH)]
    return torch.cat(out, 2)


class ThreeHeads(OfHeads):
    def forward(self, x):
        parts = [head(x) for head in self.heads[:3]]
        return x + self.out(torch.cat([*parts, parts[0]], -1))


_FEW = {"layers": 1, "batch": BATCH}
_NEEDED = [latents(x, **_FEW) for x in (recurrent, chunks, decoding)]
_NEEDED += [latents(block=x, **_FEW) for x in (SharedLayer, ThreeHeads)]
_NEEDED += latents(layers=12), latents(block=Gated, layers=6)
_AT_ONCE, _EACH = "one call of F.scaled_dot_product_attention", "along the heads or the batch"
_LOOP = {"lines": "# the loop", "evidence": "4 calls with q of shape (4, 24, 8)"}
_SCORES = {"evidence": "4 calls with scores of shape (4, 24, 24)"}
_HEADS = latents(plain, HeadsAtOnce, **_FEW)
for _attend, _block, _well, _remedy, _says in (
    (plain, OfHeads, _HEADS, "project all heads at once", _LOOP),
    (written_here, OfHeads, _HEADS, _AT_ONCE, _SCORES),
    (each_head, Attend, latents(**_FEW), _EACH, {}),
    (each_sample, Attend, latents(all_samples, **_FEW), _EACH, {}),
    (each_document, Attend, latents(all_documents(causal()), **_FEW), "segments(ids)", {}),
    (
        each_document_written,
        Attend,
        latents(all_documents(full()), **_FEW),
        "(your mask) & segments(ids)",
        {},
    ),
    (here, Sampled, latents(here, NotSampled, **_FEW), "and call attention once", {}),
):
    _code = {written_here: written, plain: Head}.get(_attend, _attend)
    _tried = () if _attend in (written_here, each_document_written) else "differ by"
    _name, _made = f"{_block.__name__}, {_code.__name__}", latents(_attend, _block, **_FEW)
    sick(
        "loop",
        _code,
        _made,
        _well,
        *_NEEDED,
        name=_name,
        beside=("sample-axis",),
        remedy=_remedy,
        tried=_tried,
        **_says,
    )


# Padding


def hides(q, k, v, attention_mask):
    return SDPA(q, k, v, attn_mask=attention_mask[:, None, None].bool())  # sick


class OfFirst(Model):
    """Returns one result for each sample: of the first token, or the mean of all columns."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask=attention_mask)[:, 0]


class OfMean(Model):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask=attention_mask).mean(1)


@builder
def padded(model, *batches, size=64, left=False):
    """Batches have samples of some lengths, padded to one size."""
    found, index = [], torch.arange(size)
    for lengths in batches:
        mask = torch.stack([index >= size - n if left else index < n for n in lengths]).long()
        ids = torch.zeros_like(mask)
        for i, n in enumerate(lengths):
            ids[i, mask[i].bool()] = (torch.arange(n) * 7 + 11 * i) % (VOCABULARY - 1) + 1
        found.append({"input_ids": ids, "attention_mask": mask})
    return model(hides), found


LONG = {
    "remedy": "Pad to the longest row of the batch, or to a multiple of 64",
    "tried": "differ by",
    "beside": ("mask-lost",),  # a mean over padding
}
_NEEDED = [padded(Model, *x) for x in (((64, 3, 2),), ((50, 3, 2),), ((20, 11), (64, 3)))]
_NEEDED.append(padded(OfMean, (20, 11)))
_ROWS, _SHORT = (padded(Model, (20, 11), size=x) for x in (64, 20))
sick("padding", hides, _ROWS, _SHORT, *_NEEDED, name="rows", **LONG)
sick("padding", hides, *(padded(OfFirst, (20, 11), size=x) for x in (64, 20)), name="pooled", **LONG)
_FRONT = (padded(Model, (20, 11), (16, 9), left=True, size=x) for x in (64, 20))
_COLUMNS = (
    "columns that a sample needs: 20 of 64, 16 of 64",
    "lie in front of these. In this batch, they have 68.8% of the tokens",
    "90.2% of the pairs",
)
_MOST = "At least 69% of the columns"
sick("padding", hides, *_FRONT, name="in front", what=_MOST, evidence=_COLUMNS, **LONG)
