"""A training job that takes a moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train.config import TrainConfig

SHAPE: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}
HOW: dict[str, Any] = {"seq_len": 48, "batch_size": 2, "dtype": "float32", "compile": False, "threads": 1}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., TrainConfig]:
    torch.set_num_threads(1)
    (tmp_path / "data.txt").write_text("\n\n".join("abcdefg" * n for n in range(1, 20)))
    return lambda **changes: TrainConfig(**(SHAPE | HOW | {"data": str(tmp_path / "data.txt")} | changes))
