"""The diffusers models: their inputs, and exceptions to their small configurations."""

from functools import partial
from typing import Any

import torch

from attnspan_lab.zoo._diffusion import (
    CHANNELS,
    MASKED,
    ROWS,
    TEXT,
    Model,
    Scale,
    clip,
    image_inputs,
    latents,
    noise,
    positions,
    text,
    turns,
    video_inputs,
)

__all__ = ["MODELS"]


def _flux_inputs(s: Scale, n: int) -> dict[str, Any]:
    return {"hidden_states": noise(n * n, 16), **text(s), **positions(3, s, n)}


def _sized(s: Scale, n: int) -> dict[str, Any]:
    """Make the inputs of CogView models."""
    size = torch.full((ROWS, 2), 16.0 * n)
    more = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(ROWS, 2)}
    return image_inputs(s, n) | more


def _omnigen_inputs(s: Scale, n: int) -> dict[str, Any]:
    total = s.text + 1 + n * n
    return {
        "hidden_states": latents(n),
        "timestep": torch.tensor([0.1, 0.5]),
        "input_ids": torch.arange(ROWS * s.text).reshape(ROWS, -1) % 90 + 32,
        "input_img_latents": [],
        "input_image_sizes": {},
        "position_ids": torch.arange(total).repeat(ROWS, 1),
        "attention_mask": torch.ones(ROWS, total, total).tril(),
    }


def _kandinsky_inputs(s: Scale, n: int) -> dict[str, Any]:
    """Make the inputs for one sample, because the model accepts only one."""
    return {
        "hidden_states": clip(n)[:1].permute(0, 2, 3, 4, 1).contiguous(),
        "encoder_hidden_states": noise(s.text, TEXT)[:1],
        "timestep": torch.tensor([5.0]),
        "pooled_projections": noise(16)[:1],
        "text_rope_pos": torch.arange(s.text),
        "visual_rope_pos": (torch.arange(2), torch.arange(n), torch.arange(n)),
    }


