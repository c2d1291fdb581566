"""Tiny models, uneven documents and the environment of ranks, for tests of trainers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 7, "num_local_experts": 2, "intermediate_size_mlp": 32},
    # Only attention drops weights: it drops by global indices, other layers by what a rank draws.
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "embd_pdrop": 0, "resid_pdrop": 0},
}


#: Gradients are not clipped, so that their size counts.
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 3,
    "learning_rate": 0.1,
    "optim": "sgd",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model with the same random weights in every process."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS[name], **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attnspan")


def documents(count: int, longest: int) -> list[dict[str, Any]]:
    """Random documents of very uneven lengths, each counting upwards from a random token."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        length, start = torch.randint(2, longest, (2,), generator=generator).tolist()
        found.append({"input_ids": [(start + i) % 45 + 3 for i in range(length)]})
    return found


@contextmanager
def as_started_by_torchrun() -> Iterator[None]:
    """What accelerate asks of the environment; and without warnings of other libraries."""
    variables = {"OMP_NUM_THREADS": "1"}  # Else accelerate chooses, and says so.
    if dist.is_initialized():
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        variables |= {"LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": ranks}
    with patch.dict(os.environ, variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
