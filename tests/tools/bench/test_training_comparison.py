"""Whole training steps compared: ranks compute what one does, and times are taken in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnspan.errors import OptionError
from attnspan.tools.bench.training_comparison import (
    Parity,
    RankTimes,
    RowStepper,
    attention_share,
    measure_ranks,
)
from attnspan.train.config import TrainConfig
from attnspan.train.data import PackedStream
from attnspan.train.documents import load_data, load_vocabulary

SHAPE: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}
HOW: dict[str, Any] = {"seq_len": 48, "batch_size": 2, "dtype": "float32", "compile": False, "threads": 1}

Tiny = Callable[..., TrainConfig]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    torch.set_num_threads(1)
    (tmp_path / "data.txt").write_text("\n\n".join("abcdefg" * n for n in range(1, 20)))
    return lambda **changes: TrainConfig(**(SHAPE | HOW | {"data": str(tmp_path / "data.txt")} | changes))


def stream(config: TrainConfig) -> PackedStream:
    corpus = load_data(config, load_vocabulary(None)).train
    return PackedStream(corpus, seq_len=config.seq_len, batch_size=config.batch_size, seed=0)


@pytest.mark.parametrize("kind", ["attnspan", "sdpa"])
def test_the_share_of_attention_is_a_part_of_the_steps(tiny: Tiny, kind: str) -> None:
    rows = stream(tiny())
    share = attention_share(RowStepper(tiny(attention=kind), 257), [next(rows), next(rows)])
    assert 0 < share.share < 1
    assert share.flops > 0 < share.seconds


def test_figures_are_ratios_of_medians_with_quartiles() -> None:
    assert Parity.of([(2.0, 4.0), (3.0, 5.0)], [(2.0, 5.0), (2.0, 5.0)]) == Parity(2, loss=0.5, grad_norm=0.2)
    times = RankTimes(Parity(2, 0.0, 0.0), [1.0, 2.0, 9.0], [3.0, 4.0, 9.0], sdpa=[4.0, 4.0, 90.0])
    assert (times.speedup, times.ratio, times.spread) == (2.0, 2.0, (2.0, 10.0))


@pytest.mark.parametrize(
    ("changes", "rounds", "message"),
    [({}, 5, "ranks: expected 2 or more, got 1"), ({"cp": 2}, 1, "rounds: expected 2 or more, got 1")],
)
def test_impossible_options_are_refused(tiny: Tiny, changes: Any, rounds: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        measure_ranks(tiny(**changes), rounds)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tiny: Tiny) -> None:
    times = measure_ranks(tiny(cp=2, accumulate=2), rounds=3)
    assert times.parity.steps == 3
    # Sums of the same float32 numbers in other orders.
    assert max(times.parity.loss, times.parity.grad_norm) <= 20 * torch.finfo(torch.float32).eps
    assert len(times.all_ranks) == len(times.one_rank) == len(times.sdpa) == 3
    assert min(times.all_ranks + times.one_rank + times.sdpa) > 0


@pytest.mark.long
def test_ranks_that_fail_say_why(tiny: Tiny) -> None:
    with pytest.raises(OptionError, match="ranks: expected ranks that train, got"):
        measure_ranks(tiny(cp=2, data="/nowhere"))
