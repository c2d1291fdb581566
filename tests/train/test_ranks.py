"""Several ranks compute what one computes; and what they say if they cannot."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from covering import few
from runs import figures, scores, train
from tiny import TINY
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from worlds import ranks, world

from train import train as training
from train.config import CheckpointError, ConfigError, DataError, JobError, RankError, TrainConfig
from train.parallelize import ALONE, open_ranks
from train.progress import Graphs

Tiny = Callable[..., TrainConfig]

ROWS = 4  # of each step, on however many ranks

# Sums of the same float32 numbers in other orders; AdamW divides a small gradient by its own size, so that
# weights differ by more than gradients.
LOSS = 20 * torch.finfo(torch.float32).eps
WEIGHTS = 2000 * torch.finfo(torch.float32).eps


def assert_same(found: Path, expected: Path, tolerance: float = LOSS) -> None:
    """The figures of two runs, within rounding."""
    for mine, whole in ((figures(found), figures(expected)), ([scores(found)], [scores(expected)])):
        assert len(mine) == len(whole) > 0
        for pair in zip(mine, whole, strict=True):
            assert pair[0] == pytest.approx(pair[1], rel=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[TrainConfig, Path]:
    """A run of one rank, to which all others are compared."""
    # An odd length: ranks that share a row hold padding too.
    shape = {"data": str(text_folder), "seq_len": 47, "batch_size": ROWS, "steps": 8, "checkpoint_every": 4}
    config, folder = TrainConfig(**(TINY | shape)), tmp_path_factory.mktemp("alone") / "run"
    train(config, folder)
    return config, folder


def weights(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a run's latest checkpoint."""
    with open_ranks(config) as alone:
        run = training._open(config, folder, alone, True, None)
        return get_model_state_dict(run.stepper.model, options=StateDictOptions(full_state_dict=True))


