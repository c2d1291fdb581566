"""TRL's SFTTrainer on ranks that share batches computes what one process computes, its metrics included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for room in ("integrations", "parallel", ""):  # Tiny models and documents, worlds of processes, closeness.
    sys.path.append(str(Path(__file__).parents[1] / room))

from closeness import relative_error  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from trainers import OPTIONS, as_started_by_torchrun, documents, model_of  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402
from worlds import preload, world  # noqa: E402

from attnspan.integrations.accelerate import context_parallel  # noqa: E402

preload("trl.trainer.sft_trainer")

CLOSE = 20 * torch.finfo(torch.float32).eps
WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": True, "max_length": 41},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 64},
}


def tokenizer():
    """Words that are numbers."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{str(i): i for i in range(3, 48)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def run(name, way, degree, folder, given):
    """Train a model by name on documents of uneven lengths; for each rank of a world, or alone."""
    own = {"max_steps": 12, "bf16": False, "gradient_checkpointing": False}
    options = {**OPTIONS, **own, **WAYS[way], **given}
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


@pytest.mark.parametrize(("way", "given"), [*((way, {}) for way in WAYS), ("packing", {"loss_type": "dft"})])
def test_fine_tuning_on_two_ranks_is_that_of_one(way, given, tmp_path):
    expected = run("gemma3_text", way, 1, str(tmp_path), given)
    for found in world(2).run(run, "gemma3_text", way, 2, str(tmp_path), given):
        assert len(found["logs"]) == len(expected["logs"]) == 12
        for mine, whole in zip(found["logs"], expected["logs"], strict=True):
            assert mine == pytest.approx(whole, rel=CLOSE)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=CLOSE)
        assert relative_error(found["weights"], expected["weights"]) < CLOSE
