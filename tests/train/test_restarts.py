"""A rank that dies or hangs: the others say so in time, and a restart goes on with the same losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from runs import Dying, figures, scores, train
from worlds import World, world

from train import parallelize
from train.config import JobError, TrainConfig
from train.stop import Stopped

Tiny = Callable[..., TrainConfig]

SCRIPT = Path(__file__).parent / "dying_rank.py"
LIMIT = 120.0  # seconds; a loaded machine is no failure, a rank that waits forever is


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of a session of its own, which is ended with all that it started."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    child = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def torchrun(config: TrainConfig, folder: Path, how: dict[int, dict[str, int]]) -> str:
    """Train under torchrun with restarts; what was printed."""
    torch = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    counts = ["--nproc-per-node", str(config.world), "--max-restarts", "2"]
    script = [str(SCRIPT), json.dumps(asdict(config)), str(folder), json.dumps(how)]
    with process([*torch, *counts, *script]) as child:
        out, error = child.communicate(timeout=LIMIT)
        assert child.returncode == 0, error
    return out


@pytest.mark.long
@pytest.mark.slow
def test_after_restarts_by_torchrun_losses_are_those_of_an_undisturbed_run(
    tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(cp=2, steps=6, checkpoint_every=2, timeout=60.0)
    world(2).run(train, config, tmp_path / "calm")
    kill = int(signal.SIGKILL)
    out = torchrun(config, tmp_path / "run", {0: {"step": 6, "signal": kill}})
    assert out.count("parameters") == 2, "started, and started again"
    assert out.count("resumed at step 4") == 1, "two checkpoints were there"
    assert figures(tmp_path / "run") == figures(tmp_path / "calm"), "bit by bit"
    assert len(figures(tmp_path / "calm")) == 6
    assert scores(tmp_path / "calm") == scores(tmp_path / "run")


def stopping(config: TrainConfig, folder: Path) -> Any:
    """The exit status of a rank, the last of which alone is told to stop."""
    told = lambda _: contextlib.nullcontext(Dying(3, signal.SIGTERM))  # noqa: E731
    with pytest.raises(Stopped) as end:
        train(config, folder, observe=told if dist.get_rank() == 1 else None)
    return end.value.code


@pytest.mark.slow
def test_all_ranks_stop_at_the_step_in_which_one_is_told_to(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(cp=2, steps=5, checkpoint_every=0)
    assert world(2).run(stopping, config, tmp_path / "run") == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]
    world(2).run(train, config, tmp_path / "run", resume=True)
    world(2).run(train, config, tmp_path / "calm")
    assert figures(tmp_path / "run") == figures(tmp_path / "calm"), "bit by bit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fsdp"),
    [
        (signal.SIGKILL, False),
        # tests/parallel/test_faults.py has a rank that hangs.
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.long),
    ],
)
def test_the_others_say_which_step_failed_within_the_timeout(
    tiny: Tiny, tmp_path: Path, kind: signal.Signals, fsdp: bool
) -> None:
    timeout = 10.0
    config, folder = tiny(dp=2, fsdp=fsdp, batch_size=1, timeout=timeout), tmp_path / "run"
    text = (
        "ranks: expected all 2 ranks to take part in step 3, got no answer from rank 1, after(.|\n)*--resume"
    )

    def dying() -> None:
        dies = lambda _: contextlib.nullcontext(Dying(3, int(kind)))  # noqa: E731
        quick = patch.object(parallelize, "_ROLL_CALL_SECONDS", 2.0)
        with quick, pytest.raises(JobError, match=text):
            train(config, folder, observe=dies if dist.get_rank() == 1 else None)

    began = time.monotonic()
    may = {"may_die": (1,)} if kind == signal.SIGKILL else {"may_hang": (1,)}
    World(2, group_seconds=timeout).call(dying, **may)
    assert figures(folder)[-1][0] == 2
    assert time.monotonic() - began < timeout + 60, "the margin is for a loaded machine"
