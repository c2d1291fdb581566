"""Tiny random models of transformers, and what they compute with each attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from closeness import relative_error
from packaging.version import Version
from torch import Tensor
from watching import Watching

#: transformers 5.24 gave caches another name, and GPT-J the common interface.
RENAMED = Version(transformers.__version__) >= Version("5.24")
CACHE = "cache" if RENAMED else "past_key_values"
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA4 = {"num_hidden_layers": 4, "attention_chunk_size": 5}
LLAMA4 |= {"num_local_experts": 2, "intermediate_size_mlp": 64}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.05},  # windows in every other layer
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "llama4_text": LLAMA4,  # chunks in three layers of four
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128},
}
if RENAMED:
    DECODERS["gptj"] = {**DECODERS["gpt2"], "rotary_dim": 8}
TOKENS = torch.arange(24).reshape(2, 12) % 60 + 3
LEFT_PADDED = torch.ones(2, 12, dtype=torch.long)
LEFT_PADDED[0, :4] = 0
RIGHT_PADDED = torch.ones(2, 12, dtype=torch.long)
RIGHT_PADDED[0, 9:] = 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 2]] * 2)

FORWARD, BACKWARD = "attnspan.attention.default", "attnspan.attention_backward.default"


def build(name: str, auto: str = "AutoModelForCausalLM", **sizes: Any) -> Any:
    """A model of a `model_type`, in evaluation mode; the weights are the same each time."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **DECODERS.get(name, {}), **sizes})
    return getattr(transformers, auto).from_config(config).eval()


def logits(out: Any) -> Tensor:
    return out.logits


def states(out: Any) -> Tensor:
    return out.last_hidden_state


def computed(
    model: Any,
    implementation: str,
    inputs: Mapping[str, Any],
    read: Callable[[Any], Tensor],
    valid: Any = ...,
) -> tuple[Tensor, Tensor, Counter[str]]:
    """The results of valid tokens, the gradients of all parameters, and the operators that ran."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with Watching() as operators:
        out = read(model(**inputs))[valid]
        out.pow(2).mean().backward()
    gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    return out.detach(), gradients, operators.counts


def assert_equals_eager(
    model: Any,
    inputs: Mapping[str, Any],
    calls: int,
    read: Callable[[Any], Tensor] = logits,
    valid: Any = ...,
    within: float = 3e-6,
) -> None:
    """Our operator runs `calls` times and gives the results and gradients of the eager implementation."""
    wanted = computed(model, "eager", inputs, read, valid)
    got = computed(model, "attnspan", inputs, read, valid)
    assert (got[2][FORWARD], got[2][BACKWARD]) == (calls, calls)
    assert relative_error(got[0], wanted[0]) < within
    assert relative_error(got[1], wanted[1]) < within
