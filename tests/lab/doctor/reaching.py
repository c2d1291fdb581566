"""Small models whose padding, sample order or inputs reach results wrongly or not at all, and healthy twins.

`PAIRS` has the kind of the finding, the code with the line that ends in ``# sick``, a part of the remedy, the
sick factory and its twin, which applies the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, LENGTH, VOCABULARY, Block, tokens
from torch import Tensor, nn

SDPA = F.scaled_dot_product_attention
STRIDE = 4
PAIRS: dict[str, tuple[str, Any, str, Any, Any]] = {}


def pair(name: str, kind: str, code: Any, remedy: str, sick: Any, well: Any) -> None:
    PAIRS[name] = kind, code, remedy, sick, well


def shows_real(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=attention_mask[:, None, None] != 0)  # sick


# Padding that reaches results behind attention


class Pooled(nn.Module):
    """An encoder with one result for each sample."""

    def __init__(self, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.embed, self.head = pool, nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 7)
        self.places = nn.Parameter(torch.randn(LENGTH, DIM))
        self.blocks = nn.ModuleList([Block(shows_real) for _ in range(2)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask=attention_mask)
        return self.head(self.pool(x, attention_mask))


def last(x: Tensor, _: Tensor) -> Tensor:
    return x[:, -1]  # sick


def last_real(x: Tensor, attention_mask: Tensor) -> Tensor:
    return x[torch.arange(len(x)), attention_mask.sum(1) - 1]


def mean(x: Tensor, _: Tensor) -> Tensor:
    return x.mean(1)  # sick


def mean_of_real(x: Tensor, attention_mask: Tensor) -> Tensor:
    return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def maximum(x: Tensor, _: Tensor) -> Tensor:
    return x.amax(1)  # sick


def maximum_of_real(x: Tensor, attention_mask: Tensor) -> Tensor:
    return x.masked_fill(attention_mask[..., None] == 0, float("-inf")).amax(1)


def pooled(pool: Any) -> Any:
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [15]])).long()
    return lambda: (Pooled(pool), tokens(attention_mask=mask), {})


pair("last token", "mask-lost", last, "attention_mask.sum(1) - 1]", pooled(last), pooled(last_real))
pair("mean", "mask-lost", mean, "(x * attention_mask[..., None]).sum(1)", pooled(mean), pooled(mean_of_real))
pair("maximum", "mask-lost", maximum, "float('-inf')).amax(1)", pooled(maximum), pooled(maximum_of_real))


class Subsampled(nn.Module):
    """Features (B, C, T) or (B, T, C), a layer with a stride, and attention with a mask of T / 4."""

    def __init__(self, *, right: bool, channels_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.right, self.channels_first = right, channels_first
        self.inner, self.block = nn.Conv1d(10, DIM, STRIDE, STRIDE), Block(shows_real)

    def forward(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.inner(features if self.channels_first else features.mT).mT
        mask = attention_mask[:, ::STRIDE] if self.right else attention_mask[:, : x.shape[1]]
        out: Tensor = self.block(x, attention_mask=mask)
        return out


def subsampled(real: int, *, right: bool, channels_first: bool) -> Any:
    mask = (torch.arange(64) < torch.tensor([[64], [real]])).long()
    x = torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(0)) * mask[..., None]
    batch = {"features": x.mT.contiguous() if channels_first else x, "attention_mask": mask}
    return lambda: (Subsampled(right=right, channels_first=channels_first), [batch], {})


for _first, _real in ((True, 32), (False, 32), (True, 29)):
    _sick, _well = (subsampled(_real, right=x, channels_first=_first) for x in (False, True))
    _name = f"mask of {'channels first' if _first else 'channels last'}, {_real} of 64"
    pair(_name, "mask-lost", shows_real, "attention_mask[:, ::stride]", _sick, _well)


# A sample's place in the batch


class Placed(nn.Module):
    """Positions along the axis of the batch, or of the tokens."""

    right = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)
        self.table, self.position = torch.randn(LENGTH, 1, DIM), nn.Embedding(LENGTH, DIM)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.block(self.encode(self.embed(input_ids)))
        return out

    def encode(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(0)]  # sick


class PlacedRight(Placed):
    def encode(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)].transpose(0, 1)


class Embedded(Placed):
    def encode(self, x: Tensor) -> Tensor:
        return x + self.position(torch.arange(x.shape[0]))[:, None]  # sick


class EmbeddedRight(Placed):
    def encode(self, x: Tensor) -> Tensor:
        return x + self.position(torch.arange(x.shape[1]))


class Scaled(Placed):
    def encode(self, x: Tensor) -> Tensor:
        slopes = 1 / (1 + torch.arange(len(x)))
        return x * slopes.view(-1, 1, 1)  # sick


class ScaledRight(Placed):
    def encode(self, x: Tensor) -> Tensor:
        slopes = 1 / (1 + torch.arange(x.shape[1]))
        return x * slopes.view(1, -1, 1)


def placed(model: Any) -> Any:
    return lambda: (model(), tokens(batch=3), {})


for _model, _right in ((Placed, PlacedRight), (Embedded, EmbeddedRight), (Scaled, ScaledRight)):
    _code, _text = _model.encode, "along the axis of the tokens"
    pair(_model.__name__, "sample-axis", _code, _text, placed(_model), placed(_right))


# Inputs that nothing depends on


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        heads = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        return SDPA(*heads, is_causal=causal).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attending(), Attending()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, causal=True)
        return x + self.across(x, memory)

    def across(self, x: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.cross(x, memory)
        return out


class Forgetful(Layer):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        del memory
        x = x + self.own(x, causal=True)
        return x + self.cross(x, x)  # sick


class Translator(nn.Module):
    """A decoder that sees an encoder, unless its layer forgets it."""

    layer: Any = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder, self.decoder = nn.Embedding(VOCABULARY, DIM), Attending(), self.layer()

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encoder(self.embed(src))
        out: Tensor = self.decoder(self.embed(tgt), memory)
        return out


class ForgetfulTranslator(Translator):
    layer = Forgetful


class NeverPassed(Translator):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # sick
        self.encoder(self.embed(src))
        x = self.embed(tgt)
        out: Tensor = self.decoder(x, x)
        return out


class OfCaption(Translator):
    """Keys of an image's own tokens instead of its caption's, as numbers (B, S, C)."""

    layer = Forgetful

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.decoder(image, caption)
        return out


class OfCaptionRight(OfCaption):
    layer = Layer


def translator(model: Any, first: str = "src", second: str = "tgt") -> Any:
    ids = tokens()[0]["input_ids"]
    batch: Any = {first: ids, second: ids.flip(1)[:, :15]}
    if first == "image":
        batch = {k: F.one_hot(x, VOCABULARY)[..., :DIM] + 0.1 * torch.ones(DIM) for k, x in batch.items()}
    return lambda: (model(), [batch], CAUSAL if first == "src" else {})


_TO_CROSS = "to the cross attention, for keys and values"
_CAPTIONS = (translator(x, "image", "caption") for x in (OfCaption, OfCaptionRight))
pair(
    "forgotten memory",
    "ignored-input",
    Forgetful,
    _TO_CROSS,
    *map(translator, (ForgetfulTranslator, Translator)),
)
pair(
    "memory not passed",
    "ignored-input",
    NeverPassed,
    "on to the layers",
    *map(translator, (NeverPassed, Translator)),
)
pair("forgotten caption", "ignored-input", Forgetful, _TO_CROSS, *_CAPTIONS)


class GatedLayer(Layer):
    """A gate of 0 lets nothing pass before training."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def across(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.gate.tanh() * super().across(x, memory)


