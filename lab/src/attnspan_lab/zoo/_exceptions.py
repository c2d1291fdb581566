"""Exceptions to the rules of the other modules, family by family."""

from typing import Any

__all__ = ["BENCHES", "CHANGES", "IMAGE_FORMS", "LEFT_OUT", "NOT_PACKED", "NOT_PADDED", "TOWERS"]

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
#: Fields of configurations that must have other values than the rule gives.
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
    "segformer": {"sr_ratios": [2, 2, 1, 1]},  # else there is one key
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
# Four query heads share a key head, as in Llama 3 8B, Qwen3 8B and Granite 3 8B; the defaults are older.
_GROUPED = {"num_key_value_heads": 2}
#: Families that have the size "bench", with changes for that size.
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


def _families(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


#: Decoders that do not read documents from position ids, and why.
NOT_PACKED: dict[str, str] = _families(
    {
        "makes its masks without position ids, so that packed documents see each other": """
        afmoe biogpt bert-generation gpt_oss opt
        """,
        "its recurrent or convolutional layers go on across documents": """
        bailing_hybrid falcon_h1 inkling_text inkling2_text kimi_linear lfm3 minimax nemotron_h
        olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text qwen3_next zaya
        """,
        "its compressed keys are shared by documents": "deepseek_v4",
    }
)
#: Families whose rows cannot be padded, and why.
NOT_PADDED: dict[str, str] = _families(
    {
        "reads a field that its configuration does not have": "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
    }
)
#: How a family takes its images, a form of `image_inputs`.
IMAGE_FORMS: dict[str, str] = _families(
    {
        "pixels": """
        aria aya_vision blip-2 cohere2_vision deepseek_vl gemma3 got_ocr2 internvl llama4 llava
        ovis2 paligemma qianfan_ocr video_llava vipllava
        """,
        "pixels in tiles": "idefics2 idefics3 smolvlm",
        "pixels and sizes": "lighton_ocr mistral3 mistral_large4",
        "tiles and sizes": "llava_next llava_next_video llava_onevision",
        "patches and grid": """
        cosmos3_edge cosmos3_omni exaone4_5 glm46v glm4v glm4v_moe glm_ocr hyperclovax_vision_v2
        lfm3_vl minimax_m3_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe
        qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
        """,
    }
)
#: Encoders without a head of their own.
TOWERS = {
    "vision": """
        aimv2_vision_model chinese_clip_vision_model clip_vision_model dinov3_vit dpt
        internvl_vision mlcd pixio pixtral qianfan_ocr_vision sapiens2 siglip_vision_model
        tipsv2_vision_model yolos
        """,
    "audio": """
        glmasr_encoder moss_transcribe_diarize_audio qwen2_audio_encoder voxtral_encoder
        voxtral_realtime_encoder
        """,
}
#: Families that are missing, and why.
LEFT_OUT: dict[str, str] = _families(
    {
        "its attention is code of its own, not transformers' AttentionInterface": """
        bamba big_bird bit bloom codegen convbert convnext convnextv2 cpmant ctrl cvt
        data2vec-vision dbrx deberta deberta-v2 donut-swin efficientnet falcon flaubert fnet
        focalnet fsmt funnel gpt_neo gpt_neox_japanese gptj granitemoehybrid hgnet_v2 hiera ibert
        imagegpt jamba led levit longformer luke megatron-bert mobilebert mobilenet_v1 mobilenet_v2
        mobilevit mobilevitv2 mpnet mpt mra mvp nystromformer openai-gpt perceiver poolformer
        pp_lcnet prophetnet pvt pvt_v2 recurrent_gemma reformer regnet rembert resnet roformer rwkv
        sew-d speecht5 squeezebert swiftformer swin swinv2 tapas textnet timesformer trocr wavlm
        xglm xlm xlnet xlstm yoso
        """,
        "has no attention": "mamba mamba2 falcon_mamba",
        "needs the package timm or natten": "gemma3n timm_wrapper dinat fast_vlm perception_lm",
        "its class is that of another family": "glmga pp_chart2table shieldgemma2 mistral4",
        "its configuration or its inputs follow no rule of this zoo": """
        audio-spectrogram-transformer audioflamingo3 blt canary cohere_asr cohere_compass_text dia
        dots3_note fun_asr_nano gemma4_assistant gemma4_unified_assistant git glmasr granite_speech
        granite_speech5_ctc granite_speech_plus kyutai_speech_to_text lasr_ctc lfm2_moe
        moonshine_streaming moss_transcribe_diarize musicflamingo musicgen musicgen_melody
        nemo_speechlm parakeet_ctc pop2piano qwen2_audio qwen3_asr qwen4_exp qwen4_exp_text siglip2
        speech-encoder-decoder speech_to_text vibevoice vibevoice_asr videoprism_vision_model vjepa2
        voxtral voxtral_realtime wav2vec2-bert zamba zamba2
        """,
    }
)
