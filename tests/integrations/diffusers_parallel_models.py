"""Small transformers of diffusers whose tokens, text and heads do not divide by the ranks."""

from typing import Any, NamedTuple

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    MochiTransformer3DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn


class Sizes(NamedTuple):
    """Sizes of a problem: none divides by the ranks."""

    batch: int = 2
    text: int = 7
    height: int = 3
    width: int = 5
    padded: bool = False
    heads: int = 3
    layers: int = 2  # of Qwen-Image

    @property
    def keep(self) -> Tensor:
        """Which text tokens are real, (B, text)."""
        lengths = torch.tensor([self.text, 2, self.text - 1, 1][: self.batch])
        return torch.arange(self.text) < lengths[:, None]


ODD = Sizes()
#: The class of a model, its configuration, and inputs.
Made = tuple[type, dict[str, Any], dict[str, Any]]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _heads(s: Sizes, dim: int) -> dict[str, int]:
    return {"num_attention_heads": s.heads, "attention_head_dim": dim}


def _steps(s: Sizes) -> Tensor:
    return torch.linspace(0.2, 0.8, s.batch)


def _text(s: Sizes, dim: int = 12) -> dict[str, Tensor]:
    """Text, and the time of a step."""
    return {"encoder_hidden_states": noise(s.batch, s.text, dim), "timestep": _steps(s)}


def _shown(s: Sizes) -> Tensor:
    """A mask of the text, which models want without padding too."""
    return s.keep if s.padded else torch.ones_like(s.keep)


def _ids(s: Sizes, axes: int) -> tuple[Tensor, Tensor]:
    image = torch.zeros(s.height, s.width, axes)
    image[..., 1], image[..., 2] = torch.arange(s.height)[:, None], torch.arange(s.width)
    text = torch.zeros(s.text, axes)
    text[:, -1] = torch.arange(s.text) if axes == 4 else 0
    return image.flatten(0, 1), text


def flux(s: Sizes) -> Made:
    config = {"num_layers": 2, "num_single_layers": 2, **_heads(s, 16), "in_channels": 4}
    config |= {"joint_attention_dim": 12, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}
    image, text = _ids(s, 3)
    inputs = {
        "hidden_states": noise(s.batch, s.height * s.width, 4),
        **_text(s),
        "pooled_projections": noise(s.batch, 8),
        "img_ids": image,
        "txt_ids": text,
    }
    return FluxTransformer2DModel, config, inputs


def flux2(s: Sizes) -> Made:
    config = {"num_layers": 1, "num_single_layers": 2, **_heads(s, 16), "in_channels": 4}
    config |= {"joint_attention_dim": 12, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16}
    image, text = _ids(s, 4)
    inputs = {
        "hidden_states": noise(s.batch, s.height * s.width, 4),
        **_text(s),
        "guidance": torch.ones(s.batch),
        "img_ids": image,
        "txt_ids": text,
    }
    return Flux2Transformer2DModel, config, inputs


def qwen_image(s: Sizes) -> Made:
    config = {"num_layers": s.layers, **_heads(s, 16), "in_channels": 16}
    config |= {"out_channels": 4, "joint_attention_dim": 12, "axes_dims_rope": (4, 4, 8), "patch_size": 2}
    inputs = {
        "hidden_states": noise(s.batch, s.height * s.width, 16),
        **_text(s),
        "encoder_hidden_states_mask": s.keep.long() if s.padded else None,
        "img_shapes": [[(1, s.height, s.width)]] * s.batch,
    }
    return QwenImageTransformer2DModel, config, inputs


