"""Small configurations of any model of transformers, by the names of their fields."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

__all__ = ["BENCH", "TINY", "Sizes", "small_configuration"]


@dataclass(frozen=True)
class Sizes:
    """Values for a kind of field. ``groups`` heads share one key head, where the family has that."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    intermediate: int | None = 128  # None: as many times the hidden size as the family has
    vocab: int = 128
    positions: int = 512
    window: int = 16
    experts: int = 4
    image: int = 32
    patch: int = 4


TINY = Sizes()
BENCH = replace(
    TINY,
    layers=12,
    hidden=512,
    heads=8,
    groups=4,
    head_dim=64,
    intermediate=None,
    vocab=1024,
    positions=16384,
    window=512,
)

# The fields of a kind have the same meaning in all libraries' families, and about twenty spellings.
_HIDDEN = """hidden_size d_model n_embd dim embed_dim embedding_size out_hidden_size projection_dim output_dim
    encoder_hidden_size decoder_hidden_size encoder_width projector_hidden_size hidden_dim width
    word_embed_proj_dim projection_hidden_size vision_output_dim pooler_output_size text_hidden_size
    proj_codevector_dim codevector_dim classifier_proj_size output_hidden_size
    cross_attention_hidden_size vision_hidden_size audio_hidden_size adapter_hidden_size model_dim
    projector_input_dim projector_output_dim mm_hidden_size text_embed_dim project_dim
    hidden_size_per_layer_input mm_projector_hidden_size downsample_hidden_size"""
_LAYERS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
    depth num_encoder_layers num_global_layers encoder_num_hidden_layers decoder_num_hidden_layers"""
_HEADS = """num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads
    attention_heads encoder_num_attention_heads decoder_num_attention_heads nhead
    linear_num_value_heads linear_num_key_heads mamba_num_heads mamba_n_heads linear_num_heads
    index_n_heads"""
_KEY_HEADS = """num_key_value_heads n_head_kv multi_query_group_num num_kv_heads encoder_num_key_value_heads
    decoder_num_key_value_heads num_global_key_value_heads"""
_HEAD_DIMS = """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim global_head_dim attention_head_dim
    kv_channels swa_head_dim swa_v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim
    mamba_head_dim mamba_d_head linear_head_dim ssm_state_size mamba_d_state"""
_INTERMEDIATE = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size n_inner
    alignment_intermediate_size intermediate_size_mlp ffn_config_hidden mlp_dim
    encoder_intermediate_size projector_intermediate_size"""
_EXPERT_INTERMEDIATE = """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    shared_intermediate_size moe_shared_expert_intermediate_size expert_intermediate_size"""
_POSITIONS = """max_position_embeddings n_positions max_target_positions max_sequence_length n_ctx
    max_2d_position_embeddings text_max_position_embeddings max_seq_len block_size_max"""
_EXPERTS = """num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"""
_CHOSEN = (
    """num_experts_per_tok moe_k moe_topk num_experts_per_token experts_per_token top_k_experts moe_top_k"""
)
_WINDOWS = """sliding_window attention_chunk_size local_attention sliding_window_size window_size_attention
    attention_window"""
_LATENT = "q_lora_rank kv_lora_rank o_lora_rank"
_CONSTANTS: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "encoder_layerdrop": 0.0,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "conv_dim": [32, 32, 32],
    "conv_kernel": [8, 3, 3],
    "conv_stride": [4, 2, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "type_vocab_size": 2,
}


