"""Several ranks compute the results of one, and report errors; a restart continues with the same losses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from covering import few
from runs import dies, figures, scores, train
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from worlds import World, ranks, world

from train import parallelize
from train import train as training
from train.config import CheckpointError, ConfigError, DataError, JobError, TrainConfig
from train.parallelize import ALONE, open_ranks
from train.run import open_run
from train.stop import Stopped

pytestmark = pytest.mark.slow
Tiny = Callable[..., TrainConfig]

ROWS = 4  # of each step, on however many ranks

# Sums of the same float32 numbers in other orders. AdamW divides a small gradient by its own size, so weights
# differ by more than gradients.
LOSS = 20 * torch.finfo(torch.float32).eps
WEIGHTS = 2000 * torch.finfo(torch.float32).eps
# A compiler orders more sums in another way.
COMPILED = 1000 * torch.finfo(torch.float32).eps


def assert_same(found, expected, tolerance=LOSS):
    """The figures of two runs are the same within rounding, or bit by bit."""
    for mine, whole in ((figures(found), figures(expected)), ([scores(found)], [scores(expected)])):
        assert len(mine) == len(whole) > 0
        for pair in zip(mine, whole, strict=True):
            assert pair[0] == pytest.approx(pair[1], rel=tolerance, abs=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny):
    """A run of one rank, to which all others are compared."""
    # With an odd length, ranks that share a row have padding too.
    config = tiny(seq_len=47, batch_size=ROWS, steps=8, checkpoint_every=4)
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(config, folder)
    return config, folder


def weights(config, folder):
    """All weights of a run's latest checkpoint."""
    with open_ranks(config) as one:
        model = open_run(config, folder, one, True, None).stepper.model
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# The first one has every axis, sharded.
ON: list[dict[str, Any]] = [{"cp": 2, "dp": 2, "fsdp": True}, {"cp": 2}, {"dp": 2}, {"cp": 2, "dp": 2}]
ON += [{"cp": 2, "strategy": name} for name in ("ring", "ulysses", "exchange")]
ON += [{"cp": 2, "method": name} for name in ("zigzag", "contiguous")]
ON += [{"dp": 2, "fsdp": True}, {"cp": 2, "fsdp": True, "accumulate": 2}, {"dp": 2, "accumulate": 2}]


@pytest.mark.parametrize("on", few(ON, 2), ids=str)
def test_ranks_compute_the_results_of_one(alone, tmp_path, on):
    config, expected = alone
    moved, folder = config.moved(**on), tmp_path / "run"
    answers = world(moved.world).run(train, moved, folder)
    assert_same(folder, expected)
    whole = weights(config, expected)
    for name, weight in weights(config, folder).items():
        assert (weight - whole[name]).norm() <= WEIGHTS * whole[name].norm(), name
    assert "step 8/8" in answers[0][0], "the first rank prints for all"
    assert not any(text for text, _ in answers[1:])
    assert all(summary == answers[0][1] for _, summary in answers)


def test_sharded_bfloat16_is_near_to_one_rank(alone, tmp_path):
    config = replace(alone[0], dtype="bfloat16")
    train(config, tmp_path / "one")
    world(2).run(train, config.moved(dp=2, fsdp=True), tmp_path / "sharded")
    # Products of rounded factors; the roundings of eight steps add up.
    assert_same(tmp_path / "sharded", tmp_path / "one", 2 * torch.finfo(torch.bfloat16).eps)


def test_a_run_continues_on_other_ranks_and_for_more_steps(alone, tmp_path):
    config, expected = alone
    folder, first = tmp_path / "run", config.moved(cp=2, fsdp=True)
    world(2).run(train, first, folder)
    world(2).run(train, first.moved(cp=1, dp=2, fsdp=False), folder, resume=True, from_step=4)
    assert_same(folder, expected)
    train(first.moved(cp=1, dp=1, fsdp=False), folder, resume=True, from_step=4)
    assert_same(folder, expected)
    assert TrainConfig.load(folder / "config.json").cp == 1, "as it runs now"
    train(config.moved(steps=10), folder, resume=True)
    assert len({loss for _, loss, _ in figures(folder)}) == len(figures(folder)) == 10


def compiled(config, folder, backend):
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return train(config, folder)[1]


# Both are torch's own, raised while it imports its compiler and while it traces.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "on",
    [{}, {"cp": 2, "fsdp": True}, pytest.param({"attention": "sdpa-documents"}, marks=pytest.mark.long)],
    ids=str,
)
def test_a_compiled_run_has_one_graph_and_never_recompiles(alone, tmp_path, on, backend):
    config = replace(alone[0].moved(**on), compile=True, ac="selective")
    if config.world == 1:
        summary = compiled(config, tmp_path / "run", backend)
    else:
        summary = world(2).run(compiled, config, tmp_path / "run", backend)[0]
    breaks = config.attention == "sdpa-documents"
    assert (bool(summary.breaks), summary.recompiles) == (breaks, 0)
    assert breaks or summary.graphs == 1
    assert_same(tmp_path / "run", alone[1], COMPILED)


