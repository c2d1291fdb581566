"""Kinds of models of transformers other than plain decoders, each against the eager implementation."""

import importlib

import pytest
import torch
from closeness import relative_error
from programs import run_program

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    LEFT_PADDED,
    RENAMED,
    RIGHT_PADDED,
    SIZES,
    TOKENS,
    assert_equals_eager,
    build,
    computed,
    logits,
    states,
)

import attnspan.integrations.transformers as adapter  # noqa: E402
from attnspan.errors import OptionError  # noqa: E402

NO_MARKERS = {"cls_token_id": 1, "sep_token_id": 2}
LOCAL = {"local_attention": 6, "global_attn_every_n_layers": 2}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0}
T5 = {"d_model": 64, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_ff": 96}
#: Attention to latents, with experts.
LATENT = {"head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 48, "q_lora_rank": 24}
LATENT |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "n_routed_experts": 4}
LATENT |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


LM, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
#: Class and sizes of a model, its inputs besides tokens, how often it attends, and its padded tokens.
KINDS = {
    "bert": ("AutoModel", NO_MARKERS, {}, 2, RIGHT_PADDED),
    "modernbert": ("AutoModel", {**LOCAL, **NO_MARKERS}, {}, 2, RIGHT_PADDED),
    # The encoder, the decoder and attention across, two layers of each; in T5 with position bias.
    "bart": (SEQ2SEQ, BART, {"decoder_input_ids": TOKENS[:, :7]}, 6, RIGHT_PADDED),
    "t5": (SEQ2SEQ, T5, {"decoder_input_ids": TOKENS[:, :7]}, 6, RIGHT_PADDED),
    # Values of another head dim than keys.
    "deepseek_v3": (LM, {**LATENT, "v_head_dim": 20}, {}, 2, LEFT_PADDED),
}


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models_compute_what_eager_attention_does(name, padded):
    auto, sizes, more, calls, mask = KINDS[name]
    inputs = {"input_ids": TOKENS, **more, **({"attention_mask": mask} if padded else {})}
    valid = mask.bool() if padded and auto != SEQ2SEQ else ...
    read = states if auto == "AutoModel" else logits
    assert_equals_eager(build(name, auto, **sizes), inputs, calls, read, valid)


def test_local_windows_of_encoders_are_seen():
    """Layers with windows of 3 to each side pass a change on by 3 tokens each."""
    sizes = {"local_attention": 6, "layer_types": ["sliding_attention"] * 2}
    model = build("modernbert", "AutoModel", **sizes, **NO_MARKERS)
    model.set_attn_implementation("attnspan")
    changed = TOKENS.clone()
    changed[:, 0] += 1
    moved = (model(TOKENS).last_hidden_state != model(changed).last_hidden_state).any(2)
    assert moved[0].tolist() == [True] * 7 + [False] * 5


def test_padding_of_both_sides_with_position_bias():
    model = build("t5", "AutoModelForSeq2SeqLM", **T5)
    valid = torch.arange(7) < torch.tensor([[7], [5]])
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT_PADDED, "decoder_attention_mask": valid.long()}
    assert_equals_eager(model, {**inputs, "decoder_input_ids": TOKENS[:, :7]}, 6, valid=valid)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
#: Images of two rows, wider than the window.
IMAGES = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]])
GEMMA3 = {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 63}
GEMMA3 |= {"boi_token_index": 61, "eoi_token_index": 62}
VISION4 = {**VISION, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 16}
GEMMA4 = {"vision_config": VISION4, "audio_config": None, "image_token_id": 63}
GEMMA4 |= {"boi_token_id": 61, "eoi_token_id": 62}
TEXT4 = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
TEXT4 |= {"use_bidirectional_attention": "vision", "global_head_dim": 16}
#: The name of the groups, and sizes of the model and of its text.
GROUPS = {"gemma3": ("token_type_ids", GEMMA3, {}), "gemma4": ("mm_token_type_ids", GEMMA4, TEXT4)}