_WIDE = {"in_channels": 16}  # patches of 2 * 2 become channels
_FLUX = _WIDE | {"out_channels": 16}
_IMAGES: dict[str, Model] = {
    "SD3Transformer2DModel": Model(
        lambda s, n: image_inputs(s, n) | {"pooled_projections": noise(16)},
        {"pos_embed_max_size": 128, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    ),
    "FluxTransformer2DModel": Model(
        lambda s, n: _flux_inputs(s, n) | {"pooled_projections": noise(16)}, _FLUX
    ),
    "Flux2Transformer2DModel": Model(
        lambda s, n: _flux_inputs(s, n) | {"guidance": torch.ones(ROWS)} | positions(4, s, n, ROWS),
        _FLUX,
        axes=(2, 2, 2, 2),
    ),
    "ChromaTransformer2DModel": Model(
        _flux_inputs, _FLUX, mask={"attention_mask": torch.bool}, image_in_mask=True
    ),
    "BriaTransformer2DModel": Model(_flux_inputs, _WIDE | {"pooled_projection_dim": None}),
    "OvisImageTransformer2DModel": Model(_flux_inputs, _FLUX),
    "LongCatImageTransformer2DModel": Model(_flux_inputs, _WIDE),
    "QwenImageTransformer2DModel": Model(
        lambda s, n: {"hidden_states": noise(n * n, 16), **text(s), "img_shapes": [(1, n, n)] * ROWS},
        _WIDE,
        mask={"encoder_hidden_states_mask": torch.long},
        needs_mask=True,
    ),
    "HunyuanImageTransformer2DModel": Model(
        image_inputs,
        {"patch_size": (2, 2)},
        axes=(4, 4),
        mask={"encoder_attention_mask": torch.float32},
        needs_mask=True,
    ),
    "Lumina2Transformer2DModel": Model(
        image_inputs,
        {"multiple_of": 2, "axes_lens": (1024, 128, 128)},
        axes=(4, 2, 2),
        mask=MASKED,
        needs_mask=True,
    ),
    "PixArtTransformer2DModel": Model(image_inputs, {"use_additional_conditions": False}, mask=MASKED),
    "SanaTransformer2DModel": Model(image_inputs, mask=MASKED),
    "CogView3PlusTransformer2DModel": Model(_sized, {"condition_dim": 4}),
    "CogView4Transformer2DModel": Model(_sized, {"condition_dim": 4, "rope_axes_dim": (128, 128)}),
    "AuraFlowTransformer2DModel": Model(image_inputs, {"pos_embed_max_size": 16384}),
    "DiTTransformer2DModel": Model(
        lambda _, n: {
            "hidden_states": latents(n),
            "timestep": torch.tensor([1, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
        {"norm_num_groups": 4},
    ),
    "HunyuanDiT2DModel": Model(
        lambda s, n: (
            image_inputs(s, n)
            | {"encoder_hidden_states_t5": noise(s.text, TEXT)}
            | {"image_rotary_emb": (torch.ones(n * n, s.head_dim), torch.zeros(n * n, s.head_dim))}
        ),
        {"patch_size": 2, "cross_attention_dim": TEXT, "use_style_cond_and_image_meta_size": False},
        mask={"text_embedding_mask": torch.bool, "text_embedding_mask_t5": torch.bool},
        needs_mask=True,
    ),
    "StableAudioDiTModel": Model(
        lambda s, n: (
            {"hidden_states": noise(8, n * n), **text(s)}
            | {"global_hidden_states": noise(1, 16), "rotary_embedding": turns(n * n + 1, s.head_dim // 2)}
        ),
        {"sample_size": 4096, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32},
        mask=MASKED,
    ),
    "ZImageTransformer2DModel": Model(
        lambda s, n: (
            {"x": list(noise(CHANNELS, 1, 2 * n, 2 * n)), "t": torch.tensor([0.1, 0.5])}
            | {"cap_feats": list(noise(s.text, TEXT))}
        ),
    ),
    "PRXTransformer2DModel": Model(image_inputs, axes=(4, 4), mask={"attention_mask": torch.bool}),
    "OmniGenTransformer2DModel": Model(
        _omnigen_inputs,
        {
            "pad_token_id": 0,
            "vocab_size": 128,
            "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        },
    ),
    "ErnieImageTransformer2DModel": Model(
        lambda s, n: (
            {"hidden_states": noise(CHANNELS, n, n), "timestep": torch.tensor([1.0, 5.0])}
            | {"text_bth": noise(s.text, TEXT)}
        ),
        mask={"text_lens": torch.long},
        needs_mask=True,
    ),
}

_video = partial(Model, frames=2)
_VIDEOS: dict[str, Model] = {
    "WanTransformer3DModel": _video(video_inputs),
    "SkyReelsV2Transformer3DModel": _video(video_inputs),
    "ChronoEditTransformer3DModel": _video(video_inputs),
    "WanVACETransformer3DModel": _video(
        lambda s, n: (
            video_inputs(s, n)
            | {"control_hidden_states": clip(n, 8), "control_hidden_states_scale": torch.ones(1)}
        ),
        {"vace_layers": [0]},
    ),
    "LTXVideoTransformer3DModel": _video(
        lambda s, n: (
            {"hidden_states": noise(2 * n * n, CHANNELS), **text(s)}
            | {"num_frames": 2, "height": n, "width": n}
        ),
        mask=MASKED,
        needs_mask=True,
    ),
    "HunyuanVideoTransformer3DModel": _video(
        lambda s, n: video_inputs(s, n) | {"pooled_projections": noise(8), "guidance": torch.ones(ROWS)},
        {"pooled_projection_dim": 8},
        mask={"encoder_attention_mask": torch.float32},
        needs_mask=True,
    ),
    "HunyuanVideo15Transformer3DModel": _video(
        lambda s, n: (
            video_inputs(s, n) | {"encoder_hidden_states_2": noise(s.text, 8), "image_embeds": noise(3, 12)}
        ),
        {"text_embed_2_dim": 8, "image_embed_dim": 12, "target_size": 16},
        mask={"encoder_attention_mask": torch.float32, "encoder_attention_mask_2": torch.float32},
        needs_mask=True,
    ),
    "SanaVideoTransformer3DModel": _video(video_inputs, mask=MASKED),
    "CogVideoXTransformer3DModel": _video(
        lambda s, n: {"hidden_states": clip(n).transpose(1, 2).contiguous(), **text(s)},
        {"sample_frames": 5, "use_rotary_positional_embeddings": False},
    ),
    "MochiTransformer3DModel": _video(video_inputs, mask=MASKED, needs_mask=True),
    "AllegroTransformer3DModel": _video(video_inputs, {"sample_frames": 2}, mask=MASKED),
    # No mask: the model fails with one, because it has a mask per sample instead of per frame.
    "LatteTransformer3DModel": _video(
        video_inputs,
        {"patch_size": 2, "video_length": 2, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000},
    ),
    "CosmosTransformer3DModel": _video(
        video_inputs,
        {"max_size": (4, 256, 256), "extra_pos_embed_type": None, "concat_padding_mask": False},
    ),
    "Kandinsky5Transformer3DModel": _video(_kandinsky_inputs),
    "EasyAnimateTransformer3DModel": _video(
        video_inputs, {"patch_size": 2, "time_position_encoding_type": "3d_rope"}
    ),
    "MotifVideoTransformer3DModel": _video(video_inputs, mask=MASKED),
}
MODELS = _IMAGES | _VIDEOS
