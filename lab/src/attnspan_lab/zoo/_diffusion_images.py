"""Models of images and of sound, and their inputs."""

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
    heads,
    image_inputs,
    latents,
    noise,
    positions,
    text,
    turns,
)

__all__ = ["MODELS"]


def _flux(s: Scale, **more: Any) -> dict[str, Any]:
    single = s.layers * 2 // 3 or 1
    sizes = {"patch_size": 1, "in_channels": 16, "num_layers": s.layers - single, "num_single_layers": single}
    return sizes | {"joint_attention_dim": TEXT} | heads(s) | more


def _flux_inputs(s: Scale, n: int) -> dict[str, Any]:
    return {"hidden_states": noise(n * n, 16), **text(s), **positions(3, s, n)}


def _sized(s: Scale, n: int) -> dict[str, Any]:
    """Those of the CogView kind."""
    size = torch.full((ROWS, 2), 16.0 * n)
    more = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(ROWS, 2)}
    return image_inputs(s, n) | more


MODELS: dict[str, Model] = {
    "SD3Transformer2DModel": Model(
        lambda s: (
            {
                "sample_size": 32,
                "patch_size": 2,
                "num_layers": s.layers,
                "caption_projection_dim": s.hidden,
                "joint_attention_dim": TEXT,
                "pooled_projection_dim": 16,
                "pos_embed_max_size": 128,
                "dual_attention_layers": (0,),
                "qk_norm": "rms_norm",
            }
            | LATENT
            | heads(s)
        ),
        lambda s, n: image_inputs(s, n) | {"pooled_projections": noise(16)},
    ),
    "FluxTransformer2DModel": Model(
        lambda s: _flux(s, pooled_projection_dim=16, axes_dims_rope=s.axes(2, 3, 3)),
        lambda s, n: _flux_inputs(s, n) | {"pooled_projections": noise(16)},
    ),
    "Flux2Transformer2DModel": Model(
        lambda s: _flux(s, timestep_guidance_channels=32, axes_dims_rope=s.axes(2, 2, 2, 2)),
        lambda s, n: _flux_inputs(s, n) | {"guidance": torch.ones(ROWS)} | positions(4, s, n, ROWS),
    ),
    "ChromaTransformer2DModel": Model(
        lambda s: _flux(
            s,
            axes_dims_rope=s.axes(2, 3, 3),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        _flux_inputs,
        mask={"attention_mask": torch.bool},
        image_in_mask=True,
    ),
    "BriaTransformer2DModel": Model(lambda s: _flux(s, axes_dims_rope=s.axes(2, 3, 3)), _flux_inputs),
    "OvisImageTransformer2DModel": Model(
        lambda s: _flux(s, axes_dims_rope=s.axes(2, 3, 3), out_channels=16), _flux_inputs
    ),
    "LongCatImageTransformer2DModel": Model(
        lambda s: _flux(s, axes_dims_rope=s.axes(2, 3, 3), pooled_projection_dim=16), _flux_inputs
    ),
    "QwenImageTransformer2DModel": Model(
        lambda s: (
            {
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": s.layers,
                "joint_attention_dim": TEXT,
                "axes_dims_rope": s.axes(2, 3, 3),
            }
            | heads(s)
        ),
        lambda s, n: {"hidden_states": noise(n * n, 16), **text(s), "img_shapes": [(1, n, n)] * ROWS},
        mask={"encoder_hidden_states_mask": torch.long},
        needs_mask=True,
    ),
    "HunyuanImageTransformer2DModel": Model(
        lambda s: (
            {
                "num_layers": 1,
                "num_single_layers": s.layers - 1,
                "num_refiner_layers": 1,
                "patch_size": (2, 2),
                "text_embed_dim": TEXT,
                "rope_axes_dim": s.axes(4, 4),
            }
            | LATENT
            | heads(s)
        ),
        image_inputs,
        mask={"encoder_attention_mask": torch.float32},
        needs_mask=True,
    ),
    "Lumina2Transformer2DModel": Model(
        lambda s: {
            "sample_size": 32,
            "in_channels": CHANNELS,
            "hidden_size": s.hidden,
            "num_layers": s.layers,
            "num_refiner_layers": 1,
            "num_attention_heads": s.heads,
            "num_kv_heads": s.heads // 2,
            "multiple_of": 2,
            "axes_dim_rope": s.axes(4, 2, 2),
            "axes_lens": (1024, 128, 128),
            "cap_feat_dim": TEXT,
        },
        image_inputs,
        mask=MASKED,
        needs_mask=True,
    ),
    "PixArtTransformer2DModel": Model(
        lambda s: (
            {
                "sample_size": 32,
                "num_layers": s.layers,
                "cross_attention_dim": s.hidden,
                "caption_channels": TEXT,
                "use_additional_conditions": False,
            }
            | LATENT
            | heads(s)
        ),
        image_inputs,
        mask=MASKED,
    ),
    "SanaTransformer2DModel": Model(
        lambda s: (
            {
                "num_layers": s.layers,
                "num_cross_attention_heads": s.heads,
                "cross_attention_head_dim": s.head_dim,
                "cross_attention_dim": s.hidden,
                "caption_channels": TEXT,
                "sample_size": 32,
            }
            | LATENT
            | heads(s)
        ),
        image_inputs,
        mask=MASKED,
    ),
    "CogView3PlusTransformer2DModel": Model(
        lambda s: (
            {"num_layers": s.layers, "text_embed_dim": TEXT, "time_embed_dim": 8, "condition_dim": 4}
            | LATENT
            | heads(s)
        ),
        _sized,
    ),
    "CogView4Transformer2DModel": Model(
        lambda s: (
            {"num_layers": s.layers, "text_embed_dim": TEXT, "time_embed_dim": 8, "condition_dim": 4}
            | {"rope_axes_dim": (128, 128)}
            | LATENT
            | heads(s)
        ),
        _sized,
    ),
    "AuraFlowTransformer2DModel": Model(
        lambda s: (
            {
                "sample_size": 32,
                "num_mmdit_layers": s.layers - s.layers * 2 // 3,
                "num_single_dit_layers": s.layers * 2 // 3,
                "caption_projection_dim": s.hidden,
                "joint_attention_dim": TEXT,
                "pos_embed_max_size": 16384,
            }
            | LATENT
            | heads(s)
        ),
        image_inputs,
    ),
    "DiTTransformer2DModel": Model(
        lambda s: (
            {"num_layers": s.layers, "sample_size": 32, "num_embeds_ada_norm": 16, "norm_num_groups": 4}
            | LATENT
            | heads(s)
        ),
        lambda _, n: (
            {"hidden_states": latents(n), "timestep": torch.tensor([1, 5])}
            | {"class_labels": torch.tensor([1, 2])}
        ),
    ),
    "HunyuanDiT2DModel": Model(
        lambda s: (
            {
                "in_channels": CHANNELS,
                "patch_size": 2,
                "hidden_size": s.hidden,
                "num_layers": s.layers,
                "cross_attention_dim": TEXT,
                "cross_attention_dim_t5": TEXT,
                "pooled_projection_dim": 16,
                "text_len": s.text,
                "text_len_t5": s.text,
                "use_style_cond_and_image_meta_size": False,
                "activation_fn": "gelu-approximate",
                "sample_size": 32,
            }
            | heads(s)
        ),
        lambda s, n: (
            image_inputs(s, n)
            | {"encoder_hidden_states_t5": noise(s.text, TEXT)}
            | {"image_rotary_emb": (torch.ones(n * n, s.head_dim), torch.zeros(n * n, s.head_dim))}
        ),
        mask={"text_embedding_mask": torch.bool, "text_embedding_mask_t5": torch.bool},
        needs_mask=True,
    ),
    "StableAudioDiTModel": Model(
        lambda s: (
            {
                "sample_size": 4096,
                "in_channels": 8,
                "out_channels": 8,
                "num_layers": s.layers,
                "num_key_value_attention_heads": s.heads // 2,
                "cross_attention_dim": s.hidden // 2,
                "cross_attention_input_dim": TEXT,
                "time_proj_dim": 32,
                "global_states_input_dim": 16,
            }
            | heads(s)
        ),
        lambda s, n: (
            {"hidden_states": noise(8, n * n), **text(s)}
            | {"global_hidden_states": noise(1, 16), "rotary_embedding": turns(n * n + 1, s.head_dim // 2)}
        ),
        mask={"encoder_attention_mask": torch.bool},
    ),
    "ZImageTransformer2DModel": Model(
        lambda s: {
            "in_channels": CHANNELS,
            "dim": s.hidden,
            "n_layers": s.layers,
            "n_refiner_layers": 1,
            "n_heads": s.heads,
            "n_kv_heads": s.heads,
            "cap_feat_dim": TEXT,
            "axes_dims": list(s.axes(2, 3, 3)),
        },
        lambda s, n: (
            {"x": list(noise(CHANNELS, 1, 2 * n, 2 * n)), "t": torch.tensor([0.1, 0.5])}
            | {"cap_feats": list(noise(s.text, TEXT))}
        ),
    ),
    "PRXTransformer2DModel": Model(
        lambda s: {
            "in_channels": CHANNELS,
            "context_in_dim": TEXT,
            "hidden_size": s.hidden,
            "num_heads": s.heads,
            "depth": s.layers,
            "axes_dim": s.axes(4, 4),
        },
        image_inputs,
        mask={"attention_mask": torch.bool},
    ),
    "OmniGenTransformer2DModel": Model(
        lambda s: {
            "in_channels": CHANNELS,
            "hidden_size": s.hidden,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.heads,
            "intermediate_size": 2 * s.hidden,
            "num_layers": s.layers,
            "pad_token_id": 0,
            "vocab_size": 128,
            "time_step_dim": 32,
            "rope_scaling": {
                "short_factor": [1.0] * (s.head_dim // 2),
                "long_factor": [1.0] * (s.head_dim // 2),
            },
        },
        lambda s, n: (
            {"hidden_states": latents(n), "timestep": torch.tensor([0.1, 0.5])}
            | {"input_ids": torch.arange(ROWS * s.text).reshape(ROWS, -1) % 90 + 32, "input_img_latents": []}
            | {"input_image_sizes": {}, "position_ids": torch.arange(s.text + 1 + n * n).repeat(ROWS, 1)}
            | {"attention_mask": torch.ones(ROWS, s.text + 1 + n * n, s.text + 1 + n * n).tril()}
        ),
    ),
    "ErnieImageTransformer2DModel": Model(
        lambda s: (
            {
                "hidden_size": s.hidden,
                "num_attention_heads": s.heads,
                "num_layers": s.layers,
                "ffn_hidden_size": 2 * s.hidden,
                "text_in_dim": TEXT,
                "rope_axes_dim": s.axes(2, 3, 3),
            }
            | LATENT
        ),
        lambda s, n: (
            {"hidden_states": noise(CHANNELS, n, n), "timestep": torch.tensor([1.0, 5.0])}
            | {"text_bth": noise(s.text, TEXT)}
        ),
        mask={"text_lens": torch.long},
        needs_mask=True,
    ),
}
