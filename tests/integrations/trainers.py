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
from transformers_models import build

#: Only attention drops weights: it drops by global indices, other layers by what a rank draws.
CHANGES = {"gpt2": {"embd_pdrop": 0, "resid_pdrop": 0}, "llama4_text": {"num_hidden_layers": 2}}
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


def model_of(name: str, seed: int = 0) -> Any:
    """A tiny model with the same random weights in every process."""
    model = build(name, **CHANGES.get(name, {}))
    torch.manual_seed(seed)
    model = type(model)(model.config) if seed else model.train()
    model.set_attn_implementation("attnspan")
    return model


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
