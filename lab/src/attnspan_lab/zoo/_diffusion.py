"""Common parts of the diffusers models in the zoo: sizes, small configurations, and parts of inputs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor

__all__ = [
    "BENCH",
    "CHANNELS",
    "ROWS",
    "TEXT",
    "TINY",
    "Model",
    "Scale",
    "clip",
    "latents",
    "noise",
    "positions",
    "small_configuration",
    "turns",
    "valid_text",
]

ROWS = 2
CHANNELS = 4  # channels of the latents
TEXT = 32  # channels of the encoded text


@dataclass(frozen=True)
class Scale:
    """Sizes of a model, and the number of tokens of its text."""

    layers: int
    heads: int
    head_dim: int
    text: int

    @property
    def hidden(self) -> int:
        """Number of channels of a token."""
        return self.heads * self.head_dim

    def axes(self, *shares: int) -> tuple[int, ...]:
        """Split the head dim into parts, given in eighths."""
        return tuple(self.head_dim * share // 8 for share in shares)


TINY = Scale(layers=2, heads=4, head_dim=16, text=12)
BENCH = Scale(layers=12, heads=8, head_dim=64, text=128)


@dataclass(frozen=True)
class Model:
    """Inputs and exceptions of one model. An image or each of two frames has ``n`` * ``n`` tokens.

    Attributes:
        inputs: Maps a scale and n to the arguments of the model's forward, without the mask.
        changes: Configuration fields that need other values than `small_configuration` gives.
        axes: Parts of the head dim for each axis of the rotary embeddings, in eighths.
        frames: Number of images of a sample.
        mask: Names and dtypes of the text's masks. Names that end in "lens" get the lengths.
        needs_mask: Whether the model requires a mask.
        image_in_mask: Whether the mask covers the image as well.
        bench: Whether the zoo has the model in the size "bench" as well.
    """

    inputs: Callable[[Scale, int], dict[str, Any]]
    changes: dict[str, Any] = field(default_factory=dict)
    axes: tuple[int, ...] = (2, 3, 3)
    frames: int = 1
    mask: dict[str, torch.dtype] = field(default_factory=dict)
    needs_mask: bool = False
    image_in_mask: bool = False
    bench: bool = False


def small_configuration(name: str, model: Model, s: Scale) -> dict[str, Any]:
    """Choose small sizes for the fields of a class. A name has the same meaning in all classes."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    single = s.layers * 2 // 3  # blocks with text and image in one stream
    double = s.layers - single
    values: list[tuple[str, Any]] = [
        ("num_layers", double if "num_single_layers" in parameters else s.layers),
        ("n_layers depth mmdit_layers", s.layers),
        ("num_single_layers num_single_dit_layers", single),
        ("num_mmdit_layers", double),
        ("num_refiner_layers n_refiner_layers approximator_layers num_text_blocks num_visual_blocks", 1),
        ("num_attention_heads num_heads n_heads n_kv_heads num_key_value_heads", s.heads),
        ("num_cross_attention_heads", s.heads),
        ("num_kv_heads num_key_value_attention_heads", s.heads // 2),
        ("attention_head_dim cross_attention_head_dim", s.head_dim),
        ("hidden_size dim model_dim caption_projection_dim cross_attention_dim", s.hidden),
        ("ffn_hidden_size intermediate_size", 2 * s.hidden),
        ("ffn_dim ff_dim", 4 * s.hidden),
        ("joint_attention_dim caption_channels text_embed_dim cap_feat_dim text_dim text_in_dim", TEXT),
        ("context_in_dim in_text_dim cross_attention_input_dim cross_attention_dim_t5", TEXT),
        ("in_channels out_channels in_visual_dim out_visual_dim", CHANNELS),
        ("max_sequence_length max_text_seq_length text_len text_len_t5", s.text),
        ("axes_dims_rope rope_axes_dim axes_dims axes_dim axes_dim_rope", s.axes(*model.axes)),
        ("pooled_projection_dim global_states_input_dim in_text_dim2 adaln_lora_dim", 16),
        ("approximator_hidden_dim", 16),
        ("time_embed_dim approximator_num_channels vace_in_channels", 8),
        ("sample_size sample_width sample_height freq_dim time_dim time_proj_dim time_step_dim", 32),
        ("timestep_guidance_channels", 32),
    ]
    table = {field: value for fields, value in values for field in fields.split()}
    return {field: value for field, value in table.items() if field in parameters} | model.changes


def valid_text(s: Scale, padded: bool) -> Tensor:
    """Make a text mask, bool (ROWS, tokens). With padding, the second text is shorter."""
    lengths = torch.tensor([s.text, s.text * 5 // 8 if padded else s.text])
    return torch.arange(s.text) < lengths[:, None]


def noise(*shape: int) -> Tensor:
    """Draw a tensor (ROWS, *shape), the same at each call."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents(n: int, channels: int = CHANNELS) -> Tensor:
    """Draw images of n * n patches of 2 * 2."""
    return noise(channels, 2 * n, 2 * n)


def clip(n: int, channels: int = CHANNELS) -> Tensor:
    """Draw two frames of n * n patches of 2 * 2."""
    return noise(channels, 2, 2 * n, 2 * n)


def positions(axes: int, s: Scale, n: int, *lead: int) -> dict[str, Tensor]:
    """Make the positions of an image's tokens and of the text's tokens."""
    grid = torch.zeros(n * n, axes)
    grid[:, 1], grid[:, 2] = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
    return {"img_ids": grid.expand(*lead, -1, -1), "txt_ids": torch.zeros(*lead, s.text, axes)}


def turns(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of rotary embeddings, (tokens, dim)."""
    angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(dim // 2) / dim)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
