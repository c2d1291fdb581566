"""The job: its files, its output, interruptions with the same losses afterwards, and its errors."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from timeit import repeat
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from runs import briefly, dies, figures, interrupted, scores, train, train_apart
from torch.distributed import run as torchrun

from attnspan.errors import OptionError
from attnspan_lab.bench.monitor.lines import MetricsLog
from attnspan_lab.cli import run
from train import sample, stop
from train import train as training
from train.command import command
from train.config import CheckpointError, ConfigError, TrainConfig
from train.parallelize import peak_flops
from train.progress import Summary
from train.step import Stepper
from train.stop import Stopped

Tiny = Callable[..., TrainConfig]
Command = Callable[..., tuple[int, str, str]]

MODEL = {"dim": 16, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 8, "hidden": 16, "dtype": "float32"}
RUN = {"seq-len": 32, "batch-size": 1, "steps": 3, "warmup": 1, "eval-bytes": 64, "threads": 1}
OPTIONS = [*(f"--{name}={value}" for name, value in (MODEL | RUN).items()), "--no-compile"]


@pytest.fixture
def call(monkeypatch, capfd):
    """Run a command here, in a folder: exit code, output, errors."""

    def called(*args, cwd, main=None):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["train", *args])
        app = typer.Typer(add_completion=False)
        app.command()(main or command())
        with briefly, pytest.raises(SystemExit) as end:
            run(app)
        return int(end.value.code or 0), *capfd.readouterr()

    return called


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a new process has trained a run named first."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "data.txt").write_text("\n\n".join("abc" * n for n in range(1, 20)))
    job = str(Path(__file__).parents[2] / "examples/train")
    env = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    called = [sys.executable, job, "--name", "first", "--data", "data.txt", *OPTIONS]
    done = subprocess.run(called, cwd=folder, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, ""), "no log disturbs"
    said = ("step 3/3", "held-out bits per byte", "monitor: runs/first/monitor.html")
    assert [words for words in said if words not in done.stdout] == []
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    """A folder with a copy of this run and its data."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_the_command_leaves_a_summary_and_a_page_of_its_steps(call, trained):
    folder = trained / "runs" / "first"
    summary, found = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "monitor"))
    assert summary["steps"] == 3
    assert summary["text"]
    steps = [(record["step"], record["loss"]) for record in found["monitor"]]
    assert steps == [(step, loss) for step, loss, _ in figures(folder)]
    assert [entry["step"] for entry in found["evaluations"]] == [0, 3]
    # The loss of an untrained model is the logarithm of 256 bytes and the mark.
    assert found["evaluations"][0]["held_out"] == pytest.approx(math.log(257), rel=0.03)
    assert "<p>Steps 1 to 3." in (folder / "monitor.html").read_text()
    code, out, _ = call("--name", "alone", "--data", "data.txt", *OPTIONS, "--no-monitor", cwd=trained)
    assert (code, "monitor" in out, list((trained / "runs/alone").glob("monitor*"))) == (0, False, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "last", "said"),
    [
        (1, 3, "after step 3, which is saved: resume with python examples/train --resume --name x1\n"),
        (2, 2, "immediately, nothing is saved: start runs/x2 again\n"),
    ],
)
def test_an_interrupted_command_leaves_its_page_and_one_sentence(trained, tmp_path, count, last, said):
    args = ["--name", f"x{count}", "--data", str(trained / "data.txt"), *OPTIONS, "--steps=9", "--workers=1"]
    apart = multiprocessing.get_context("forkserver")
    child = apart.Process(target=interrupted, args=(tmp_path, args, count))
    child.start()
    child.join(120)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert child.exitcode == 130, err
    assert said in out
    assert err.strip().count("\n") == 0, "the effect of a signal, and no line of a worker"
    assert f"<p>Steps 1 to {last}." in (tmp_path / f"runs/x{count}/monitor.html").read_text()


@pytest.mark.slow
def test_resume_takes_the_last_run_with_its_own_options(call, copied):
    assert "resumed at step 3" in call("--resume", cwd=copied)[1]
    code, _, err = call("--resume", "--name", "first", "--lr", "1.0", cwd=copied)
    assert (code, "expected --lr 0.003, as runs/first was started, got --lr 1.0" in err) == (2, True)


