"""Several ranks compute what one computes; and what they say if they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import few
from tiny import TINY
from train_jobs import train, weights
from worlds import JobError, world

from attnspan.train.config import TrainConfig
from attnspan.train.errors import CheckpointError, ConfigError, DataError, RankError
from attnspan.train.measure import Comparison, Graphs
from attnspan.train.parity import Parity
from attnspan.train.ranks import ALONE, open_ranks

Tiny = Callable[..., TrainConfig]

ROWS = 4  # of each step, on however many ranks

# Sums of the same float32 numbers in other orders; AdamW divides a small gradient by its own size, so that
# weights differ by more than gradients.
LOSS = 20 * torch.finfo(torch.float32).eps
WEIGHTS = 2000 * torch.finfo(torch.float32).eps


def figures(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


def scores(folder: Path) -> tuple[float, float]:
    summary = json.loads((folder / "summary.json").read_text())
    return summary["bits_per_byte_start"], summary["bits_per_byte_end"]


def assert_same(found: Path, expected: Path) -> None:
    """The figures of two runs, within rounding."""
    for mine, whole in ((figures(found), figures(expected)), ([scores(found)], [scores(expected)])):
        assert len(mine) == len(whole) > 0
        for pair in zip(mine, whole, strict=True):
            assert pair[0] == pytest.approx(pair[1], rel=LOSS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[TrainConfig, Path]:
    """A run of one rank, to which all others are compared."""
    # An odd length: ranks that share a row hold padding too.
    settings = {
        "data": str(text_folder),
        "seq_len": 47,
        "batch_size": ROWS,
        "steps": 8,
        "checkpoint_every": 4,
    }
    config, folder = TrainConfig(**(TINY | settings)), tmp_path_factory.mktemp("alone") / "run"
    train(config, folder)
    return config, folder


# The first one has every axis, sharded.
ON = [{"cp": 2, "dp": 2, "fsdp": True}]
ON += [{"cp": 2}, {"dp": 2}, {"dp": 2, "fsdp": True}, {"cp": 2, "fsdp": True}, {"cp": 2, "dp": 2}]


@pytest.mark.parametrize("on", few(ON, 1), ids=str)
def test_ranks_compute_what_one_computes(alone: Any, tmp_path: Path, on: dict[str, Any]) -> None:
    config, expected = alone
    ranks, folder = config.on_ranks(**on), tmp_path / "run"
    answers = world(ranks.world).run("train_jobs:train", ranks, folder)
    assert_same(folder, expected)
    whole = weights(config, expected)
    for name, weight in weights(replace(config), folder).items():
        assert (weight - whole[name]).norm() <= WEIGHTS * whole[name].norm(), name
    # The first rank speaks for all, and all know the figures.
    assert "step 8/8" in answers[0][0]
    assert not any(text for text, _ in answers[1:])
    assert all(summary == answers[0][1] for _, summary in answers)


def test_a_run_goes_on_on_other_ranks(alone: Any, tmp_path: Path) -> None:
    config, expected = alone
    folder = tmp_path / "run"
    first = config.on_ranks(cp=2, fsdp=True)
    world(2).run("train_jobs:train", first, folder)
    (folder / "checkpoints" / "LATEST").write_text("step-00000004\n")
    world(2).run("train_jobs:resume", first.on_ranks(cp=1, dp=2, fsdp=False), folder)
    assert_same(folder, expected)
    (folder / "checkpoints" / "LATEST").write_text("step-00000004\n")
    train(first.on_ranks(cp=1, dp=1, fsdp=False), folder, resume=True)
    assert_same(folder, expected)
    assert TrainConfig.load(folder / "config.json").cp == 1, "as it runs now"


def test_from_an_older_checkpoint_on_is_from_there_after_a_restart_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(steps=8, checkpoint_every=4)
    train(config, folder)
    expected = figures(folder)
    (folder / "checkpoints" / "step-00000008" / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="--resume --from-step 4"):
        train(config, folder, resume=True)
    monkeypatch.setattr("attnspan.train.run._train", lambda *_: pytest.fail("no step is taken"))
    with pytest.raises(pytest.fail.Exception):
        train(config, folder, resume=True, from_step=4)
    monkeypatch.undo()
    (folder / "job").write_text("a job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, folder, resume=True, from_step=3)  # Which may be gone by then, as it is here.
    assert figures(folder) == expected


def test_a_restart_before_the_first_checkpoint_starts_anew(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(tiny(steps=2), tmp_path / "run", resume=False)
    assert len(figures(tmp_path / "run")) == 2


@pytest.mark.parametrize("job", ["another job", "the same job"])
def test_a_restart_does_not_make_another_run_its_own(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    folder, config = tmp_path / "run", tiny(steps=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "the same job")
    train(config, folder)
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.suffix in (".json", ".jsonl")}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(ConfigError, match="Pass --resume, or another --name"):
            train(tiny(steps=4), folder)
    assert {path: path.read_bytes() for path in before} == before


def test_a_restart_goes_on_with_the_run_that_its_job_began(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(steps=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    train(config, folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "resumed at step 2" in train(config, folder)[0]


def test_the_summary_of_a_run_outlives_its_comparison(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("it failed")

    monkeypatch.setattr("attnspan.train.run.compare", lost)
    with pytest.raises(RuntimeError, match="it failed"):
        train(tiny(steps=2), tmp_path / "run", against_sdpa=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_the_table_says_which_ranks_and_how_near_they_are_to_one(alone: Any, tmp_path: Path) -> None:
    config, _ = alone
    ranks, folder = config.on_ranks(cp=2), tmp_path / "run"
    options = {"against_sdpa": True, "against_one_rank": True}
    [(text, summary), _] = world(2).run("train_jobs:train_with", ranks, folder, options)
    assert summary.parity.steps == 5
    assert 0 <= summary.parity.loss <= LOSS
    assert 0 <= summary.parity.grad_norm <= LOSS
    assert (
        len(summary.comparison.attnspan)
        == len(summary.comparison.one_rank)
        == len(summary.comparison.sdpa)
        == 5
    )
    rows = dict(summary.rows())
    assert rows["ranks"] == "2: cp 2, dp 1; threads of each: 1"
    for name, value in rows.items():
        assert name in text, value
    stored = json.loads((folder / "summary.json").read_text())
    assert stored["parity"]["loss"] == summary.parity.loss
    assert stored["comparison"]["speedup"] == summary.comparison.speedup


def test_parity_is_the_largest_difference() -> None:
    rows = [{"step": n, "loss": loss, "grad_norm": norm} for n, loss, norm in ((1, 2.0, 4.0), (2, 3.0, 5.0))]
    assert Parity.of(rows, [(2.0, 5.0), (2.0, 5.0)]) == Parity(2, loss=0.5, grad_norm=0.2)
    assert Comparison([1.0, 1.0], [2.0, 2.0], [3.0, 3.0]).speedup == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_sharded_ranks_have_one_graph_and_never_compile_again(
    alone: Any, tmp_path: Path, backend: str
) -> None:
    config, expected = alone
    ranks = replace(config.on_ranks(cp=2, fsdp=True), compile=True, ac="selective")
    for _, summary in world(2).run("train_jobs:compiled", ranks, tmp_path / "run", backend):
        assert summary.warm == Graphs(compiled=1, breaks=0)
        assert summary.later == Graphs(compiled=0, breaks=0)
    assert_same(tmp_path / "run", expected)


def test_what_one_rank_cannot_read_all_of_them_say(alone: Any, tmp_path: Path, text_folder: Path) -> None:
    config, _ = alone
    ranks = config.on_ranks(dp=2)
    with pytest.raises(
        JobError, match=r"rank 0 (.|\n)*DataError: .*/none(.|\n)*rank 1 (.|\n)*DataError: .*/none"
    ):
        world(2).run("train_jobs:data_of_its_own", ranks, tmp_path / "run", [str(text_folder), "/none"])
    (tmp_path / "other.txt").write_text("\n\n".join(f"document {number}" for number in range(99)))
    others = [str(text_folder), str(tmp_path / "other.txt")]
    with pytest.raises(JobError, match=r"expected the same training documents on all ranks, sha256"):
        world(2).run("train_jobs:data_of_its_own", ranks, tmp_path / "run", others)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_said_by_all_ranks(alone: Any, tmp_path: Path) -> None:
    config, _ = alone
    with pytest.raises(JobError, match=r"rank 0 (.|\n)*Free space(.|\n)*rank 1 (.|\n)*Free space"):
        world(2).run("train_jobs:without_room", config.on_ranks(dp=2), tmp_path / "run")


def test_other_numbers_of_ranks_are_refused(tiny: Tiny) -> None:
    refused = pytest.raises(ConfigError, match=r"expected 6 ranks for --dp 2 and --cp 3, got 1\. .*torchrun")
    with refused, open_ranks(tiny(dp=2, cp=3)):
        pass
    with pytest.raises(ConfigError, match="a process group for --fsdp"), open_ranks(tiny(fsdp=True)):
        pass
    with pytest.raises(ConfigError, match=r"--dp to divide the 6 rows of a step, got 4"):
        tiny(dp=2, batch_size=3).on_ranks(dp=4)


def test_one_process_does_what_it_is_told_alone() -> None:
    assert ALONE.sum([3.0]) == [3.0]
    assert ALONE.first(lambda: 5) == ALONE.together(lambda: 5) == 5
    ALONE.wait()
    with pytest.raises(RuntimeError, match="Connection closed"), ALONE.joined(lambda: "nothing"):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [ConfigError, DataError, CheckpointError, RankError])
def test_errors_travel_between_ranks(error: type[ConfigError]) -> None:
    import pickle

    sent = error(expected="one", got="two", remedy="mend it")
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error
    assert str(received) == str(sent)
