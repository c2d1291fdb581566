"""The commands of the job: what they print, what they exit with, what they say when something is wrong."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from runs import briefly, interrupted

from attnspan_lab.cli import run
from train import sample
from train.command import command

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "examples/train"
MODEL = {"dim": 16, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 8, "hidden": 16, "dtype": "float32"}
RUN = {"seq-len": 32, "batch-size": 1, "steps": 3, "warmup": 1, "eval-bytes": 64, "threads": 1}
TINY = [*(f"--{name}={value}" for name, value in (MODEL | RUN).items()), "--no-compile"]

Result = tuple[int, str, str]
Command = Callable[..., Result]


def in_new_process(job: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    called = [sys.executable, str(job), *args]
    return subprocess.run(called, cwd=cwd, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command here, in a folder: exit code, what it printed, what it complained."""

    def called(*args: str, cwd: Path) -> Result:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["train", *args])
        app = typer.Typer(add_completion=False)
        app.command()(sample._command if args[:1] == ("sample",) else command())
        monkeypatch.setattr(sys, "argv", [x for x in sys.argv if x != "sample"])
        with briefly, pytest.raises(SystemExit) as end:
            run(app)
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return called


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run named first has been trained, in a process of its own."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "data.txt").write_text("\n\n".join("abc" * n for n in range(1, 20)))
    args = ["--name", "first", "--data", "data.txt", *TINY]
    done = in_new_process(JOB, *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    assert "held-out bits per byte" in done.stdout
    assert "monitor: runs/first/monitor.html" in done.stdout
    assert not done.stderr, "nothing chatters"
    return folder


def test_train_writes_a_summary(trained: Path) -> None:
    summary = json.loads((trained / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["text"]


@pytest.mark.slow
def test_train_leaves_a_page_of_its_steps_unless_told_not_to(train: Command, trained: Path) -> None:
    folder = trained / "runs" / "first"
    found = json.loads((folder / "monitor.json").read_text())
    assert [record["step"] for record in found["monitor"]] == [1, 2, 3]
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in found["monitor"]] == losses
    # An untrained model knows nothing: the logarithm of 256 bytes and the mark.
    assert [entry["step"] for entry in found["evaluations"]] == [0, 3]
    assert found["evaluations"][0]["held_out"] == pytest.approx(math.log(257), rel=0.03)
    assert "<p>Steps 1 to 3." in (folder / "monitor.html").read_text()
    args = ["--name", "alone", "--data", "data.txt", *TINY, "--no-monitor"]
    code, out, _ = train(*args, cwd=trained)
    assert code == 0
    assert "monitor" not in out
    assert not list((trained / "runs" / "alone").glob("monitor*"))


@pytest.mark.parametrize(
    ("count", "last", "said"),
    [
        (1, 3, "after step 3, which is saved: resume with python examples/train --resume --name x1\n"),
        (2, 2, "immediately, nothing is saved: start runs/x2 again\n"),
    ],
)
def test_an_interrupted_command_leaves_its_page_and_one_sentence(
    trained: Path, tmp_path: Path, count: int, last: int, said: str
) -> None:
    args = ["--name", f"x{count}", "--data", str(trained / "data.txt"), *TINY, "--steps=9", "--workers=1"]
    apart = multiprocessing.get_context("forkserver")
    child = apart.Process(target=interrupted, args=(tmp_path, args, count))
    child.start()
    child.join(120)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert child.exitcode == 130, err
    assert said in out
    assert err.strip().count("\n") == 0, "what the first one does; nothing of workers"
    assert f"<p>Steps 1 to {last}." in (tmp_path / f"runs/x{count}/monitor.html").read_text()


@pytest.mark.parametrize(
    ("older", "remedy"),
    [
        (True, "Sample an existing checkpoint: sample.py runs/first/checkpoints/step-00000001."),
        (False, "Start a new run with another --name."),
    ],
)
def test_a_damaged_checkpoint_names_another_to_sample(
    train: Command, trained: Path, tmp_path: Path, older: bool, remedy: str
) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    checkpoints = tmp_path / "runs/first/checkpoints"
    if older:
        shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000001")
    (checkpoints / "step-00000003/manifest.json").write_text("{")
    code, _, err = train("sample", "runs/first", "abc", cwd=tmp_path)
    assert code == 2
    assert "a damaged file: it is missing, or does not list" in err
    assert remedy in err
    assert "--resume" not in err


def test_a_run_that_fails_leaves_a_page_of_the_steps_before(
    train: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.step import Stepper

    step = Stepper.step

    def failing(self: Stepper, batch: object, index: int, *rest: object) -> object:
        if index == 2:
            raise MemoryError
        return step(self, batch, index, *rest)

    monkeypatch.setattr(Stepper, "step", failing)
    args = ["--name", "failed", "--data", "data.txt", *TINY]
    with pytest.raises(MemoryError):
        train(*args, cwd=trained)
    assert "<p>Steps 1 to 2." in (trained / "runs" / "failed" / "monitor.html").read_text()


@pytest.mark.slow
def test_resume_takes_the_last_run_and_its_options(train: Command, trained: Path) -> None:
    code, out, _ = train("--resume", cwd=trained)
    assert code == 0
    assert "resumed at step 3" in out


def test_resume_refuses_other_options(train: Command, trained: Path) -> None:
    code, _, err = train("--resume", "--name", "first", "--lr", "1.0", cwd=trained)
    assert code == 2
    assert "expected --lr 0.003, as runs/first was started, got --lr 1.0" in err


def test_sample_continues_a_text_the_same_way_each_time(train: Command, trained: Path) -> None:
    args = ("sample", "runs/first", "abc", "--tokens", "20")
    code, first, _ = train(*args, cwd=trained)
    assert code == 0
    assert first.startswith("abc")
    assert train(*args, cwd=trained)[1] == first
    args = ("sample", "runs/first/checkpoints/step-00000003", "abc", "--tokens", "20")
    assert train(*args, cwd=trained)[1] == first
    assert train(*args, "--seed", "1", cwd=trained)[1] != first


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ac", "some"], "--ac to be one of none, selective, full, got 'some'"),
        (["--data", "/nowhere"], "got /nowhere, which does not exist. Check the path."),
        (["--from-step", "3"], "expected --from-step with --resume"),
        (["--resume"], "expected a run with a checkpoint in runs, got none"),
        (["sample", "/nowhere"], "expected a run's folder or a checkpoint, got /nowhere"),
    ],
)
def test_a_users_error_is_one_message_without_a_traceback(
    train: Command, tmp_path: Path, args: list[str], message: str
) -> None:
    code, _, err = train(*args, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_help_shows_every_field_with_its_comment(train: Command, tmp_path: Path) -> None:
    code, out, _ = train("--help", cwd=tmp_path)
    assert code == 0
    for text in ("--kv-heads", "--checkpoint-every", "--no-compile", "width of the residual"):
        assert text in out