@pytest.mark.slow
def test_sample_continues_a_text_the_same_way_each_time(call, copied):
    checkpoint = "runs/first/checkpoints/step-00000003"

    def sampled(path, *options):
        return call(path, "abc", "--tokens", "20", *options, cwd=copied, main=sample._command)

    code, first, _ = sampled("runs/first")
    assert (code, first[:3]) == (0, "abc")
    assert sampled("runs/first") == sampled(checkpoint) == (0, first, "")
    assert sampled("runs/first", "--seed", "1")[1] != first
    cold = ("--temperature", "0")
    assert sampled("runs/first", *cold) == sampled(checkpoint, *cold, "--seed", "1")
    (copied / checkpoint / "manifest.json").write_text("{")
    assert "a damaged file: it is missing, or does not list" in sampled("runs/first")[2]
    wanted = "attnspan: checkpoint: expected a run's folder or a checkpoint, got /"
    assert sampled("/nowhere")[2].startswith(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ac", "some"], "--ac to be one of none, selective, full, got 'some'"),
        (["--data", "/nowhere"], "got /nowhere, which does not exist. Check the path."),
        (["--from-step", "3"], "expected --from-step with --resume"),
        (["--sample", "-1"], "expected --sample of 0 or more, got -1"),
        (["--resume"], "expected a run with a checkpoint in runs, got none"),
    ],
)
def test_an_error_of_the_user_is_one_message_without_a_traceback(call, tmp_path, args, message):
    code, _, err = call(*args, cwd=tmp_path)
    assert (code, len(err.splitlines()), message in err) == (2, 1, True), err
    assert not list(tmp_path.rglob("*")), "no file is left behind"


def test_help_shows_every_field_with_its_comment(call, tmp_path):
    code, out, _ = call("--help", cwd=tmp_path)
    assert code == 0
    for text in ("--kv-heads", "--checkpoint-every", "--no-compile", "width of the residual", "--from-step"):
        assert text in out


def test_ranks_are_started_on_the_folder_that_was_asked_for(call, monkeypatch, tmp_path):
    started: list[Any] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Otherwise the command sets it for good.
    monkeypatch.setattr(torchrun, "run", started.append)
    call("--cp", "2", "--name", "a/b", cwd=tmp_path)
    assert started[0].training_script_args[-4:] == ["--runs-dir", "runs/a", "--name", "b"]


def printed(config, folder, **options):
    console = Console(file=io.StringIO(), width=80)
    summary = train(config, folder, console=console, **options)[1]
    return console.file.getvalue(), summary  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_leaves_its_results_in_its_folder_and_prints_them(tiny, tmp_path):
    folder = tmp_path / "x y/[v2]"
    text, summary = printed(tiny(profile=str(tmp_path / "trace")), folder, sample=20)
    assert scores(folder) == (summary.bits_per_byte_start, summary.bits_per_byte_end)
    assert 8.5 > summary.bits_per_byte_start > max(7.5, summary.bits_per_byte_end)
    assert summary.graphs is None, "compilation was off"
    assert TrainConfig.load(folder / "config.json").steps == 12
    assert [step for step, _, _ in figures(folder)] == list(range(1, 13))
    assert list((folder / "tensorboard").glob("events*"))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000012"]
    [trace] = (tmp_path / "trace").glob("rank0*.json")
    names = [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]
    assert any("attnspan::attention" in name for name in names)
    assert 0 < len(summary.text) <= 20
    named = f"--runs-dir {shlex.quote(str(folder.parent))} --name '[v2]'"
    said = ["step 12/12", "text of the model:", "--cp 2", *(name for name, _ in summary.rows())]
    said += [f"python examples/train --resume {named} --steps 24 "]
    said += [f"python examples/train/sample.py {shlex.quote(str(folder))} "]
    assert [each for each in said if each not in text] == []


@pytest.mark.parametrize(("fastest", "mfu"), [(2e11, 0.5), (3e11, None), (0.0, None)])
def test_no_mfu_is_shown_that_a_step_exceeds(fastest, mfu):
    speeds = {"flops_per_second": 1e11, "fastest": fastest, "ceiling": [1.5e11, 2e11]}
    others = dict.fromkeys(set(Summary.__dataclass_fields__) - set(speeds), 1)
    summary = Summary(**speeds, **others | {"text": ""})
    assert (summary.mfu, "MFU" in dict(summary.rows())) == (mfu, mfu is not None)


