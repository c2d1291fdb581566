"""Tokens in diffusers' transformers: the arguments and results of each layer, stream by stream.

Between the first and the last layer, a rank has its tokens of each stream. Before and after, all ranks
compute the same. Code that mixes tokens outside of attention (patches, positions, pooled texts, refiners)
therefore sees all tokens, and a plan only describes the layers' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Place of the tokens in an argument.

    Attributes:
        streams: The streams along `dim`, in their order.
        dim: The dimension of the tokens.
        ndim: Number of dimensions of tensors that have tokens. None for all tensors.

    Example:
        >>> Rows("text", "image", dim=0).streams
        ('text', 'image')
    """

    streams: tuple[str, ...]
    dim: int = 1
    ndim: int | None = None

    def __init__(self, *streams: str, dim: int = 1, ndim: int | None = None) -> None:
        for name, value in (("streams", streams), ("dim", dim), ("ndim", ndim)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class TokenPlan:
    """Tokens of a transformer's layers. `parallelize` needs such a plan for each model class.

    Attributes:
        layers: Names of the model's lists of layers, in the order in which they run.
        rows: For each stream, a function of the model and its inputs (keyed by name) that counts the stream's
            tokens.
        stream: Arguments of the first layer that are streams. They are cut there, and each layer passes a
            rank's tokens to the next layer.
        every: Arguments that each layer gets whole, such as rotary tables and masks. The value is the `Rows`
            of a tensor or of each tensor of a tuple, or a tuple of `Rows`. A tensor with one token applies to
            all tokens.
        leading: Arguments that count the first tokens of a stream, and that stream.
        result: Where to gather the streams that are used after the layers, and their `Rows`. The place is an
            index in the tuple that the last layer returns, or None if it returns a tensor. If the model adds
            something in between, use the name of a later module, whose first argument is gathered.
        attention: Modules that attend among tokens, with the streams that they join, in their order. A key is
            the end of the module's name. All other modules process a rank's tokens as if there were no
            others.
        inputs: Inputs of the model that are added to tokens between layers, such as a control net's.
        without_batch: Inputs of the model without a batch dim.
        refused: Inputs that select tokens by number. The model raises if you pass them.
        processor: Function that makes these modules' processors from a `Sequence`. None keeps the model's
            own.

    Example:
        >>> TokenPlan(
        ...     layers=("blocks",),
        ...     rows={"image": lambda model, inputs: inputs["hidden_states"].shape[1]},
        ...     stream={"hidden_states": Rows("image")},
        ...     result=(None, Rows("image")),
        ...     attention={"attn1": ("image",)},
        ... ).layers
        ('blocks',)
    """

    layers: tuple[str, ...]
    rows: Mapping[str, Callable[[Any, Mapping[str, Any]], int]]
    stream: Mapping[str, Rows]
    result: tuple[int | str | None, Rows]
    attention: Mapping[str, tuple[str, ...]]
    every: Mapping[str, Rows | tuple[Rows, ...]] = field(default_factory=dict)
    leading: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Rows] = field(default_factory=dict)
    without_batch: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    processor: Callable[[Any], Any] | None = None


def _tokens(name: str) -> Callable[[Any, Mapping[str, Any]], int]:
    """Count the tokens of an input that is a sequence."""
    return lambda _, inputs: inputs[name].shape[1]


