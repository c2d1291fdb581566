"""Attention in needless loops, padding that no sample needs, and healthy twins."""

import math

import torch
from sick import sick
from small_models import (
    DIM,
    EARLIER,
    HEADS,
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
)
from torch import nn

from attnspan import causal, full, segments
from attnspan.torch import attention

BATCH, LENGTHS = 4, (9, 7, 5, 3)


# Loops over heads, samples and documents


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, SIZE, bias=False) for _ in range(3))

    def forward(self, x):
        return SDPA(self.q(x), self.k(x), self.v(x), is_causal=True)  # sick


class WrittenHead(Head):
    def forward(self, x):
        scores = (self.q(x) @ self.k(x).mT / math.sqrt(SIZE)).masked_fill(~EARLIER, -math.inf)
        return scores.softmax(-1) @ self.v(x)  # sick


class OfHeads(nn.Module):
    head = Head

    def __init__(self, _=None):
        super().__init__()
        self.heads = nn.ModuleList([self.head() for _ in range(HEADS)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.out(torch.cat([head(x) for head in self.heads], -1))  # the loop


class OfWrittenHeads(OfHeads):
    head = WrittenHead


class HeadsAtOnce(OfHeads):
    """The remedy, with the weights of the heads."""

    def forward(self, x):
        q, k, v = (torch.cat([getattr(y, n).weight for y in self.heads]) for n in "qkv")
        return x + self.out(merged_heads(SDPA(*(heads_of(x @ w.T) for w in (q, k, v)), is_causal=True)))


class EachHead(Attend):
    def attend(self, q, k, v):
        q, k, v = map(heads_of, (q, k, v))
        out = [SDPA(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)]  # sick
        return torch.cat(out, -1)


class EachSample(Attend):
    def of_heads(self, q, k, v):
        out = []
        for i in range(len(q)):
            mask = (torch.arange(LENGTH) < LENGTH - i).expand(1, 1, LENGTH, -1)
            out.append(SDPA(q[i : i + 1], k[i : i + 1], v[i : i + 1], attn_mask=mask))  # sick
        return torch.cat(out)


class AllSamples(Attend):
    def of_heads(self, q, k, v):
        mask = torch.arange(LENGTH) < LENGTH - torch.arange(len(q))[:, None]
        return SDPA(q, k, v, attn_mask=mask[:, None, None])


class EachDocument(Attend):
    def of_heads(self, q, k, v):
        parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
        out = [SDPA(*x, is_causal=True) for x in zip(*parts, strict=True)]  # sick
        return torch.cat(out, 2)


class WrittenDocument(Attend):
    def of_heads(self, q, k, v):
        parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
        scores = [a @ b.mT * SIZE**-0.5 for a, b in zip(*parts[:2], strict=True)]
        out = [x.softmax(-1) @ y for x, y in zip(scores, parts[2], strict=True)]  # sick
        return torch.cat(out, 2)


class AllDocuments(Attend):
    base = causal()

    def of_heads(self, q, k, v):
        ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        return attention(q, k, v, mask=self.base & segments(ids))


class AllOfDocuments(AllDocuments):
    base = full()


class Inner(Attend):
    def of_heads(self, q, k, v):
        return SDPA(q, k, v)  # sick


class Sampled(nn.Module):
    """Calls a module once for each sample."""

    def __init__(self, _=None):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return torch.stack([self.inner(y[None])[0] for y in x])  # the loop


class NotSampled(Sampled):
    def forward(self, x):
        return self.inner(x)


# Calls that are needed


class Gated(Attend):
    """A layer whose gate is 0 before training."""

    def __init__(self, _=None):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * (super().forward(x) - x)


class SharedLayer(nn.Module):
    """One layer that is called six times."""

    def __init__(self, _=None):
        super().__init__()
        self.layer = Attend()

    def forward(self, x):
        for _ in range(6):
            x = self.layer(x)
        return x


class Recurrent(Attend):
    """Each chunk of tokens gets a summary of the results of the chunk before it."""

    def of_heads(self, q, k, v):
        out = [torch.zeros(len(q), HEADS, 6, SIZE)]
        for a, b, c in zip(*(x.split(6, 2) for x in (q, k, v)), strict=True):
            out.append(SDPA(a + out[-1].mean(2, keepdim=True), b, c))
        return torch.cat(out[1:], 2)


class Chunks(Attend):
    """Parts of the queries see all keys, which stores fewer scores at a time."""

    def of_heads(self, q, k, v):
        return torch.cat([SDPA(x, k, v) for x in q.split(6, 2)], 2)


class Decoding(Attend):
    """One token at a time, over the keys so far."""

    def of_heads(self, q, k, v):
        keys = [(k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(LENGTH)]
        return torch.cat([SDPA(q[:, :, i : i + 1], *x) for i, x in enumerate(keys)], 2)


class ThreeHeads(OfHeads):
    def forward(self, x):
        parts = [head(x) for head in self.heads[:3]]
        return x + self.out(torch.cat([*parts, parts[0]], -1))


_NEEDED = (
    latents(Attend, 12),
    latents(Gated, 6),
    *map(latents, (SharedLayer, Recurrent, Chunks, Decoding, ThreeHeads)),
)
for _code, _block, _well, _remedy in (
    (Head, OfHeads, HeadsAtOnce, "project all heads at once"),
    (WrittenHead, OfWrittenHeads, HeadsAtOnce, "one call of F.scaled_dot_product_attention"),
    (EachHead, EachHead, Attend, "along the heads or the batch"),
    (EachSample, EachSample, AllSamples, "along the heads or the batch"),
    (EachDocument, EachDocument, AllDocuments, "segments(ids)"),
    (WrittenDocument, WrittenDocument, AllOfDocuments, "mask=(your mask) & segments(ids)"),
    (Inner, Sampled, NotSampled, "and call attention once"),
):
    sick(
        "loop",
        _code,
        latents(_block, 1, BATCH),
        latents(_well, 1, BATCH),
        *(_NEEDED if _code is Head else ()),
        remedy=_remedy,
        tried=() if "Written" in _code.__name__ else "differ by",
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


_NEEDED = (padded(Model, *x) for x in (((64, 3, 2),), ((50, 3, 2),), ((20, 11), (64, 3))))
for _name, _made, _well, _says in (
    (
        "rows",
        padded(Model, (20, 11)),
        (padded(Model, (20, 11), size=20), *_NEEDED, padded(OfMean, (20, 11))),
        {},
    ),
    ("pooled", padded(OfFirst, (20, 11)), (padded(OfFirst, (20, 11), size=20),), {}),
    (
        "in front",
        padded(Model, (20, 11), (16, 9), left=True),
        (padded(Model, (20, 11), left=True, size=20),),
        {
            "what": "At least 69% of the columns",
            "evidence": (
                "columns that a sample needs: 20 of 64, 16 of 64",
                "lie in front of these. In this batch, they have 68.8% of the tokens",
                "90.2% of the pairs",
            ),
        },
    ),
):
    sick(
        "padding",
        hides,
        _made,
        *_well,
        name=_name,
        **_says,
        right=False if _name == "in front" else None,
        remedy="Pad to the longest row of the batch, or to a multiple of 64",
        tried="differ by",
    )