def test_from_an_older_checkpoint_a_run_continues_there_after_a_restart_too(tiny, tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny(steps=8, checkpoint_every=4)
    train(config, folder)
    expected = figures(folder)
    [shard] = (folder / "checkpoints/step-00000008").glob("*.safetensors")
    shard.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="--resume --from-step 4"):
        train(config, folder, resume=True)
    assert figures(folder) == expected, "nothing is lost"
    with monkeypatch.context() as patched:
        patched.setattr(training, "_train", lambda *_: pytest.fail("no step is taken"))
        with pytest.raises(pytest.fail.Exception):
            train(config, folder, resume=True, from_step=4)
    (folder / "job").write_text("a job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, folder, resume=True, from_step=3)  # It may be gone by then, as it is here.
    assert figures(folder) == expected


def test_a_restart_continues_only_the_run_of_its_own_job(tiny, tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny(steps=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, folder)  # The job had ended before its first checkpoint.
    assert "resumed at step 2" in train(config, folder)[0]
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.suffix in (".json", ".jsonl")}
    for job, attempt in product(("another job", "a job"), "012"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(ConfigError, match="Pass --resume, or another --name"):
            train(tiny(steps=4), folder)
    assert {path: path.read_bytes() for path in before} == before


@ranks(2)
def test_all_ranks_raise_the_error_of_one(alone, tmp_path):
    config, folder, second = alone[0].moved(dp=2), tmp_path / "run", dist.get_rank() == 1
    other_data = str(tmp_path / "other.txt")
    if second:
        Path(other_data).write_text("\n\n".join(f"document {number}" for number in range(99)))
    for data, text in (("/none", "/none"), (other_data, "the same training documents on all ranks, sha256")):
        with pytest.raises(DataError, match=text) as caught:
            train(replace(config, data=data) if second else config, folder)
        assert caught.value.shared
    assert not folder.exists()
    begun = tmp_path / "begun"
    (begun / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
    with pytest.raises(JobError, match="options: expected a new run") as caught:
        train(config, begun)
    assert caught.value.shared
    original = FileSystemWriter._write_data

    def full(self, *args):
        if second:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *args)

    disk = patch.object(FileSystemWriter, "_write_data", full)
    with disk, pytest.raises(CheckpointError, match="Free space"):
        train(config, folder)


def test_other_numbers_of_ranks_are_refused(tiny):
    cases = [(tiny(dp=2, cp=3), r"expected 6 ranks for --dp 2 and --cp 3, got 1\. .*torchrun")]
    cases += [(tiny(fsdp=True), "a process group for --fsdp")]
    if not torch.cuda.is_available():
        cases += [(tiny(device="cuda"), "a CUDA device, got none")]
    for config, text in cases:
        with pytest.raises(ConfigError, match=text), open_ranks(config):
            pass
    with pytest.raises(ConfigError, match=r"--dp times --accumulate to divide the 6 rows of a step, got 4"):
        tiny(dp=2, batch_size=3).moved(dp=4)
    # One process needs no agreement.
    assert ALONE.sum([3.0]) == [3.0]
    assert ALONE.first(lambda: 5) == ALONE.together(lambda: 5) == 5
    with pytest.raises(RuntimeError, match="Connection closed"), ALONE.joined(lambda: "nothing"):
        raise RuntimeError("Connection closed by peer")


def stopping(config, folder):
    """The exit status of a rank of a run whose last rank gets a signal."""
    with pytest.raises(Stopped) as end:
        train(config, folder, observe=dies(3, signal.SIGTERM) if dist.get_rank() == 1 else None)
    return end.value.code


def test_all_ranks_stop_after_the_step_in_which_one_gets_a_signal(tiny, tmp_path):
    config, folder = tiny(cp=2, steps=5, checkpoint_every=0), tmp_path / "run"
    assert world(2).run(stopping, config, folder) == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    world(2).run(train, config, folder, resume=True)
    world(2).run(train, config, tmp_path / "calm")
    assert_same(folder, tmp_path / "calm", 0)


# tests/parallel/test_faults.py has a rank that hangs.
@pytest.mark.parametrize(
    ("kind", "fsdp"), [(signal.SIGKILL, False), pytest.param(signal.SIGSTOP, True, marks=pytest.mark.long)]
)
def test_the_others_report_the_step_that_failed_within_the_timeout(tiny, tmp_path, kind, fsdp):
    text = "ranks: expected all 2 ranks to take part in step 3, got no answer from rank 1, after"
    timeout = 10.0
    config, folder = tiny(dp=2, fsdp=fsdp, batch_size=1, timeout=timeout), tmp_path / "run"

    def dying():
        quick = patch.object(parallelize, "_ROLL_CALL_SECONDS", 2.0)
        with quick, pytest.raises(JobError, match=rf"{text}(.|\n)*--resume"):
            train(config, folder, observe=dies(3, kind) if dist.get_rank() == 1 else None)

    began = time.monotonic()
    World(2, group_seconds=timeout).call(dying, **{"may_die" if kind == signal.SIGKILL else "may_hang": (1,)})
    assert figures(folder)[-1][0] == 2
    assert time.monotonic() - began < timeout + 60, "the margin is for a loaded machine"


@pytest.mark.long
def test_after_restarts_by_torchrun_losses_equal_an_undisturbed_run(tiny, tmp_path):
    config, folder = tiny(cp=2, steps=6, checkpoint_every=2, timeout=60.0), tmp_path / "run"
    world(2).run(train, config, tmp_path / "calm")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2", str(Path(__file__).parent / "runs.py")]
    command += [json.dumps(asdict(config)), str(folder), json.dumps({"0": [6, int(signal.SIGKILL)]})]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    try:
        out, err = child.communicate(timeout=120.0)  # Only a rank that waits forever takes that long.
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, err
    assert out.count("parameters") == 2, "the ranks started, and started again"
    assert out.count("resumed at step 4") == 1, "two checkpoints were there"
    assert_same(folder, tmp_path / "calm", 0)
    assert len(figures(folder)) == 6
