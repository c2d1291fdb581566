"""A model and a data set small enough to train within a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.config import TrainConfig

# The worlds of processes that tests over several ranks share.
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

# The smallest job that still has everything: layers, grouped heads, packed documents.
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}
TINY |= {"seq_len": 48, "batch_size": 2, "steps": 12, "warmup": 2, "eval_bytes": 256, "dtype": "float32"}
TINY |= {"compile": False, "threads": 1, "workers": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainConfig]:
    """Make the options of a job with forty documents of very uneven length."""
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for index, length in enumerate(np.geomspace(1, 400, 40).astype(int)):
        (folder / f"{index:02}.md").write_bytes(bytes(rng.integers(97, 123, length).tolist()))
    return lambda **changes: TrainConfig(**(TINY | {"data": str(folder)} | changes))
