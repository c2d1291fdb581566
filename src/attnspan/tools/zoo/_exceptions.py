"""What the rules of the other modules get wrong, family by family."""

from typing import Any

__all__ = ["BENCHES", "CHANGES", "LEFT_OUT", "NOT_PACKED"]

#: Fields of configurations that must have other values than the rule gives.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 0, "mask_token_id": 3},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
#: Families that have the size "bench", with changes for that size.
BENCHES: dict[str, dict[str, Any]] = {
    name: {}
    for name in ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo2", "phi3", "gpt2", "granite", "smollm3", "stablelm", "starcoder2", "bert", "roberta", "modernbert"]
}


def _families(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


#: Decoders that do not read documents from position ids, and why.
NOT_PACKED: dict[str, str] = _families(
    {
        "makes its masks without position ids, so that packed documents see each other": """afmoe biogpt
    bert-generation gpt_oss opt""",
        "its recurrent or convolutional layers go on across documents": """bailing_hybrid falcon_h1 inkling_text
    inkling2_text kimi_linear lfm3 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_text
    qwen3_5_moe_text qwen3_next zaya""",
        "its compressed keys are shared by documents": "deepseek_v4",
    }
)
#: Families that are missing, and why.
LEFT_OUT: dict[str, str] = _families(
    {
        "its attention is code of its own, not transformers' AttentionInterface": """fsmt led mvp prophetnet
    big_bird convbert deberta deberta-v2 flaubert fnet funnel ibert longformer luke megatron-bert mpnet mra
    nystromformer rembert roformer squeezebert tapas xlm yoso bamba bloom codegen cpmant gpt_neox_japanese
    granitemoehybrid jamba openai-gpt recurrent_gemma rwkv trocr xglm xlnet xlstm falcon gpt_neo gptj mpt
    mobilebert perceiver reformer ctrl dbrx""",
        "has no attention": "mamba mamba2 falcon_mamba",
        "needs the package timm": "gemma3n",
        "its configuration is not found by a rule yet": """dots3_note gemma4_assistant
    gemma4_unified_assistant lfm2_moe qwen4_exp qwen4_exp_text zamba zamba2 git blt cohere_compass_text
    audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize musicflamingo nemo_speechlm
    qwen2_audio qwen3_asr vibevoice_asr voxtral voxtral_realtime musicgen musicgen_melody""",
    }
)