def _table(sizes: Sizes) -> dict[str, Any]:
    """Values for the fields of each name."""
    values: list[tuple[str, Any]] = [
        (_HIDDEN, sizes.hidden),
        (_LAYERS, sizes.layers),
        (_HEADS, sizes.heads),
        (_HEAD_DIMS, sizes.head_dim),
        ("qk_head_dim", 2 * sizes.head_dim),
        (_EXPERT_INTERMEDIATE, sizes.hidden // 2),
        ("vocab_size vocab_size_per_layer_input text_vocab_size decoder_vocab_size", sizes.vocab),
        (_POSITIONS, sizes.positions),
        (_EXPERTS, sizes.experts),
        (_CHOSEN, sizes.experts // 2),
        (f"{_WINDOWS} index_topk chunk_size mamba_chunk_size", sizes.window),
        ("mamba_d_ssm", sizes.heads * sizes.head_dim),
        (_LATENT, sizes.hidden // 2),
    ]
    return {name: value for names, value in values for name in names.split()} | _CONSTANTS


def small_configuration(
    model_type: str, sizes: Sizes = TINY, changes: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """The default configuration of a family with small sizes, no dropout and no other chance.

    Args:
        model_type: A key of transformers' ``CONFIG_MAPPING``.
        sizes: What the fields become.
        changes: Values of fields that the rule gets wrong; a dict for those of a nested configuration.
    """
    return _small(CONFIG_MAPPING[model_type](), sizes, changes or {})


def _small(default: PreTrainedConfig, sizes: Sizes, changes: dict[str, Any]) -> PreTrainedConfig:
    had, table = vars(default), _table(sizes)
    given: dict[str, Any] = {}
    kinds = list(dict.fromkeys(had.get("layer_types") or ()))
    layers = max(sizes.layers, len(kinds))
    for name, value in had.items():
        if isinstance(value, PreTrainedConfig):
            given[name] = _small(value, sizes, changes.get(name, {}))
        elif name in _LAYERS.split() and kinds:
            given[name] = layers
        elif name.endswith("layer_types") and value:
            given[name] = _first_of_each(value, layers)
        elif value is not None:
            given[name] = _field(name.removeprefix("swa_"), value, had, sizes, table)
    plain = {k: v for k, v in changes.items() if not isinstance(had.get(k), PreTrainedConfig)}
    given = {k: v for k, v in given.items() if v is not None} | _token_ids(had) | plain
    return type(default)(**given | _rope(default, given))


def _field(name: str, value: Any, had: dict[str, Any], sizes: Sizes, table: dict[str, Any]) -> Any:
    """Value for one field; None if it stays."""
    if name in _KEY_HEADS.split():
        heads = next((had[x] for x in _HEADS.split() if isinstance(had.get(x), int)), value)
        return sizes.heads if value in (heads, 0) else sizes.heads // sizes.groups
    if name in _INTERMEDIATE.split():
        return _intermediate(value, had, sizes)
    if name in table and isinstance(value, list | tuple) == isinstance(table[name], list):
        return table[name]
    if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(0)
    if name in ("image_size", "patch_size"):
        return _like(value, sizes.image if name == "image_size" else sizes.patch)
    return None


def _first_of_each(kinds: list[str], layers: int) -> list[str]:
    """The family's own order where so many layers show all kinds, and else the kinds in turn."""
    distinct = list(dict.fromkeys(kinds))
    first = list(kinds[:layers])
    return first if len(first) == layers and set(first) == set(distinct) else (distinct * layers)[:layers]


def _intermediate(value: Any, had: dict[str, Any], sizes: Sizes) -> Any:
    if sizes.intermediate is not None or not isinstance(value, int):
        return sizes.intermediate
    hidden = next((had[x] for x in _HIDDEN.split() if isinstance(had.get(x), int)), value)
    return max(64, round(value / hidden * sizes.hidden / 64) * 64)


def _like(value: Any, number: int) -> Any:
    return type(value)(number for _ in value) if isinstance(value, list | tuple) else number


def _token_ids(had: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens, distinct and less than 32; batches draw tokens from 32 on."""
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    names = [
        name
        for name, value in had.items()
        if name.endswith(("_token_id", "_token_index"))
        and name != "decoder_start_token_id"
        and value is not None
    ]
    others = [name for name in names if name not in first]
    return {n: i for n, i in first.items() if n in had} | {n: 3 + i for i, n in enumerate(others)}


def _rope(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Sections of rotary embeddings, in the proportions of the family, that fit the head dim."""
    rope = vars(default).get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    dim = given.get("head_dim", TINY.head_dim if "head_dim" not in given else 0)
    half = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = rope["mrope_section"]
    small = [half * x // sum(sections) for x in sections]
    small[0] += half - sum(small)
    return {"rope_parameters": {**rope, "mrope_section": small}}
