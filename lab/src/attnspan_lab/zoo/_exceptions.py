"""Exceptions to the other modules' rules for single families. families.toml contains more of them."""

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["BENCHES", "CHANGES", "IMAGE_FORMS", "LEFT_OUT", "NOT_PACKED", "NOT_PADDED", "TOWERS"]

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
#: Configuration fields that need other values than the rule gives.
CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {64: 16}},
    "blip-2": {"image_token_index": 9},
    "gemma3": {"mm_tokens_per_image": 16},
    "glm46v": {"text_config": {"rope_parameters": _SECTIONS}},
    "glm4v": {"text_config": {"rope_parameters": _SECTIONS}},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}}},
    "glm_ocr": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "llama4": {
        "vision_config": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64}
    },
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 16}},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "segformer": {"sr_ratios": [2, 2, 1, 1]},  # otherwise there is only one key
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "esm": {"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 0, "mask_token_id": 3},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dinov3_vit": {"pos_embed_rescale": None},
    "sapiens2": {"pos_embed_rescale": None},
    "wav2vec2-conformer": {"vocab_size": 128},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron_h": {"n_groups": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "roc_bert": {"shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Four query heads share a key head, as in Llama 3 8B, Qwen3 8B and Granite 3 8B. The defaults are older.
_GROUPED = {"num_key_value_heads": 2}
#: Families with the size "bench", and changes for that size.
BENCHES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": _GROUPED,
    "mistral": {},
    "gemma3_text": {},
    "olmo2": {},
    "phi3": {},
    "gpt2": {},
    "granite": _GROUPED,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "bert": {},
    "roberta": {},
    "modernbert": {},
}


_TABLES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))


def _families(table: str) -> dict[str, str]:
    """Read the texts of a table in families.toml by family."""
    return {name: said for said, names in _TABLES[table].items() for name in names.split()}


NOT_PACKED = _families("not_packed")
NOT_PADDED = _families("not_padded")
IMAGE_FORMS = _families("image_forms")
LEFT_OUT = _families("left_out")
#: Families of each kind of encoder without its own head.
TOWERS: dict[str, str] = _TABLES["towers"]