# The first one has every axis, sharded.
ON: list[dict[str, Any]] = [{"cp": 2, "dp": 2, "fsdp": True}, {"cp": 2}, {"dp": 2}, {"cp": 2, "dp": 2}]
ON += [{"cp": 2, "strategy": name} for name in ("ring", "ulysses", "exchange")]
ON += [{"cp": 2, "method": name} for name in ("zigzag", "contiguous")]
ON += [{"dp": 2, "fsdp": True}, {"cp": 2, "fsdp": True, "accumulate": 2}, {"dp": 2, "accumulate": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("on", few(ON, 2), ids=str)
def test_ranks_compute_what_one_computes(alone: Any, tmp_path: Path, on: dict[str, Any]) -> None:
    config, expected = alone
    moved, folder = config.moved(**on), tmp_path / "run"
    answers = world(moved.world).run(train, moved, folder)
    assert_same(folder, expected)
    whole = weights(config, expected)
    for name, weight in weights(config, folder).items():
        assert (weight - whole[name]).norm() <= WEIGHTS * whole[name].norm(), name
    # The first rank speaks for all, and all know the figures.
    assert "step 8/8" in answers[0][0]
    assert not any(text for text, _ in answers[1:])
    assert all(summary == answers[0][1] for _, summary in answers)


@pytest.mark.slow
def test_sharded_bfloat16_is_near_to_that_of_one_rank(alone: Any, tmp_path: Path) -> None:
    config = replace(alone[0], dtype="bfloat16")
    train(config, tmp_path / "one")
    world(2).run(train, config.moved(dp=2, fsdp=True), tmp_path / "sharded")
    # Products of rounded factors; the roundings of eight steps add up.
    assert_same(tmp_path / "sharded", tmp_path / "one", 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks_and_for_more_steps(alone: Any, tmp_path: Path) -> None:
    config, expected = alone
    folder = tmp_path / "run"
    first = config.moved(cp=2, fsdp=True)
    world(2).run(train, first, folder)
    world(2).run(train, first.moved(cp=1, dp=2, fsdp=False), folder, resume=True, from_step=4)
    assert_same(folder, expected)
    train(first.moved(cp=1, dp=1, fsdp=False), folder, resume=True, from_step=4)
    assert_same(folder, expected)
    assert TrainConfig.load(folder / "config.json").cp == 1, "as it runs now"
    train(config.moved(steps=10), folder, resume=True)
    assert len(figures(folder)) == 10
    assert len({loss for _, loss, _ in figures(folder)}) == 10


@pytest.mark.slow
def test_from_an_older_checkpoint_on_is_from_there_after_a_restart_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(steps=8, checkpoint_every=4)
    train(config, folder)
    expected = figures(folder)
    (folder / "checkpoints" / "step-00000008" / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="--resume --from-step 4"):
        train(config, folder, resume=True)
    assert figures(folder) == expected, "nothing is lost"
    monkeypatch.setattr(training, "_train", lambda *_: pytest.fail("no step is taken"))
    with pytest.raises(pytest.fail.Exception):
        train(config, folder, resume=True, from_step=4)
    monkeypatch.undo()
    (folder / "job").write_text("a job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, folder, resume=True, from_step=3)  # Which may be gone by then, as it is here.
    assert figures(folder) == expected


@pytest.mark.slow
def test_a_restart_goes_on_with_the_run_of_its_own_job_alone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(steps=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, folder)  # It had ended before its first checkpoint.
    assert "resumed at step 2" in train(config, folder)[0]
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.suffix in (".json", ".jsonl")}
    for job, attempts in (("another job", "012"), ("a job", "012")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        for attempt in attempts:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            with pytest.raises(ConfigError, match="Pass --resume, or another --name"):
                train(tiny(steps=4), folder)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@ranks(2)
def test_compiled_sharded_ranks_have_one_graph_and_never_compile_again(
    alone: Any, tmp_path: Path, backend: str
) -> None:
    config, expected = alone
    compiled = replace(config.moved(cp=2, fsdp=True), compile=True, ac="selective")
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        _, summary = train(compiled, tmp_path / "run")
    assert summary.warm == Graphs(compiled=1, breaks=0)
    assert summary.later == Graphs(compiled=0, breaks=0)
    dist.barrier()  # The first rank writes the figures.
    assert_same(tmp_path / "run", expected)


@pytest.fixture
def unread(tmp_path: Path) -> str:
    """Other documents than those of the run."""
    path = tmp_path / "other.txt"
    path.write_text("\n\n".join(f"document {number}" for number in range(99)))
    return str(path)


@pytest.mark.slow
@ranks(2)
def test_all_ranks_say_that_one_finds_no_or_other_documents(alone: Any, tmp_path: Path, unread: str) -> None:
    config, folder = alone[0].moved(dp=2), tmp_path / "run"
    for data, text in (
        ("/none", "/none"),
        (unread, "expected the same training documents on all ranks, sha256"),
    ):
        mine = replace(config, data=data) if dist.get_rank() == 1 else config
        with pytest.raises(DataError, match=text):
            train(mine, folder)
    assert not folder.exists()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that has a checkpoint."""
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    return tmp_path / "run"


@ranks(2)
def test_the_first_rank_says_for_all_that_a_run_is_not_new(alone: Any, begun: Path) -> None:
    with pytest.raises(JobError, match="options: expected a new run") as caught:
        train(alone[0].moved(dp=2), begun)
    assert caught.value.shared


@ranks(2)
def test_all_ranks_say_that_the_disk_of_one_is_full(alone: Any, tmp_path: Path) -> None:
    original = FileSystemWriter.write_data

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *args)

    disk = patch.object(FileSystemWriter, "write_data", full)
    with disk, pytest.raises(CheckpointError, match="Free space"):
        train(alone[0].moved(dp=2), tmp_path / "run")


def test_other_numbers_of_ranks_are_refused(tiny: Tiny) -> None:
    refused = pytest.raises(ConfigError, match=r"expected 6 ranks for --dp 2 and --cp 3, got 1\. .*torchrun")
    with refused, open_ranks(tiny(dp=2, cp=3)):
        pass
    with pytest.raises(ConfigError, match="a process group for --fsdp"), open_ranks(tiny(fsdp=True)):
        pass
    with pytest.raises(ConfigError, match=r"--dp times --accumulate to divide the 6 rows of a step, got 4"):
        tiny(dp=2, batch_size=3).moved(dp=4)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="a CUDA device, got none"), open_ranks(tiny(device="cuda")):
            pass


def test_one_process_does_what_it_is_told_alone() -> None:
    assert ALONE.sum([3.0]) == [3.0]
    assert ALONE.first(lambda: 5) == ALONE.together(lambda: 5) == 5
    with pytest.raises(RuntimeError, match="Connection closed"), ALONE.joined(lambda: "nothing"):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [ConfigError, DataError, CheckpointError, RankError])
def test_errors_travel_between_ranks(error: type[ConfigError]) -> None:
    sent = error.of("one", "two", "Mend it")
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error
    assert str(received) == str(sent) == f"{error.what}: expected one, got two. Mend it."
