"""Common parts of the models of diffusers in this zoo: sizes, and parts of inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BENCH",
    "CHANNELS",
    "LATENT",
    "MASKED",
    "ROWS",
    "TEXT",
    "TINY",
    "Model",
    "Scale",
    "clip",
    "heads",
    "image_inputs",
    "latents",
    "noise",
    "positions",
    "text",
    "turns",
    "valid_text",
]

ROWS = 2
CHANNELS = 4  # of latents
TEXT = 32  # channels of the text's encoding


@dataclass(frozen=True)
class Scale:
    """Sizes of a model and the tokens of its text."""

    layers: int
    heads: int
    head_dim: int
    text: int

    @property
    def hidden(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    def axes(self, *shares: int) -> tuple[int, ...]:
        """The head dim in parts of so many eighths."""
        return tuple(self.head_dim * share // 8 for share in shares)


TINY = Scale(layers=2, heads=4, head_dim=16, text=12)
BENCH = Scale(layers=12, heads=8, head_dim=64, text=128)


@dataclass(frozen=True)
class Model:
    """A model's configuration, and inputs with ``n`` * ``n`` tokens of an image or of one frame of two.

    Attributes:
        config: From a scale to the arguments of the class.
        inputs: From a scale and n to those of its forward, but for the mask.
        frames: How many images a sample has.
        mask: Masks of the text: names and dtypes. Of a name that ends in "lens", the lengths.
        needs_mask: Whether the model cannot do without.
        image_in_mask: Whether the mask goes on over the image.
    """

    config: Callable[[Scale], dict[str, Any]]
    inputs: Callable[[Scale, int], dict[str, Any]]
    frames: int = 1
    mask: dict[str, torch.dtype] = field(default_factory=dict)
    needs_mask: bool = False
    image_in_mask: bool = False


def valid_text(s: Scale, padded: bool) -> Tensor:
    """(ROWS, tokens), bool; where padded the second text is shorter."""
    lengths = torch.tensor([s.text, s.text * 5 // 8 if padded else s.text])
    return torch.arange(s.text) < lengths[:, None]


def noise(*shape: int) -> Tensor:
    """(ROWS, *shape), the same at each call."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents(n: int, channels: int = CHANNELS) -> Tensor:
    """Images of n * n patches of 2 * 2."""
    return noise(channels, 2 * n, 2 * n)


def clip(n: int, channels: int = CHANNELS) -> Tensor:
    """Two frames of n * n patches of 2 * 2."""
    return noise(channels, 2, 2 * n, 2 * n)


def text(s: Scale, channels: int = TEXT) -> dict[str, Tensor]:
    """The encoding of a text, and times of diffusion."""
    return {"encoder_hidden_states": noise(s.text, channels), "timestep": torch.tensor([1.0, 5.0])}


def positions(axes: int, s: Scale, n: int, *lead: int) -> dict[str, Tensor]:
    """Positions of an image's tokens, and of the text's."""
    grid = torch.zeros(n * n, axes)
    grid[:, 1], grid[:, 2] = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
    return {"img_ids": grid.expand(*lead, -1, -1), "txt_ids": torch.zeros(*lead, s.text, axes)}


def heads(s: Scale) -> dict[str, int]:
    """The fields of most models for their heads."""
    return {"num_attention_heads": s.heads, "attention_head_dim": s.head_dim}


LATENT = {"in_channels": CHANNELS, "out_channels": CHANNELS}
MASKED = {"encoder_attention_mask": torch.bool}


def image_inputs(s: Scale, n: int) -> dict[str, Any]:
    """Latents of an image with n * n patches, text and times."""
    return {"hidden_states": latents(n), **text(s)}


def turns(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, (tokens, dim)."""
    angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(dim // 2) / dim)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
