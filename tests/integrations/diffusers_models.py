"""Models of diffusers and inputs from the table of the zoo, over ranks with sizes that do not divide."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn

from attnspan_lab.zoo._diffusion import Scale, noise, small_configuration, turns, valid_text
from attnspan_lab.zoo._diffusion_models import MODELS as _TABLE
from attnspan_lab.zoo._weights import draw_weights
from attnspan_lab.zoo.diffusers import architectures

_KINDS = """SD3Transformer2D FluxTransformer2D Flux2Transformer2D ChromaTransformer2D QwenImageTransformer2D
    WanTransformer3D SkyReelsV2Transformer3D LTXVideoTransformer3D HunyuanVideoTransformer3D
    HunyuanVideo15Transformer3D Lumina2Transformer2D PixArtTransformer2D SanaTransformer2D
    CogVideoXTransformer3D CogView4Transformer2D MochiTransformer3D AuraFlowTransformer2D
    AllegroTransformer3D"""
_CLASSES = {name.partition("Transformer")[0]: f"{name}Model" for name in _KINDS.split()}
_ZOO = {x.name: x for x in architectures()}

#: SD3, Flux and so on, by what stands before "Transformer" in the names of their classes.
MODELS = {name: _ZOO[kind] for name, kind in _CLASSES.items()}


def build(name: str) -> nn.Module:
    """A model whose attention is torch's, the same each time."""
    return MODELS[name].make("sdpa", "tiny").eval()


def inputs_of(name: str, tokens: int = 64) -> dict[str, Any]:
    """Inputs with about so many tokens of an image or two frames, and with a padded text if it may be."""
    model = MODELS[name]
    padded = model.batch("padded", tokens, "tiny")
    return model.batch("plain", tokens, "tiny") if padded is None else padded


#: Sizes that ranks do not divide.
ODD = Scale(layers=2, heads=3, head_dim=16, text=7)
#: Rows and columns of an image's tokens.
SIDE = 5
More = Callable[[Scale, int, bool], dict[str, Any]]
ROTARY = {"use_rotary_positional_embeddings": True}
CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")
#: Of a model over ranks: its class, what its configuration has besides, and what its inputs have.
_OVER_RANKS: dict[str, tuple[str, dict[str, Any], More]] = {
    "Wan": ("Wan", {}, lambda _, n, padded: _times(2 * n * n) if padded else {}),  # As Wan 2.2 has it.
    "LTXVideo": ("LTXVideo", {}, lambda _, n, padded: _times(2 * n * n) if padded else {}),
    "PixArt": ("PixArt", {}, lambda _, n, padded: {"attention_mask": _every_fourth(n)} if padded else {}),
    "CogVideoX": ("CogVideoX", ROTARY, lambda s, n, _: {"image_rotary_emb": turns(2 * n * n, s.head_dim)}),
    "CogVideoX in time": (
        "CogVideoX",
        {**ROTARY, "patch_size_t": 2, "patch_bias": False},
        lambda s, n, _: {"image_rotary_emb": turns(n * n, s.head_dim)},
    ),
    "HunyuanVideo replaced": ("HunyuanVideo", {"image_condition_type": "token_replace"}, lambda *_: {}),
    "Flux controlled": ("Flux", {}, lambda s, n, _: {key: [noise(n * n, s.hidden)] for key in CONTROL}),
    "SD3 controlled": (
        "SD3",
        {},
        lambda s, n, _: {"block_controlnet_hidden_states": [noise(n * n, s.hidden)] * 2, "skip_layers": [1]},
    ),
    "QwenImage edited": (
        "QwenImage",
        {"zero_cond_t": True},
        lambda _, n, __: {"img_shapes": [[(1, n, n - 2), (1, n, 2)]] * 2},
    ),
    "Wan of image": (
        "Wan",
        {"image_dim": 12, "added_kv_proj_dim": ODD.hidden},
        lambda *_: {"encoder_hidden_states_image": noise(5, 12)},
    ),
}


def _times(tokens: int) -> dict[str, Any]:
    """A time for each token."""
    return {"timestep": torch.linspace(0.1, 0.9, tokens).repeat(2, 1)}


def _every_fourth(n: int) -> torch.Tensor:
    """A mask of the picture, which lacks every fourth token."""
    return (torch.arange(n * n) % 4 > 0).float().repeat(2, 1)


def make(
    name: str, padded: bool = False, scale: Scale = ODD, side: int = SIDE
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of random weights, and its inputs."""
    kind, changes, more = _OVER_RANKS.get(name, (name, {}, lambda *_: {}))
    row = _TABLE[_CLASSES[kind]]
    torch.manual_seed(1)
    config = small_configuration(_CLASSES[kind], row, scale) | changes
    inputs = row.inputs(scale, side)
    if padded or row.needs_mask:
        inputs |= {mask: valid_text(scale, padded).to(dtype) for mask, dtype in row.mask.items()}
    model = draw_weights(getattr(diffusers, _CLASSES[kind])(**config))
    return model, inputs | more(scale, side, padded)


_SHARED = ("Flux", "Flux2", "QwenImage", "SD3", "HunyuanVideo", "Lumina2", "CogVideoX", "Mochi")
_SHARED += ("Wan", "LTXVideo", "PixArt")
#: What a process imports for models over ranks.
IMPORTED = ["attnspan_lab.zoo.diffusers", *(getattr(diffusers, _CLASSES[x]).__module__ for x in _SHARED)]
