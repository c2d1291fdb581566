"""Small models that call attention in loops or compute padding that no sample needs, and healthy twins.

`PAIRS` has the kind, the code with the line to name (it ends in ``# sick``), the sick factory, words of the
remedy, and the factory with the remedy. `WELL` has the kind that a healthy factory must not get.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from patients import DIM, HEADS, LENGTH, VOCABULARY, Model, fused, heads_of, tokens
from torch import Tensor, nn
from wired import SDPA, Attend, Latents

from attnspan import causal, full, segments
from attnspan.torch import attention

SIZE, BATCH, LENGTHS = DIM // HEADS, 4, (9, 7, 5, 3)
PAIRS: dict[str, tuple[str, Any, Any, str, Any]] = {}
WELL: dict[str, tuple[str, Any]] = {}


def made(block: Any, layers: int = 1) -> Any:
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    return lambda: (Latents(block, layers), [{"x": x, "t": torch.ones(BATCH)}])


# Heads


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, SIZE, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return SDPA(self.q(x), self.k(x), self.v(x), is_causal=True)  # sick


class WrittenHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / math.sqrt(SIZE)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1) @ self.v(x)  # sick


class OfHeads(nn.Module):
    head: Any = Head

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.heads = nn.ModuleList([self.head() for _ in range(HEADS)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.cat([head(x) for head in self.heads], -1))  # the loop


class OfWrittenHeads(OfHeads):
    head = WrittenHead


class Joined(OfHeads):
    """The remedy, with the weights of the heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat([getattr(y, n).weight for y in self.heads]) for n in "qkv")
        out = SDPA(*(heads_of(x @ w.T) for w in (q, k, v)), is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class EachHead(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        out = [SDPA(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)]  # sick
        return torch.cat(out, -1)


class EachSample(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for i in range(len(q)):
            own = [heads_of(x[i : i + 1]) for x in (q, k, v)]
            mask = torch.arange(LENGTH) < LENGTH - i
            out.append(SDPA(*own, attn_mask=mask.expand(1, 1, LENGTH, -1)))  # sick
        return torch.cat(out).transpose(1, 2).flatten(2)


class AllSamples(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < LENGTH - torch.arange(len(q))[:, None]
        out = SDPA(*(heads_of(x) for x in (q, k, v)), attn_mask=mask[:, None, None])
        return out.transpose(1, 2).flatten(2)


class EachDocument(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [heads_of(x).split(LENGTHS, 2) for x in (q, k, v)]
        out = [SDPA(*x, is_causal=True) for x in zip(*parts, strict=True)]  # sick
        return torch.cat(out, 2).transpose(1, 2).flatten(2)


class WrittenDocument(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [heads_of(x).split(LENGTHS, 2) for x in (q, k, v)]
        scores = [a @ b.mT * SIZE**-0.5 for a, b in zip(*parts[:2], strict=True)]
        out = [x.softmax(-1) @ y for x, y in zip(scores, parts[2], strict=True)]  # sick
        return torch.cat(out, 2).transpose(1, 2).flatten(2)


class AllDocuments(Attend):
    base: Any = causal()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        out = attention(*(heads_of(x) for x in (q, k, v)), mask=self.base & segments(ids))
        return out.transpose(1, 2).flatten(2)


class AllOfDocuments(AllDocuments):
    base = full()


class Sampled(nn.Module):
    """Calls a module once for each sample."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(y[None])[0] for y in x])  # the loop


class Inner(Attend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(*(heads_of(x) for x in (q, k, v))).transpose(1, 2).flatten(2)  # sick


class NotSampled(Sampled):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


PAIRS["heads"] = "loop", Head, made(OfHeads), "project all heads at once", made(Joined)
PAIRS["heads, written out"] = (
    "loop",
    WrittenHead,
    made(OfWrittenHeads),
    "one call of F.scaled_dot_product_attention",
    made(Joined),
)
PAIRS["each head"] = "loop", EachHead, made(EachHead), "along the heads or the batch", made(Attend)
PAIRS["each sample"] = "loop", EachSample, made(EachSample), "along the heads or the batch", made(AllSamples)
PAIRS["each document"] = "loop", EachDocument, made(EachDocument), "segments(ids)", made(AllDocuments)
PAIRS["each document, written out"] = (
    "loop",
    WrittenDocument,
    made(WrittenDocument),
    "mask=(your mask) & segments(ids)",
    made(AllOfDocuments),
)
PAIRS["a module for each sample"] = "loop", Inner, made(Sampled), "and call attention once", made(NotSampled)


class Layer(Attend):
    """A layer, which the model calls in a loop with the others."""


class Gated(Attend):
    """A layer whose gate is 0 before training."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * (super().forward(x) - x)


class Shared(nn.Module):
    """One layer that is called six times."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.layer = Attend()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.layer(x)
        return x


class Recurrent(Attend):
    """Each chunk of tokens gets a summary of the results of the chunk before it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = [torch.zeros(BATCH, HEADS, 6, SIZE)]
        for a, b, c in zip(*(heads_of(x).split(6, 2) for x in (q, k, v)), strict=True):
            out.append(SDPA(a + out[-1].mean(2, keepdim=True), b, c))
        return torch.cat(out[1:], 2).transpose(1, 2).flatten(2)


class Chunks(Attend):
    """Parts of the queries see all keys, which stores fewer scores at a time."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        return torch.cat([SDPA(x, k, v) for x in q.split(6, 2)], 2).transpose(1, 2).flatten(2)


class Decoding(Attend):
    """One token at a time, over the keys so far."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in (q, k, v))
        out = [SDPA(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(LENGTH)]
        return torch.cat(out, 2).transpose(1, 2).flatten(2)


class Three(OfHeads):
    def forward(self, x: Tensor) -> Tensor:
        parts = [head(x) for head in self.heads[:3]]
        return x + self.out(torch.cat([*parts, parts[0]], -1))


for name, block, layers in (
    ("twelve layers", Layer, 12),
    ("layers with gates of 0", Gated, 6),
    ("a shared layer", Shared, 1),
    ("recurrent chunks", Recurrent, 1),
    ("chunks of queries", Chunks, 1),
    ("decoding", Decoding, 1),
    ("three heads", Three, 1),
):
    WELL[name] = "loop", made(block, layers)


# Padding


def hides(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=attention_mask[:, None, None].bool())  # sick


class Pooled(Model):
    """Returns one result for each sample: of the first token, or the mean of all columns."""

    mean = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = super().forward(input_ids, attention_mask=attention_mask)
        return x.mean(1) if self.mean else x[:, 0]


class Mean(Pooled):
    mean = True


def padded(model: Any, *batches: tuple[int, ...], size: int = 64, left: bool = False) -> Any:
    """Make a factory whose batches have samples of some lengths, padded to one size."""

    def factory() -> Any:
        found = []
        for lengths in batches:
            index = torch.arange(size)
            mask = torch.stack([index >= size - n if left else index < n for n in lengths]).long()
            ids = torch.zeros_like(mask)
            for i, n in enumerate(lengths):
                ids[i, mask[i].bool()] = (torch.arange(n) * 7 + 11 * i) % (VOCABULARY - 1) + 1
            found.append({"input_ids": ids, "attention_mask": mask})
        return model(hides), found

    return factory


LONG = "Pad to the longest row of the batch, or to a multiple of 64"
for name, model in (("rows", Model), ("pooled", Pooled)):
    sick, right = padded(model, (20, 11)), padded(model, (20, 11), size=20)
    PAIRS[f"padding, {name}"] = "padding", hides, sick, LONG, right
PAIRS["padding in front"] = (
    "padding",
    hides,
    padded(Model, (20, 11), (16, 9), left=True),
    LONG,
    padded(Model, (20, 11), left=True, size=20),
)
WELL["one long row"] = "padding", padded(Model, (64, 3, 2))
WELL["less than a quarter"] = "padding", padded(Model, (50, 3, 2))
WELL["a batch that needs it"] = "padding", padded(Model, (20, 11), (64, 3))
WELL["a mean over padding"] = "padding", padded(Mean, (20, 11))
WELL["no padding"] = "padding", lambda: (Model(fused), tokens(), {})
