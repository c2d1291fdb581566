"""A model and a data set small enough to train within a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TINY

from train.config import TrainConfig

# The worlds of processes that tests over several ranks share.
sys.path.append(str(Path(__file__).parents[1] / "parallel"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of very uneven length."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    for index, length in enumerate(np.geomspace(1, 400, 40).astype(int)):
        (folder / f"{index:02}.md").write_bytes(bytes(rng.integers(97, 123, length).tolist()))
    return folder


@pytest.fixture
def tiny(text_folder: Path) -> Callable[..., TrainConfig]:
    def build(**changes: Any) -> TrainConfig:
        return TrainConfig(**(TINY | {"data": str(text_folder)} | changes))

    return build