class Gated(Translator):
    layer = GatedLayer


class Losing(nn.Module):
    """A second sequence that only the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.block(self.embed(x))
        return out, (out - self.embed(y)).square().mean()


def losing() -> Any:
    ids = tokens()[0]["input_ids"]
    return Losing(), [{"x": ids, "y": ids.flip(1)}], {}


class Convolved(nn.Module):
    """Padding reaches the last real token through a convolution, as in many speech encoders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Sequential(nn.Conv1d(10, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 5, 2, padding=2))

    def forward(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        del attention_mask
        out: Tensor = self.mix(features).mT
        return out


def convolved() -> Any:
    _, (batch,), _ = subsampled(31, right=True, channels_first=True)()
    return Convolved(), [batch], {}


class Grouped(nn.Module):
    """Attention within groups of tokens, as over the patches of each frame of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        out: Tensor = self.block(x.reshape(-1, 6, DIM)).view(x.shape)
        return out


def grouped() -> Any:
    return Grouped(), tokens(), {}


class Captioned(nn.Module):
    """Patches of a video whose sides are as long as the padded caption."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.caption = nn.Conv3d(4, DIM, (1, 4, 4), (1, 4, 4)), nn.Linear(8, DIM)

    def forward(self, video: Tensor, caption: Tensor, caption_mask: Tensor) -> Tensor:
        x, y = self.patches(video).flatten(2).mT[:, None], self.caption(caption)[:, None]
        out: Tensor = x + shows_real(x, y, y, caption_mask)
        return out[:, 0]


def captioned(*video: int) -> Any:
    torch.manual_seed(0)
    shown = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    batch = {"video": torch.randn(2, 4, *video), "caption": torch.randn(2, 12, 8), "caption_mask": shown}
    return Captioned(), [batch], {}
