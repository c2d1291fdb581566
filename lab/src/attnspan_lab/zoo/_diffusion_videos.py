"""Models of videos, and their inputs."""

from typing import Any

import torch

from attnspan_lab.zoo._diffusion import (
    CHANNELS,
    LATENT,
    MASKED,
    ROWS,
    TEXT,
    Model,
    Scale,
    clip,
    heads,
    noise,
    text,
)

__all__ = ["MODELS"]


def _wan(s: Scale) -> dict[str, Any]:
    sizes = {"patch_size": (1, 2, 2), "text_dim": TEXT, "freq_dim": 32, "ffn_dim": 4 * s.hidden}
    return sizes | {"num_layers": s.layers} | LATENT | heads(s)


def _video_inputs(s: Scale, n: int) -> dict[str, Any]:
    return {"hidden_states": clip(n), **text(s)}


MODELS: dict[str, Model] = {
    "WanTransformer3DModel": Model(_wan, _video_inputs, frames=2),
    "SkyReelsV2Transformer3DModel": Model(_wan, _video_inputs, frames=2),
    "ChronoEditTransformer3DModel": Model(_wan, _video_inputs, frames=2),
    "WanVACETransformer3DModel": Model(
        lambda s: _wan(s) | {"vace_layers": [0], "vace_in_channels": 8},
        lambda s, n: (
            _video_inputs(s, n)
            | {"control_hidden_states": clip(n, 8), "control_hidden_states_scale": torch.ones(1)}
        ),
        frames=2,
    ),
    "LTXVideoTransformer3DModel": Model(
        lambda s: (
            {"cross_attention_dim": s.hidden, "num_layers": s.layers, "caption_channels": TEXT}
            | LATENT
            | heads(s)
        ),
        lambda s, n: (
            {"hidden_states": noise(2 * n * n, CHANNELS), **text(s)}
            | {"num_frames": 2, "height": n, "width": n}
        ),
        frames=2,
        mask=MASKED,
        needs_mask=True,
    ),
    "HunyuanVideoTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers - (s.layers * 2 // 3),
                "num_single_layers": s.layers * 2 // 3,
                "num_refiner_layers": 1,
                "patch_size": 2,
                "text_embed_dim": TEXT,
                "pooled_projection_dim": 8,
                "rope_axes_dim": s.axes(2, 3, 3),
            }
            | LATENT
            | heads(s)
        ),
        lambda s, n: _video_inputs(s, n) | {"pooled_projections": noise(8), "guidance": torch.ones(ROWS)},
        frames=2,
        mask={"encoder_attention_mask": torch.float32},
        needs_mask=True,
    ),
    "HunyuanVideo15Transformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "num_refiner_layers": 1,
                "text_embed_dim": TEXT,
                "text_embed_2_dim": 8,
                "image_embed_dim": 12,
                "rope_axes_dim": s.axes(2, 3, 3),
                "target_size": 16,
            }
            | LATENT
            | heads(s)
        ),
        lambda s, n: (
            _video_inputs(s, n) | {"encoder_hidden_states_2": noise(s.text, 8), "image_embeds": noise(3, 12)}
        ),
        frames=2,
        mask={"encoder_attention_mask": torch.float32, "encoder_attention_mask_2": torch.float32},
        needs_mask=True,
    ),
    "SanaVideoTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "num_cross_attention_heads": s.heads,
                "cross_attention_head_dim": s.head_dim,
                "cross_attention_dim": s.hidden,
                "caption_channels": TEXT,
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
        mask=MASKED,
    ),
    "CogVideoXTransformer3DModel": Model(
        lambda s: (
            {
                "time_embed_dim": 8,
                "text_embed_dim": TEXT,
                "num_layers": s.layers,
                "sample_width": 32,
                "sample_height": 32,
                "sample_frames": 5,
                "max_text_seq_length": s.text,
                "use_rotary_positional_embeddings": False,
            }
            | LATENT
            | heads(s)
        ),
        lambda s, n: {"hidden_states": clip(n).transpose(1, 2).contiguous(), **text(s)},
        frames=2,
    ),
    "MochiTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "pooled_projection_dim": 16,
                "in_channels": CHANNELS,
                "text_embed_dim": TEXT,
                "time_embed_dim": 8,
                "max_sequence_length": s.text,
            }
            | heads(s)
        ),
        _video_inputs,
        frames=2,
        mask=MASKED,
        needs_mask=True,
    ),
    "AllegroTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "cross_attention_dim": s.hidden,
                "sample_width": 32,
                "sample_height": 32,
                "sample_frames": 2,
                "caption_channels": TEXT,
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
        mask=MASKED,
    ),
    "LatteTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "cross_attention_dim": s.hidden,
                "caption_channels": TEXT,
                "sample_size": 32,
                "patch_size": 2,
                "video_length": 2,
                "norm_type": "ada_norm_single",
                "num_embeds_ada_norm": 1000,
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
        # No mask: it has one for a sample and not for each of its frames, and fails.
    ),
    "CosmosTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "text_embed_dim": TEXT,
                "adaln_lora_dim": 16,
                "max_size": (4, 256, 256),
                "extra_pos_embed_type": None,
                "concat_padding_mask": False,
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
    ),
    "Kandinsky5Transformer3DModel": Model(
        lambda s: {
            "in_visual_dim": CHANNELS,
            "out_visual_dim": CHANNELS,
            "in_text_dim": TEXT,
            "in_text_dim2": 16,
            "time_dim": 32,
            "model_dim": s.hidden,
            "ff_dim": 4 * s.hidden,
            "num_text_blocks": 1,
            "num_visual_blocks": s.layers - 1,
            "axes_dims": s.axes(2, 3, 3),
        },
        lambda s, n: (
            {"hidden_states": clip(n)[:1].permute(0, 2, 3, 4, 1).contiguous()}
            | {"encoder_hidden_states": noise(s.text, TEXT)[:1], "timestep": torch.tensor([5.0])}
            | {"pooled_projections": noise(16)[:1], "text_rope_pos": torch.arange(s.text)}
            | {"visual_rope_pos": (torch.arange(2), torch.arange(n), torch.arange(n))}
        ),
        frames=2,
    ),
    "EasyAnimateTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "mmdit_layers": s.layers,
                "patch_size": 2,
                "text_embed_dim": TEXT,
                "time_embed_dim": 8,
                "time_position_encoding_type": "3d_rope",
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
    ),
    "MotifVideoTransformer3DModel": Model(
        lambda s: (
            {
                "num_layers": 1,
                "num_single_layers": s.layers - 1,
                "text_embed_dim": TEXT,
                "rope_axes_dim": s.axes(2, 3, 3),
            }
            | LATENT
            | heads(s)
        ),
        _video_inputs,
        frames=2,
        mask=MASKED,
    ),
}
