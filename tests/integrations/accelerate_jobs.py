"""Runs of transformers' Trainer, by one process or by each rank of a world, and what came of them."""

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
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from attnspan.integrations.accelerate import context_parallel
from attnspan.testing import probe

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


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One document per row, with tokens of no meaning in front of it or behind it."""
    shape = len(examples), max(len(x["input_ids"]) for x in examples)
    tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        place = slice(0, size) if size % 2 else slice(shape[1] - size, None)
        tokens[row, place], mask[row, place] = torch.tensor(example["input_ids"]), 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


COLLATORS = {"packed": DataCollatorWithFlattening(), "padded": padded}


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss that compares neighbours: targets are shifted in here."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def trainer_of(model: Any, data: str, degree: int, folder: str, **given: Any) -> Any:
    """A trainer of uneven documents; gradients are not clipped, so that their size counts."""
    options = {
        "max_steps": 20,
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
        **given,
    }
    stream = options.pop("stream", False)
    functions = {"compute_loss_func": own_loss} if options.pop("own_loss", False) else {}
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=folder, **options),
        data_collator=COLLATORS[data],
        train_dataset=Stream() if stream else documents(70, 24),
        eval_dataset=documents(7, 30),
        **functions,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return context_parallel(trainer, degree) if degree > 1 else trainer


def results(trainer: Any) -> dict[str, Any]:
    """What training, evaluation and prediction give."""
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    weights = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
    predicted = trainer.predict(trainer.eval_dataset)
    return {
        "losses": losses,
        "weights": weights,
        "eval_loss": predicted.metrics["test_loss"],
        "logits": predicted.predictions,
        "labels": predicted.label_ids,
        "operations": trainer.state.total_flos,
    }


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


def run(name: str, data: str, degree: int, folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Train a model by name; for each rank of a world, or alone."""
    with as_started_by_torchrun():
        found = results(trainer_of(model_of(name), data, degree, folder, **given))
    if dist.is_initialized() and dist.get_rank() > 0:  # The rest is large, and compared by rank 0's.
        found = {key: found[key] for key in ("losses", "weights", "eval_loss")}
    return found


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The documents one after the other, as from a file that is too large."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from documents(70, 24)


def shared(name: str, degree: int, folder: str, tokens: Any, positions: Any, ids: Any) -> Any:
    """Which packed documents see each other where ranks share them."""
    with as_started_by_torchrun():
        trainer = trainer_of(model_of(name), "packed", degree, folder)
        batch = {"input_ids": tokens, "position_ids": positions}
        call = lambda **inputs: trainer.prediction_step(trainer.model, inputs, False)[1]  # noqa: E731
        return probe(trainer.model, batch, ids, call=call)


def other_data(folder: str) -> None:
    """Each rank brings its own order of the documents."""
    with as_started_by_torchrun():
        trainer = trainer_of(model_of("llama"), "packed", 2, folder)
        trainer.train_dataset = trainer.train_dataset[dist.get_rank() :]
        trainer.train()


def resumed(degree: int, folder: str) -> Any:
    """Weights after six steps, and after three and three that go on from what was saved."""
    with as_started_by_torchrun():
        whole = trainer_of(
            model_of("llama"), "packed", degree, folder, save_strategy="steps", save_steps=3, max_steps=6
        )
        whole.train()
        again = trainer_of(model_of("llama", seed=1), "packed", degree, folder, max_steps=6)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        return [torch.nn.utils.parameters_to_vector(x.model.parameters()).detach() for x in (whole, again)]