@pytest.mark.parametrize("padding", [{}, {"attention_mask": LEFT_PADDED}], ids=["plain", "padded"])
@pytest.mark.parametrize("name", GROUPS)
def test_images_that_see_themselves_inside_windows(name, padding):
    types, sizes, text = GROUPS[name]
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    text = {**SIZES, **windows, **text}
    model = build(name, "AutoModelForImageTextToText", text_config=text, **sizes)
    tokens = TOKENS % 50 + 3  # none of them is an image's own
    valid = padding.get("attention_mask", torch.ones(2, 12)).bool()
    inputs = {"input_ids": tokens, types: IMAGES, **padding}
    assert_equals_eager(model, inputs, 2, valid=valid, within=6e-6)
    with_groups = computed(model, "attnspan", inputs, logits)[0]
    without = computed(model, "attnspan", {**inputs, types: torch.zeros_like(IMAGES)}, logits)[0]
    assert relative_error(with_groups[1, 4:], without[1, 4:]) > 1e-3


FFN = {"intermediate_size": 48, "out_hidden_size": 32}
WINDOWS = {**FFN, "window_size": 56, "fullatt_block_indexes": [1]}
STACK = {**FFN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
TOWERS = {
    "Qwen2VL": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 32, "mlp_ratio": 2}),
    "Qwen2_5_VL": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS),
    "Qwen3VL": ("qwen3_vl", "Qwen3VLVisionModel", STACK),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_of_ragged_images_calls_the_operator_once_a_layer(name):
    package, kind, sizes = TOWERS[name]
    sizes = {"depth": 2, "num_heads": 2, "hidden_size": 32, **sizes}
    config = getattr(transformers, f"{name}Config")(vision_config=sizes).vision_config
    torch.manual_seed(0)
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    model = getattr(modeling, kind)._from_config(config).eval()
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [2, 2, 2]])
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    inputs = {"hidden_states": torch.randn(int(grid.prod(1).sum()), size), "grid_thw": grid}
    assert_equals_eager(model, inputs, 2, states)


def test_a_tower_whose_model_makes_the_offsets():
    config = transformers.PixtralVisionConfig(**{**VISION, "image_size": 32, "num_hidden_layers": 2})
    torch.manual_seed(0)
    model = transformers.PixtralVisionModel(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "image_sizes": torch.tensor([[16, 32], [32, 8]])}
    assert_equals_eager(model, inputs, 2, states)


def test_modules_that_ask_for_flash_attention_for_other_reasons_are_told_the_truth():
    """Only the configurations of encoders that take offsets are answered for."""
    test_a_tower_of_ragged_images_calls_the_operator_once_a_layer("Qwen2_5_VL")
    asked = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.is_flash_attention_requested
    vision, text = transformers.Qwen2_5_VLConfig().vision_config, transformers.Qwen2_5_VLConfig().text_config
    vision._attn_implementation = text._attn_implementation = adapter.NAME
    assert asked(vision)
    assert not asked(text)
    assert asked(requested_attention_implementation="flash_attention_2")
    assert not asked(requested_attention_implementation=adapter.NAME)


READING = {
    "deepseek_v32": {**LATENT, "v_head_dim": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    "doge": {"keep_window_size": 6},
}


@pytest.mark.filterwarnings("ignore::attnspan.integrations.transformers.AllPairsWarning")
@pytest.mark.parametrize("name", READING)
def test_models_that_read_their_masks_get_them_of_all_pairs(name):
    """They choose keys by what these contain, and put that into the mask."""
    model = build(name, **READING[name])
    inputs = {"input_ids": TOKENS, "attention_mask": LEFT_PADDED, "use_cache": False}
    assert_equals_eager(model, inputs, 2, valid=LEFT_PADDED.bool())


BOUND_FIRST = """
from transformers.models.gemma3 import modeling_gemma3 as before
from attnspan.integrations._transformers_masks import describe
print(describe(before.sliding_window_overlay(4)))
"""


@pytest.mark.long
def test_mask_functions_that_a_model_imported_before_are_known():
    assert run_program("-c", BOUND_FIRST).strip() == "window(4)"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Falcon", {"num_hidden_layers": 1}),
        *([] if RENAMED else [("GPTJ", {"n_layer": 1})]),
        ("GPTNeo", {"num_layers": 1, "attention_types": [[["global"], 1]]}),
    ],
)
def test_models_that_choose_their_attention_from_a_table_are_refused_by_name(name, sizes):
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = adapter.NAME
    with pytest.raises(OptionError, match=f"got {name}.*, which has its own attention"):
        getattr(transformers, f"{name}Model")(config)