def _patches(model: Any, inputs: Mapping[str, Any]) -> int:
    """Count the patches of images (B, C, height, width) or videos (B, C, frames, height, width)."""
    config, sizes = model.config, list(inputs["hidden_states"].shape[2:])
    each = config.patch_size
    if not isinstance(each, (tuple, list)):
        in_time = (getattr(config, "patch_size_t", None) or 1,) if len(sizes) == 3 else ()
        each = (*in_time, each, each)
    found = 1
    for size, patch in zip(sizes, each, strict=True):
        found = found * (size // patch)
    return found


def _patches_of_cogvideox(model: Any, inputs: Mapping[str, Any]) -> int:
    """Count the patches of videos (B, frames, C, height, width)."""
    config = model.config
    _, frames, _, height, width = inputs["hidden_states"].shape
    in_time = config.patch_size_t or 1
    found: int = (
        (frames + in_time - 1) // in_time * (height // config.patch_size) * (width // config.patch_size)
    )
    return found


def _longest_of_lumina2(model: Any, inputs: Mapping[str, Any]) -> int:
    """Count the tokens of the longest sample. The model packs each caption and its image, and pads.

    The lengths of captions are data.
    """
    return int(inputs["encoder_attention_mask"].sum(1).max()) + _patches(model, inputs)


class _MochiProcessor:
    """Mochi's attention under a mask. Mochi's own processor attends sample by sample, to the valid tokens."""

    def __init__(self, sequence: Any) -> None:
        self._parallel_config = sequence

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        def heads(to: Any, norm: Any, x: Tensor) -> Any:
            found = to(x).unflatten(2, (attn.heads, -1))
            return found if norm is None else norm(found)

        image = [heads(attn.to_q, attn.norm_q, hidden_states), heads(attn.to_k, attn.norm_k, hidden_states)]
        if image_rotary_emb is not None:
            image = [_rotated(x, *image_rotary_emb) for x in image]
        image.append(heads(attn.to_v, None, hidden_states))
        projections = (attn.add_q_proj, attn.norm_added_q), (attn.add_k_proj, attn.norm_added_k)
        each_of = (*projections, (attn.add_v_proj, None))
        text = [heads(to, norm, encoder_hidden_states) for to, norm in each_of]
        real = attention_mask.bool()
        seen = torch.cat([real.new_ones(real.shape[0], hidden_states.shape[1]), real], 1)
        joined = [torch.cat(each, 1) for each in zip(image, text, strict=True)]
        found = self._parallel_config.attend(*joined, attn_mask=seen).flatten(2)
        out, context = found.split([hidden_states.shape[1], real.shape[1]], 1)
        for each in attn.to_out:
            out = each(out)
        context = context * real[..., None]
        return out, attn.to_add_out(context) if hasattr(attn, "to_add_out") else context


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours along the last dimension, in float32."""
    a, b = x.float()[..., ::2], x.float()[..., 1::2]
    turned = [y.to(x.dtype) for y in (a * cos - b * sin, a * sin + b * cos)]
    return torch.stack(turned, -1).flatten(-2)


_TEXT, _IMAGE = "encoder_hidden_states", "hidden_states"
_IDS = ("img_ids", "txt_ids")
_BOTH = {_IMAGE: Rows("image"), _TEXT: Rows("text")}
_ROWS = {"text": _tokens(_TEXT), "image": _tokens(_IMAGE)}
_PATCHES = {"text": _tokens(_TEXT), "image": _patches}
_ONE = {_IMAGE: Rows("image")}

_FLUX = TokenPlan(
    layers=("transformer_blocks", "single_transformer_blocks"),
    rows=_ROWS,
    stream=_BOTH,
    every={"image_rotary_emb": Rows("text", "image", dim=0)},
    result=("norm_out", Rows("image")),
    attention={"attn": ("text", "image")},
    inputs={name: Rows("image") for name in ("controlnet_block_samples", "controlnet_single_block_samples")},
    without_batch=_IDS,
)
_FLUX2 = replace(
    _FLUX, result=(None, Rows("text", "image")), inputs={}, refused=("kv_cache", "kv_cache_mode")
)
_QWEN_IMAGE = TokenPlan(
    layers=("transformer_blocks",),
    rows=_ROWS,
    stream=_BOTH,
    every={
        "encoder_hidden_states_mask": Rows("text"),
        "image_rotary_emb": (Rows("image", dim=0), Rows("text", dim=0)),
        "modulate_index": Rows("image"),
    },
    result=("norm_out", Rows("image")),
    attention={"attn": ("text", "image")},
    inputs={"controlnet_block_samples": Rows("image")},
)
_SD3 = TokenPlan(
    layers=("transformer_blocks",),
    rows=_PATCHES,
    stream=_BOTH,
    result=("norm_out", Rows("image")),
    attention={"attn": ("image", "text"), "attn2": ("image",)},
    inputs={"block_controlnet_hidden_states": Rows("image")},
)
_WAN = TokenPlan(
    layers=("blocks",),
    rows={"image": _patches},
    stream=_ONE,
    every={"rotary_emb": Rows("image"), "temb": Rows("image", ndim=4)},
    result=(None, Rows("image")),
    attention={"attn1": ("image",)},
)
_LTX = TokenPlan(
    layers=("transformer_blocks",),
    rows={"image": _tokens(_IMAGE)},
    stream=_ONE,
    every={"image_rotary_emb": Rows("image"), "temb": Rows("image")},
    result=(None, Rows("image")),
    attention={"attn1": ("image",)},
    without_batch=("rope_interpolation_scale",),
)
_HUNYUAN_VIDEO = TokenPlan(
    layers=("transformer_blocks", "single_transformer_blocks"),
    rows=_PATCHES,
    stream=_BOTH,
    every={
        "attention_mask": Rows("image", "text", dim=-1),
        "image_rotary_emb": Rows("image", dim=0),
        "freqs_cis": Rows("image", dim=0),
    },
    leading={"num_tokens": "image"},
    result=(0, Rows("image")),
    attention={"attn": ("image", "text")},
)
_LUMINA2 = TokenPlan(
    layers=("layers",),
    rows={"joint": _longest_of_lumina2},
    stream={_IMAGE: Rows("joint")},
    every={"attention_mask": Rows("joint"), "image_rotary_emb": Rows("joint")},
    result=(None, Rows("joint")),
    attention={"attn": ("joint",)},
)
_PIXART = replace(_WAN, layers=("transformer_blocks",), every={"attention_mask": Rows("image", dim=-1)})
_COGVIDEOX = TokenPlan(
    layers=("transformer_blocks",),
    rows={"text": _tokens(_TEXT), "image": _patches_of_cogvideox},
    stream=_BOTH,
    every={"image_rotary_emb": Rows("image", dim=0)},
    result=(0, Rows("image")),
    attention={"attn1": ("text", "image")},
    without_batch=("image_rotary_emb",),
)
_MOCHI = TokenPlan(
    layers=("transformer_blocks",),
    rows=_PATCHES,
    stream=_BOTH,
    every={"encoder_attention_mask": Rows("text"), "image_rotary_emb": Rows("image", dim=0)},
    result=(0, Rows("image")),
    attention={"attn1": ("image", "text")},
    processor=_MochiProcessor,
)

#: Plans, keyed by the name of the model's class.
known_plans: dict[str, TokenPlan] = {
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "Flux2Transformer2DModel": _FLUX2,
    "FluxTransformer2DModel": _FLUX,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "LTXVideoTransformer3DModel": _LTX,
    "Lumina2Transformer2DModel": _LUMINA2,
    "MochiTransformer3DModel": _MOCHI,
    "PixArtTransformer2DModel": _PIXART,
    "QwenImageTransformer2DModel": _QWEN_IMAGE,
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
}
