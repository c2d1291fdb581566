"""TRL's SFTTrainer on ranks that share batches computes what one process computes, its metrics included."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for room in ("integrations", "parallel", ""):  # Tiny models and documents, worlds of processes, closeness.
    sys.path.append(str(Path(__file__).parents[1] / room))

from closeness import relative_error  # noqa: E402
from trl_jobs import WAYS, run  # noqa: E402
from worlds import preload, world  # noqa: E402

preload("trl.trainer.sft_trainer")

CLOSE = 20 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("way", "given"), [*((way, {}) for way in WAYS), ("packing", {"loss_type": "dft"})])
def test_fine_tuning_on_two_ranks_is_that_of_one(way: str, given: dict[str, str], tmp_path: Path) -> None:
    expected = run("gemma3_text", way, 1, str(tmp_path), given)
    for found in world(2).run("trl_jobs:run", "gemma3_text", way, 2, str(tmp_path), given):
        assert len(found["logs"]) == len(expected["logs"]) == 12
        for mine, whole in zip(found["logs"], expected["logs"], strict=True):
            assert mine == pytest.approx(whole, rel=CLOSE)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=CLOSE)
        assert relative_error(found["weights"], expected["weights"]) < CLOSE
