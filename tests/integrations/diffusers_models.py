"""Models of diffusers with random weights, small enough for a test, and inputs for them.

`build(name)` makes a model, `MODELS[name].inputs(n)` the inputs of two samples with (2 n)^2 pixels. Where a model
takes a mask, the second sample's text is padded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor

TEXT = 7  # tokens of text; the second sample has TEXT - 3


class Model(NamedTuple):
    kind: str
    config: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]


def build(name: str, **changes: Any) -> torch.nn.Module:
    model = MODELS[name]
    torch.manual_seed(0)
    made = getattr(diffusers, model.kind)(**{**model.config, **changes}).eval()
    for x in made.parameters():  # Some start at zero, and hide what is before them.
        x.data += torch.randn_like(x) / (4 * max(x.shape[-1], 1) ** 0.5 if x.dim() > 1 else 20)
    return made


def padding(dtype: torch.dtype = torch.bool) -> Tensor:
    return (torch.arange(TEXT) < torch.tensor([[TEXT], [TEXT - 3]])).to(dtype)


def _randn(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _image(channels: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"hidden_states": _randn(channels, 2 * n, 2 * n)}


def _video(channels: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"hidden_states": _randn(channels, 2, 2 * n, 2 * n)}


def _with(first: Callable[[int], dict[str, Any]], text: int, **more: Any) -> Callable[[int], dict[str, Any]]:
    """Inputs and text of a width; ``more``: values, or functions of n."""

    def inputs(n: int) -> dict[str, Any]:
        rest = {k: x(n) if callable(x) else x for k, x in more.items()}
        return {
            **first(n),
            "encoder_hidden_states": _randn(TEXT, text),
            "timestep": torch.tensor([1.0, 5.0]),
        } | rest

    return inputs


def _tokens(channels: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"hidden_states": _randn(4 * n * n, channels)}


def _ids(axes: int, *lead: int) -> dict[str, Callable[[int], Tensor]]:
    def place(count: int) -> Tensor:
        return torch.arange(count * axes).remainder(5).float().reshape(count, axes).expand(*lead, count, axes)

    return {"img_ids": lambda n: place(4 * n * n), "txt_ids": lambda n: place(TEXT)}


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_LATENT = {"in_channels": 4, "out_channels": 4}
_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": 32,
} | _HEADS
_WAN = (
    {"patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2}
    | _LATENT
    | _HEADS
)

MODELS = {
    "sd3": Model(
        "SD3Transformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "num_layers": 3,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
        }
        | {
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        }
        | _LATENT
        | _HEADS,
        _with(_image(4), 32, pooled_projections=_randn(16)),
    ),
    "flux": Model(
        "FluxTransformer2DModel",
        _FLUX | {"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        _with(_tokens(4), 32, pooled_projections=_randn(32), **_ids(3)),
    ),
    "flux2": Model(
        "Flux2Transformer2DModel",
        _FLUX | {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        _with(_tokens(4), 32, guidance=torch.ones(2), **_ids(4, 2)),
    ),
    "chroma": Model(
        "ChromaTransformer2DModel",
        _FLUX
        | {"axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 16}
        | {"approximator_layers": 1},
        _with(
            _tokens(4),
            32,
            attention_mask=lambda n: torch.cat([padding(), torch.ones(2, 4 * n * n, dtype=torch.bool)], 1),
            **_ids(3),
        ),
    ),
    "qwen_image": Model(
        "QwenImageTransformer2DModel",
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
        | {"axes_dims_rope": (8, 4, 4)}
        | _HEADS,
        _with(
            _tokens(16),
            16,
            encoder_hidden_states_mask=padding(torch.long),
            img_shapes=lambda n: [(1, 2 * n, 2 * n)] * 2,
        ),
    ),
    "wan": Model("WanTransformer3DModel", _WAN, _with(_video(4), 16)),
    "skyreels_v2": Model("SkyReelsV2Transformer3DModel", _WAN, _with(_video(4), 16)),
    "ltx": Model(
        "LTXVideoTransformer3DModel",
        {"cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16} | _LATENT | _HEADS,
        _with(
            lambda n: {"hidden_states": _randn(8 * n * n, 4)},
            16,
            encoder_attention_mask=padding(),
            num_frames=2,
            height=lambda n: 2 * n,
            width=lambda n: 2 * n,
        ),
    ),
    "hunyuan_video": Model(
        "HunyuanVideoTransformer3DModel",
        {
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "patch_size": 2,
            "text_embed_dim": 16,
        }
        | {"pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
        | _LATENT
        | _HEADS,
        _with(
            _video(4),
            16,
            pooled_projections=_randn(8),
            encoder_attention_mask=padding(torch.float32),
            guidance=torch.ones(2),
        ),
    ),
    "hunyuan_video_15": Model(
        "HunyuanVideo15Transformer3DModel",
        {
            "num_layers": 2,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
        }
        | {"image_embed_dim": 12, "rope_axes_dim": (4, 6, 6), "target_size": 16}
        | _LATENT
        | _HEADS,
        _with(
            _video(4),
            16,
            encoder_attention_mask=padding(torch.float32),
            encoder_hidden_states_2=_randn(TEXT, 8),
            encoder_attention_mask_2=padding(torch.float32),
            image_embeds=_randn(3, 12),
        ),
    ),
    "lumina2": Model(
        "Lumina2Transformer2DModel",
        {"sample_size": 16, "in_channels": 4, "hidden_size": 48, "num_layers": 2, "num_refiner_layers": 1}
        | {"num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (8, 4, 4)}
        | {"axes_lens": (64, 64, 64), "cap_feat_dim": 16},
        _with(_image(4), 16, encoder_attention_mask=padding()),
    ),
    "pixart": Model(
        "PixArtTransformer2DModel",
        {"sample_size": 16, "num_layers": 2, "cross_attention_dim": 32, "norm_eps": 1e-6}
        | {"caption_channels": 16, "use_additional_conditions": False}
        | _LATENT
        | _HEADS,
        _with(_image(4), 16, encoder_attention_mask=padding()),
    ),
    "sana": Model(
        "SanaTransformer2DModel",
        {
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
        }
        | {"caption_channels": 16, "sample_size": 16}
        | _LATENT
        | _HEADS,
        _with(_image(4), 16, encoder_attention_mask=padding()),
    ),
    "cogvideox": Model(
        "CogVideoXTransformer3DModel",
        {"time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2, "sample_width": 16, "sample_height": 16}
        | {"sample_frames": 5, "max_text_seq_length": TEXT, "use_rotary_positional_embeddings": False}
        | _LATENT
        | _HEADS,
        _with(lambda n: {"hidden_states": _randn(2, 4, 2 * n, 2 * n)}, 16),
    ),
    "cogview4": Model(
        "CogView4Transformer2DModel",
        {"num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 4} | _LATENT | _HEADS,
        _with(_image(4), 16, **{name: _randn(2) for name in ("original_size", "target_size", "crop_coords")}),
    ),
    "mochi": Model(
        "MochiTransformer3DModel",
        {
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
        }
        | {"max_sequence_length": TEXT}
        | _HEADS,
        _with(_video(4), 16, encoder_attention_mask=padding()),
    ),
    "aura_flow": Model(
        "AuraFlowTransformer2DModel",
        {"sample_size": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "caption_projection_dim": 32}
        | {"joint_attention_dim": 16, "pos_embed_max_size": 64}
        | _LATENT
        | _HEADS,
        _with(_image(4), 16),
    ),
    "allegro": Model(
        "AllegroTransformer3DModel",
        {
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_width": 16,
            "sample_height": 16,
            "sample_frames": 2,
        }
        | {"caption_channels": 16}
        | _LATENT
        | _HEADS,
        _with(_video(4), 16, encoder_attention_mask=padding()),
    ),
}
