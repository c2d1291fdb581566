"""Runs of TRL's SFTTrainer, by one process or by each rank of a world."""

from __future__ import annotations

from typing import Any

import torch
from accelerate_jobs import as_started_by_torchrun, documents, model_of
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from attnspan.integrations.accelerate import context_parallel

WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": True, "max_length": 41},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 64},
}


def tokenizer() -> Any:
    """Words that are numbers."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{str(i): i for i in range(3, 48)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def run(name: str, way: str, degree: int, folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Train a model by name on documents of uneven lengths; for each rank of a world, or alone."""
    options = {
        "max_steps": 12,
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
        "bf16": False,
        "gradient_checkpointing": False,
        **WAYS[way],
        **given,
    }
    with as_started_by_torchrun():
        trainer = SFTTrainer(
            model_of(name),
            SFTConfig(output_dir=folder, **options),
            train_dataset=Dataset.from_list(documents(70, 24)),
            eval_dataset=Dataset.from_list(documents(7, 30)),
            processing_class=tokenizer(),
        )
        trainer = context_parallel(trainer, degree) if degree > 1 else trainer
        trainer.train()
        metrics = trainer.evaluate()
        wanted = "loss", "num_tokens", "entropy", "mean_token_accuracy"
        return {
            "logs": [[x[key] for key in wanted] for x in trainer.state.log_history if "loss" in x],
            "weights": torch.cat([x.detach().flatten() for x in trainer.model.parameters()]),
            "evaluated": [metrics[f"eval_{key}"] for key in wanted],
        }
