"""Healthy and sick models of a stranger, on which the doctor once said something false.

The line that a finding has to name ends in ``# sick``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, HEADS, LENGTH, VOCABULARY, Model, heads_of, tokens
from torch import Tensor, nn

SDPA = F.scaled_dot_product_attention
WINDOW, WINDOWS = 8, 3
_REGIONS = torch.tensor([0] * 5 + [1] * 3)
#: Windows of a shifted grid: the last one has tokens of two regions.
SHIFTED = torch.ones(WINDOWS, WINDOW, WINDOW, dtype=torch.bool)
SHIFTED[-1] = _REGIONS[:, None] == _REGIONS


# Windows: q, k and v have more elements than the batch


def windows_of(x: Tensor) -> Tensor:
    return x.unflatten(2, (WINDOWS, WINDOW)).transpose(1, 2).flatten(0, 1)


def merged(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, WINDOWS)).transpose(1, 2).flatten(2, 3)


def fused_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = SHIFTED[:, None].repeat(len(q), 1, 1, 1)  # sick
    return merged(SDPA(*map(windows_of, (q, k, v)), attn_mask=mask))


def float_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(SHIFTED.shape).masked_fill(~SHIFTED, -100.0)[:, None].repeat(len(q), 1, 1, 1)
    return merged(SDPA(*map(windows_of, (q, k, v)), attn_mask=mask))


def written_windows(number: float, every: int = 1) -> Any:
    """Attention of windows, whose mask adds a number. Only some calls have the mask."""

    class Windows(nn.Module):
        calls = 0

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch = len(q)
            q, k, v = map(windows_of, (q, k, v))
            scores = q * q.shape[-1] ** -0.5 @ k.mT
            if self.calls % every == every - 1:
                scores = scores.unflatten(0, (batch, -1)).masked_fill(~SHIFTED[:, None], number).flatten(0, 1)
            self.calls += 1
            return merged(scores.softmax(-1) @ v)  # sick

    return lambda: (Model(Windows(), layers=2), tokens((LENGTH,)))


# Padding masks of a finite number


def written_padding(number: float) -> Any:
    """BERT's attention: a number is added to the scores of padding."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = (1.0 - attention_mask[:, None, None, :].float()) * number
        scores = q @ k.mT / q.shape[-1] ** 0.5 + hidden
        return scores.softmax(-1) @ v  # sick

    whole, padded = torch.ones(2, LENGTH).long(), torch.ones(2, LENGTH).long()
    padded[0, 15:] = 0
    first, second = (tokens(attention_mask=x)[0] for x in (whole, padded))
    return lambda: (Model(attend), [first, second])


def fused_number(number: float) -> Any:
    """A causal mask of a finite number, for torch's function."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.shape[2], q.shape[2]), number).triu(1)  # sick
        return SDPA(q, k, v, attn_mask=mask)

    return lambda: (Model(attend), tokens(), CAUSAL)


# A line for the prefill and for decode steps


class Decoder(nn.Module):
    """A static cache. The prefill and each decode step share the line of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.register_buffer("cache", torch.zeros(2, 2, HEADS, 2 * LENGTH, DIM // HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return SDPA(q, k, v, mask)

    @torch.no_grad()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        q, k, v = map(heads_of, self.qkv(self.embed(tokens)).chunk(3, -1))
        stop = start_pos + tokens.shape[1]
        self.cache[0, :, :, start_pos:stop], self.cache[1, :, :, start_pos:stop] = k, v
        mask = start_pos + torch.arange(tokens.shape[1])[:, None] >= torch.arange(stop)  # sick
        out = self.attend(q, *self.cache[:, :, :, :stop], mask)
        return self.head(out.transpose(1, 2).flatten(2))


def decoder() -> Any:
    ids = tokens((LENGTH + 1,))[0]["input_ids"]
    prefill, step = ids[:, :LENGTH], ids[:, LENGTH:]
    return Decoder(), [{"tokens": prefill, "start_pos": 0}, {"tokens": step, "start_pos": LENGTH}], CAUSAL


class Counting(Model):
    """A decoder whose position grows with each call, and that has little room."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: SDPA(q, k, v, is_causal=True))
        self.position, self.table, self.seen = 0, nn.Embedding(3 * LENGTH, DIM), []

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(self.position, self.position + input_ids.shape[1])
        self.position += input_ids.shape[1]
        self.seen.append(self.position)
        x = self.embed(input_ids) + self.table(places)
        return self.head(self.blocks[0](x))


# Teachers and layers without a gradient


class Distilled(nn.Module):
    """A student follows a teacher, which gets no gradient: by detach(), or by torch.no_grad()."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(VOCABULARY, DIM)
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(3)))
        self.teacher = copy.deepcopy(self.student)
        self.layer = nn.Linear(DIM, DIM)
        if how == "frozen":
            self.teacher.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        if self.how == "detach":
            target = self.teacher(x).detach()  # sick: detach
        elif self.how == "no_grad":
            with torch.no_grad():
                target = self.teacher(x)  # sick: no_grad
        elif self.how == "layer":
            x, target = x + self.layer(x).detach(), x  # sick: layer
        else:
            target = self.teacher(x.detach())
        return {"loss": F.smooth_l1_loss(self.student(x), target)}


def distilled(how: str) -> Any:
    torch.manual_seed(0)
    return Distilled(how), tokens()


# Weights that another line needs


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # sick
        self.maps[:] = [weights.detach().mean(1)]  # use
        return weights @ v


# One line for several uses, and batches without tokens


def shared(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return SDPA(q, k, v, is_causal=causal)  # sick


class TwoLayers(Model):
    """Two layers share the line of attention, and only the second one sees later tokens."""

    def __init__(self) -> None:
        super().__init__(shared, layers=2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids), causal=True)
        x = self.blocks[1](x, causal=False)  # sick: caller
        return self.head(x)


class Images(nn.Module):
    """A classifier of images. Its patches are the tokens, and no input has them."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.block, self.mixes = nn.Conv2d(3, DIM, 4, 4), nn.Linear(DIM, 3 * DIM), mixes

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        q, k, v = map(heads_of, self.block(x).chunk(3, -1))
        x = SDPA(q, k, v).transpose(1, 2).flatten(2).mean(1)
        return x - x.mean(0) if self.mixes else x


def images(*, mixes: bool = False) -> Any:
    return Images(mixes=mixes), [{"images": torch.randn(3, 3, 16, 16)}]


class Pooled(Model):
    """One vector for each text. Its padding is hidden in attention."""

    def __init__(self, how: str) -> None:
        super().__init__(lambda q, k, v, mask: SDPA(q, k, v, attn_mask=mask[:, None, None].bool()))
        self.how = how

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids), mask=attention_mask)
        if self.how == "last":
            return x[:, -1]  # sick: last
        if self.how == "mean":
            return x.mean(1)  # sick: mean
        if self.how == "own last":
            return x[torch.arange(len(x)), attention_mask.sum(1) - 1]
        return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def pooled(how: str) -> Any:
    mask = torch.ones(2, LENGTH).long()
    mask[0, 15:] = 0
    return Pooled(how), tokens(attention_mask=mask)