@pytest.mark.slow
def test_no_product_is_faster_than_the_ceiling(tiny):
    ceiling = max(peak_flops(tiny(), torch.device("cpu")))
    if not ceiling:
        pytest.skip("the kernel is not compiled")
    factor = torch.randn(512, 512)
    assert 2 * 512**3 / median(repeat(lambda: factor @ factor, number=1, repeat=9)) < ceiling


@pytest.mark.slow
def test_without_steps_a_run_fills_its_minutes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_TRIAL_SECONDS", 0.3)
    monkeypatch.setattr(training, "_RESERVE_SECONDS", 3.5)
    began = time.monotonic()
    text, summary = printed(tiny(steps=0, minutes=0.1, warmup=10_000), tmp_path)
    assert 1 < time.monotonic() - began < 30, "three seconds; a loaded machine is no failure"
    kept = TrainConfig.load(tmp_path / "config.json")
    assert summary.steps == kept.steps == len(figures(tmp_path)) > 1
    assert kept.warmup <= kept.steps // 10
    assert f"0.1 minutes are {kept.steps:,} steps of" in text


def kill_when(condition, config, folder, delay):
    """Run or resume in a process, killed some seconds after the condition holds. True if that was in time."""
    # Forked from one that has loaded torch, as the ranks of other tests are.
    forked, resume = multiprocessing.get_context("forkserver"), (folder / "checkpoints").is_dir()
    child = forked.Process(target=train_apart, args=(config, folder), kwargs={"resume": resume})
    child.start()
    while child.is_alive() and not condition():
        time.sleep(0.001)
    time.sleep(delay)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_after_kills_losses_equal_the_uninterrupted_run(tiny, tmp_path, kills):
    # A worker makes batches ahead. The batches that the killed process did not use are made again.
    config, random = tiny(steps=24 * kills, checkpoint_every=2, workers=1), Random(0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    drafts, metrics = cut / "checkpoints", cut / "metrics.jsonl"
    for kill in range(kills):
        size = random.randrange(1500) + (metrics.stat().st_size if metrics.exists() else 0)

        def moment(size=size):
            # After some steps, of which each writes a line, at any moment of a step or of a checkpoint.
            return any(drafts.glob("step-*")) and metrics.stat().st_size > size

        killed = kill_when(moment, config, cut, random.random() / 20)
        assert killed, f"the run ended after {kill} kills"
        assert list(drafts.glob("step-*"))
    train(replace(config, workers=0), whole)
    train(replace(config, workers=0), cut, resume=True)
    assert figures(cut) == figures(whole)
    assert [step for step, _, _ in figures(whole)] == list(range(1, config.steps + 1))
    assert scores(cut) == scores(whole)


@pytest.fixture
def heard():
    """A shell may start the tests with signals ignored, which the job respects."""
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    assert {number: signal.getsignal(number) for number in default} == default, "as it was"
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_the_step_and_a_resumed_run_has_the_same_losses(tiny, tmp_path, number):
    folder, config = tmp_path / "run", tiny(steps=6, checkpoint_every=0)
    with pytest.raises(Stopped) as end:
        train(config, folder, observe=dies(3, number, number))
    assert end.value.code == 128 + number
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    train(config, folder, resume=True)
    train(config, tmp_path / "calm")
    assert (figures(folder), scores(folder)) == (figures(tmp_path / "calm"), scores(tmp_path / "calm"))


@pytest.mark.usefixtures("heard")
def test_the_second_signal_ends_immediately_and_the_job_prints_the_saved_step(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "_SAME_SECONDS", 0.0)
    console, twice = Console(file=io.StringIO(), width=80), dies(5, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(checkpoint_every=2), tmp_path, console=console, observe=twice)
    assert len(figures(tmp_path)) == 4
    assert re.search(r"immediately, step [24] is saved: resume", console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_the_weights_of_a_diverged_step_replace_no_checkpoint(tiny, tmp_path, monkeypatch, figure):
    step = Stepper.step

    def diverging(self, batch, index, *rest):
        result = step(self, batch, index, *rest)
        return result._replace(**{figure: float("nan")}) if index == 3 else result

    monkeypatch.setattr(Stepper, "step", diverging)
    with pytest.raises(ConfigError, match=r"a finite loss and gradient norm at step 4, got .*lower --lr"):
        train(tiny(checkpoint_every=1), tmp_path)
    kept = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert kept == ["step-00000002", "step-00000003"]


@pytest.mark.slow
def test_a_run_is_started_once_and_resumed_only_on_its_own_data(tiny, tmp_path):
    data, folder = tmp_path / "data.txt", tmp_path / "run"
    documents = [f"document {index} of a few" for index in range(30)]
    config = tiny(steps=3, checkpoint_every=1, held_out=0.2, data=str(data))
    data.write_text("\n\n".join(documents))
    train(config, folder)
    with pytest.raises(ConfigError, match=r"expected a new run, got .*run, which holds one\. Pass --resume"):
        train(config, folder)
    for step, fewer in ((None, 2), (2, 1)):
        wanted = rf"--steps of at least {step or 3}, the number of steps already taken, got {fewer}"
        with pytest.raises(ConfigError, match=wanted):
            train(replace(config, steps=fewer), folder, resume=True, from_step=step)
    assert TrainConfig.load(folder / "config.json").steps == 3
    assert len(list((folder / "checkpoints").glob("step-*"))) == 2
    train(config, folder, resume=True)
    for others in (["Document 0 of a few", *documents[1:]], [*documents, "last"]):
        data.write_text("\n\n".join(others))
        with pytest.raises(CheckpointError, match=r"documents that .*run was trained with.*Restore the orig"):
            train(config, folder, resume=True)
    with pytest.raises(CheckpointError, match=r"expected a checkpoint in .*none.*Start the run without"):
        train(config, tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_files_that_cannot_be_used_are_named(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for changes, folder in (({}, "file/run"), ({"profile": str(tmp_path / "file" / "trace")}, "run")):
        with pytest.raises(ConfigError, match=r"folders that can be written, got .*--runs-dir and --profile"):
            train(tiny(**changes), tmp_path / folder)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"expected a run configuration, got .*config\.json"):
        TrainConfig.load(tmp_path / "config.json")
    (tmp_path / "step-backup").mkdir()
    with pytest.raises(CheckpointError, match=r"a checkpoint, got .*step-backup"):
        next(sample.generate(tmp_path / "step-backup", "", tokens=1, temperature=0.0, seed=0))
    metrics = tmp_path / "metrics.jsonl"
    for line in (b"{", b"[]", b"3", b"{}", b"\xff", b'{"step": "1"}'):
        content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
        metrics.write_bytes(content)
        with pytest.raises(OptionError, match=r"line 2 of .*metrics\.jsonl.*Remove that line"):
            MetricsLog(metrics, 3)
        assert metrics.read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ac": "some"}, r"--ac to be one of none, selective, full, got 'some'"),
        ({"method": "fair"}, r"--method to be one of balanced, contiguous, zigzag"),
        ({"minutes": 0.0}, r"--minutes of at least 0\.1, got 0\.0"),
        ({"minutes": float("inf")}, r"a finite --minutes of at least 0\.1, got inf"),
        ({"threads": 100_000}, r"--threads of at most 1024, got 100000"),
        ({"strategy": "rings"}, r"'hybrid\(u, r\)' with u \* r = 1 ranks, got 'rings'"),
        ({"strategy": "hybrid(2, 2)", "cp": 2}, r"u \* r = 2 ranks, got 'hybrid\(2, 2\)'"),
        ({"accumulate": 0}, r"--accumulate of at least 1, got 0"),
        ({"lr": float("nan")}, r"--lr of at least 0, got nan"),
        ({"held_out": 1.0}, r"--held-out below 1"),
        ({"heads": 3, "kv_heads": 2}, r"--kv-heads to divide --heads, got 3 heads and 2"),
        ({"head_dim": 7}, r"an even --head-dim, got 7"),
        ({"cp": 2, "attention": "sdpa"}, r"--attention attnspan with --cp above 1, got --attention sdpa and"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    with pytest.raises((ConfigError, OptionError), match=message):
        TrainConfig(**changes)