def sd3(s: Sizes) -> Made:
    config = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8}
    config |= {
        "num_attention_heads": s.heads,
        "joint_attention_dim": 12,
        "caption_projection_dim": 8 * s.heads,
    }
    config |= {"pooled_projection_dim": 8, "out_channels": 4, "pos_embed_max_size": 12}
    config |= {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    inputs = {
        "hidden_states": noise(s.batch, 4, 2 * s.height, 2 * s.width),
        **_text(s),
        "pooled_projections": noise(s.batch, 8),
    }
    return SD3Transformer2DModel, config, inputs


def _film(s: Sizes, channels: int) -> Tensor:
    return noise(s.batch, channels, 3, 2 * s.height, 2 * s.width)


def wan(s: Sizes) -> Made:
    config = {"patch_size": (1, 2, 2), **_heads(s, 12)}
    config |= {"in_channels": 4, "out_channels": 4, "text_dim": 12, "freq_dim": 16, "ffn_dim": 24}
    config |= {"num_layers": 2}
    config |= {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
    inputs = {"hidden_states": _film(s, 4), **_text(s)}
    if s.padded:  # Wan 2.2: a time for each token, instead of padding.
        inputs["timestep"] = torch.linspace(0.1, 0.9, 3 * s.height * s.width).repeat(s.batch, 1)
    return WanTransformer3DModel, config, inputs


def ltx(s: Sizes) -> Made:
    config = {"in_channels": 8, "out_channels": 8, **_heads(s, 8)}
    config |= {"cross_attention_dim": 8 * s.heads, "num_layers": 2, "caption_channels": 12}
    config |= {"qk_norm": "rms_norm_across_heads"}
    inputs = {
        "hidden_states": noise(s.batch, 3 * s.height * s.width, 8),
        **_text(s),
        "encoder_attention_mask": _shown(s),
        "num_frames": 3,
        "height": s.height,
        "width": s.width,
    }
    if s.padded:  # Also a time for each token.
        inputs["timestep"] = torch.linspace(0.1, 0.9, 3 * s.height * s.width).repeat(s.batch, 1)
    return LTXVideoTransformer3DModel, config, inputs


def hunyuan_video(s: Sizes) -> Made:
    config = {"in_channels": 4, "out_channels": 4, **_heads(s, 16)}
    config |= {"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 2}
    config |= {"patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 12}
    config |= {"pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8)}
    inputs = {
        "hidden_states": _film(s, 4),
        **_text(s),
        "encoder_attention_mask": _shown(s).long(),
        "pooled_projections": noise(s.batch, 8),
        "guidance": torch.ones(s.batch),
    }
    return HunyuanVideoTransformer3DModel, config, inputs


def hunyuan_video_replaced(s: Sizes) -> Made:
    kind, config, inputs = hunyuan_video(s)
    return kind, config | {"image_condition_type": "token_replace"}, inputs


def lumina2(s: Sizes) -> Made:
    config = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 8 * s.heads}
    config |= {"num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": s.heads, "num_kv_heads": 1}
    config |= {"multiple_of": 2, "norm_eps": 1e-5, "scaling_factor": 1.0, "axes_dim_rope": (4, 2, 2)}
    config |= {"axes_lens": (32, 32, 32), "cap_feat_dim": 12}
    inputs = {
        "hidden_states": noise(s.batch, 4, 2 * s.height, 2 * s.width),
        **_text(s),
        "encoder_attention_mask": _shown(s),
    }
    return Lumina2Transformer2DModel, config, inputs


def pixart(s: Sizes) -> Made:
    config = {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "in_channels": 4}
    config |= {"num_attention_heads": s.heads, "out_channels": 8, "cross_attention_dim": 8 * s.heads}
    config |= {"caption_channels": 12, "use_additional_conditions": False, "attention_bias": True}
    config |= {"norm_num_groups": 1, "norm_elementwise_affine": False, "norm_eps": 1e-6}
    inputs = {
        "hidden_states": noise(s.batch, 4, 2 * s.height, 2 * s.width),
        **_text(s),
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
        "encoder_attention_mask": s.keep.long() if s.padded else None,
    }
    if s.padded:  # PixArt takes one of the picture too.
        kept = torch.ones(s.batch, s.height * s.width)
        kept[:, ::4] = 0
        inputs["attention_mask"] = kept
    return PixArtTransformer2DModel, config, inputs


def cogvideox(s: Sizes) -> Made:
    config = {**_heads(s, 16), "in_channels": 4, "out_channels": 4}
    config |= {"time_embed_dim": 4, "text_embed_dim": 12, "num_layers": 2, "sample_width": 2 * s.width}
    config |= {"sample_height": 2 * s.height, "sample_frames": 9, "patch_size": 2}
    config |= {"max_text_seq_length": s.text}
    config |= {"temporal_compression_ratio": 4, "use_rotary_positional_embeddings": True}
    angles = torch.randn(3 * s.height * s.width, 16)
    inputs = {
        "hidden_states": noise(s.batch, 3, 4, 2 * s.height, 2 * s.width),
        **_text(s),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    return CogVideoXTransformer3DModel, config, inputs


def mochi(s: Sizes) -> Made:
    config = {"patch_size": 2, **_heads(s, 8), "num_layers": 2}
    config |= {"pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 4}
    config |= {"activation_fn": "swiglu", "max_sequence_length": 16}
    inputs = {"hidden_states": _film(s, 4), **_text(s, 16), "encoder_attention_mask": _shown(s)}
    return MochiTransformer3DModel, config, inputs


def flux_controlled(s: Sizes) -> Made:
    kind, config, inputs = flux(s)
    for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
        inputs[name] = [noise(s.batch, s.height * s.width, 16 * s.heads) for _ in range(2)]
    return kind, config, inputs


def qwen_image_edited(s: Sizes) -> Made:
    kind, config, inputs = qwen_image(s)
    inputs["img_shapes"] = [[(1, s.height, s.width - 2), (1, s.height, 2)]] * s.batch
    return kind, config | {"zero_cond_t": True}, inputs


def cogvideox_in_time(s: Sizes) -> Made:
    kind, config, inputs = cogvideox(s)
    config |= {"patch_size_t": 3, "patch_bias": False}
    angles = torch.randn(s.height * s.width, 16)
    return kind, config, inputs | {"image_rotary_emb": (angles.cos(), angles.sin())}


def wan_of_image(s: Sizes) -> Made:
    kind, config, inputs = wan(s)
    inputs["encoder_hidden_states_image"] = noise(s.batch, 5, 12)
    return kind, config | {"image_dim": 12, "added_kv_proj_dim": 12 * s.heads}, inputs


def sd3_controlled(s: Sizes) -> Made:
    kind, config, inputs = sd3(s)
    inputs["block_controlnet_hidden_states"] = [noise(s.batch, s.height * s.width, 8 * s.heads)] * 2
    return kind, config, inputs | {"skip_layers": [1]}


def make(name: str, sizes: Sizes = ODD) -> tuple[nn.Module, dict[str, Any]]:
    """A model of random weights, none of which is zero or one, and its inputs."""
    torch.manual_seed(1)
    kind, config, inputs = globals()[name](sizes)
    model = kind(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, inputs


#: What a process imports for these models.
IMPORTED = sorted({x.__module__ for x in list(vars().values()) if isinstance(x, type)} - {__name__})
