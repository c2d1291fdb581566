"""Whole runs: what they leave behind, and that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import typer
from covering import everything
from rich.console import Console
from runs import Dying, figures, scores, train_apart
from runs import train as run
from torch.distributed import run as torchrun

from attnspan.errors import OptionError
from train import stop
from train import train as training
from train.command import command
from train.config import CheckpointError, ConfigError, TrainConfig
from train.parallelize import peak_flops
from train.progress import Graphs, Summary
from train.sample import generate
from train.step import Stepper
from train.stop import Stopped

Tiny = Callable[..., TrainConfig]


def train(config: TrainConfig, folder: Path, **options: Any) -> Summary:
    return run(config, folder, **({"sample": 0} | options))[1]


@pytest.mark.slow
def test_a_run_leaves_everything_in_its_folder_and_says_it(tiny: Tiny, tmp_path: Path) -> None:
    console, folder = Console(file=io.StringIO(), width=80), tmp_path / "run"
    summary = train(tiny(profile=str(tmp_path / "trace")), folder, console=console, sample=20)
    assert scores(folder) == (summary.bits_per_byte_start, summary.bits_per_byte_end)
    assert 8.5 > summary.bits_per_byte_start > max(7.5, summary.bits_per_byte_end)
    assert summary.warm is None, "compilation was off"
    assert TrainConfig.load(folder / "config.json").steps == 12
    assert [step for step, _, _ in figures(folder)] == list(range(1, 13))
    assert list((folder / "tensorboard").glob("events*"))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000012"]
    [trace] = (tmp_path / "trace").glob("rank0*.json")
    assert any(
        "attnspan::attention" in str(event.get("name"))
        for event in json.loads(trace.read_text())["traceEvents"]
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("step 12/12", "text of the model:", "--cp 2", *(name for name, _ in summary.rows())):
        assert said in text
    assert 0 < len(summary.text) <= 20


@pytest.mark.parametrize(("fastest", "mfu"), [(2e11, 0.5), (3e11, None), (0.0, None)])
def test_no_mfu_is_shown_that_a_step_exceeds(fastest: float, mfu: float | None) -> None:
    times = {"compile_seconds": 0.0, "warm": None, "later": None, "peak_memory": 0.0, "seconds": 0.0}
    ends = {"bits_per_byte_start": 8.0, "bits_per_byte_end": 3.0, "steps": 5, "tokens_per_second": 1.0}
    speeds = {"flops_per_second": 1e11, "fastest": fastest, "ceiling": [1.5e11, 2e11]}
    summary = Summary(**ends, **speeds, **times, ranks="1 rank")
    assert summary.mfu == mfu
    assert ("MFU" in dict(summary.rows())) == (mfu is not None)


def test_no_product_is_faster_than_the_ceiling(tiny: Tiny) -> None:
    ceiling = max(peak_flops(tiny(), torch.device("cpu")))
    if not ceiling:
        pytest.skip("the kernel is not compiled")
    factor, times = torch.randn(512, 512), []
    for _ in range(9):
        start = time.perf_counter()
        factor @ factor
        times.append(time.perf_counter() - start)
    assert 2 * 512**3 / sorted(times)[4] < ceiling


# Both are torch's own, raised while it imports its compiler and while it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("attention", "breaks"), [("attnspan", 0), pytest.param("sdpa-documents", 1, marks=pytest.mark.long)]
)
def test_a_compiled_run_has_one_graph_and_never_compiles_again(
    tiny: Tiny, tmp_path: Path, attention: str, breaks: int
) -> None:
    torch._dynamo.reset()
    config = tiny(compile=True, steps=4, attention=attention)
    summary = train(config, tmp_path / "run", sample=3)
    assert summary.warm is not None
    assert summary.warm == Graphs(1, 0) if not breaks else summary.warm.breaks > 0
    assert summary.later == Graphs(compiled=0, breaks=0)
    torch._dynamo.reset()
    eager = train(replace(config, compile=False), tmp_path / "eager")
    # Two computations of the same float32 sums: some hundred roundings apart.
    tolerance = 1000 * torch.finfo(torch.float32).eps
    assert summary.bits_per_byte_end == pytest.approx(eager.bits_per_byte_end, rel=tolerance)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(tiny: Tiny, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny(steps=3, seed=seed), tmp_path / name)
    assert figures(tmp_path / "a") == figures(tmp_path / "b") != figures(tmp_path / "c")


@pytest.mark.slow
def test_without_steps_a_run_fills_its_minutes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_TRIAL_SECONDS", 0.3)
    monkeypatch.setattr(training, "_RESERVE_SECONDS", 3.5)
    began, folder, console = time.monotonic(), tmp_path / "run", Console(file=io.StringIO(), width=100)
    summary = train(tiny(steps=0, minutes=0.1, warmup=10_000), folder, console=console)
    assert 1 < time.monotonic() - began < 30, "three seconds; a loaded machine is no failure"
    kept = TrainConfig.load(folder / "config.json")
    assert summary.steps == kept.steps == len(figures(folder)) > 1
    assert kept.warmup <= kept.steps // 10
    assert f"0.1 minutes are {kept.steps:,} steps of" in console.file.getvalue()  # type: ignore[attr-defined]


def kill_when(
    condition: Callable[[], bool], config: TrainConfig, folder: Path, *, resume: bool, delay: float = 0.0
) -> bool:
    """Run in a process, killed some seconds after the condition holds; whether that was before the end."""
    # Forked from one that has loaded torch, as the ranks of other tests are.
    forked = multiprocessing.get_context("forkserver")
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
def test_after_kill_at_several_moments_losses_equal_the_uninterrupted_run(tiny: Tiny, tmp_path: Path) -> None:
    # A worker makes batches ahead: those that the killed process did not use are made again.
    config = tiny(steps=24, checkpoint_every=4, workers=1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    moments: list[Callable[[], bool]] = [
        lambda: (
            len(figures(cut)) >= 6 and any((cut / "checkpoints").glob("step-*"))
        ),  # between two checkpoints
        lambda: (
            len(figures(cut)) >= 11 and any((cut / "checkpoints").glob(".step-*.tmp/__0_0*"))
        ),  # amid its files
    ]
    for kill, moment in enumerate(moments if everything() else moments[1:]):
        assert kill_when(moment, config, cut, resume=kill > 0), "the moment passed unseen"
        assert list((cut / "checkpoints").glob("step-*"))
    train(replace(config, workers=0), whole)
    train(replace(config, workers=0), cut, resume=True)
    assert figures(cut) == figures(whole)
    assert [step for step, _, _ in figures(whole)] == list(range(1, 25))
    assert scores(cut) == scores(whole)


@pytest.mark.long
@pytest.mark.slow
def test_after_twenty_kills_at_random_moments_losses_equal_the_uninterrupted_run(
    tiny: Tiny, tmp_path: Path
) -> None:
    config, random = tiny(steps=500, checkpoint_every=2, workers=1), Random(0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    checkpoints, metrics = cut / "checkpoints", cut / "metrics.jsonl"

    def bytes_written() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    for kill in range(20):
        # After some steps, of which each writes a line, and then at any moment of a step or of a checkpoint.
        before, more, delay = bytes_written(), random.randrange(1500), random.random() / 20

        def moment() -> bool:
            return any(checkpoints.glob("step-*")) and bytes_written() > before + more  # noqa: B023

        ended = kill_when(moment, config, cut, resume=kill > 0, delay=delay)
        assert ended, f"the run was over after {kill} kills"
        assert list(checkpoints.glob("step-*"))
    train(replace(config, workers=0), whole)
    train(replace(config, workers=0), cut, resume=True)
    assert figures(cut) == figures(whole)
    assert scores(cut) == scores(whole)


@pytest.mark.slow
def test_a_run_is_not_started_twice_nor_resumed_from_nothing(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny(steps=1), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"expected a new run, got .*run, which holds one\. Pass --resume"):
        train(tiny(steps=1), tmp_path / "run")
    train(tiny(steps=3, checkpoint_every=1), tmp_path / "three")
    for step, fewer in ((None, 2), (2, 1)):
        with pytest.raises(
            ConfigError,
            match=rf"--steps of at least {step or 3}, the number of steps already taken, got {fewer}",
        ):
            train(tiny(steps=fewer), tmp_path / "three", resume=True, from_step=step)
    assert TrainConfig.load(tmp_path / "three" / "config.json").steps == 3
    assert len(list((tmp_path / "three" / "checkpoints").glob("step-*"))) == 2
    with pytest.raises(CheckpointError, match=r"expected a checkpoint in .*none.*Start the run without"):
        train(tiny(steps=1), tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another", "a document more", "none"])
def test_a_run_is_resumed_only_on_its_own_data(tiny: Tiny, tmp_path: Path, change: str) -> None:
    data, folder = tmp_path / "data.txt", tmp_path / "run"
    documents = [f"document {index} of a few" for index in range(30)]
    data.write_text("\n\n".join(documents))
    config = tiny(steps=2, held_out=0.2, data=str(data))
    train(config, folder)
    texts = {"another": ["Document 0 of a few", *documents[1:]], "a document more": [*documents, "last"]}
    data.write_text("\n\n".join(texts.get(change, documents)))
    if change == "none":
        train(config, folder, resume=True)
        return
    with pytest.raises(
        CheckpointError, match=r"documents that .*run was trained with.*Restore the original data"
    ):
        train(config, folder, resume=True)


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_a_diverged_step_stops_the_run_and_its_weights_replace_no_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: str
) -> None:
    step = Stepper.step

    def diverging(self: Stepper, batch: Any, index: int, *rest: Any) -> Any:
        result = step(self, batch, index, *rest)
        return result._replace(**{figure: float("nan")}) if index == 3 else result

    monkeypatch.setattr(Stepper, "step", diverging)
    with pytest.raises(ConfigError, match=r"a finite loss and gradient norm at step 4, got .*lower --lr"):
        train(tiny(checkpoint_every=1), tmp_path)
    kept = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert kept == ["step-00000002", "step-00000003"]


@pytest.fixture
def heard() -> Iterator[None]:
    """A shell may start the tests with signals ignored, which the job respects."""
    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_the_step_and_a_resumed_run_has_the_same_losses(
    tiny: Tiny, tmp_path: Path, number: int
) -> None:
    console, folder = Console(file=io.StringIO(), width=80), tmp_path / "run"
    config = tiny(steps=6, checkpoint_every=0, workers=0)
    with pytest.raises(Stopped) as end:
        train(config, folder, console=console, observe=lambda _: nullcontext(Dying(3, number, number)))
    assert end.value.code == 128 + number
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL), "as it was"
    said = f"after step 3, which is saved: resume with python examples/train --resume --runs-dir {tmp_path} "
    assert said in console.file.getvalue()  # type: ignore[attr-defined]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    train(config, folder, resume=True)
    train(config, tmp_path / "calm")
    assert figures(folder) == figures(tmp_path / "calm")
    assert scores(folder) == scores(tmp_path / "calm")


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("last", "said"),
    [(5, "immediately, step [24] is saved: resume"), (1, "immediately, nothing is saved: start")],
)
def test_the_second_signal_ends_at_once_and_says_what_is_saved(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, said: str
) -> None:
    monkeypatch.setattr(stop, "_SAME_SECONDS", 0.0)
    console, twice = Console(file=io.StringIO(), width=80), Dying(last, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(checkpoint_every=2), tmp_path, console=console, observe=lambda _: nullcontext(twice))
    assert len(figures(tmp_path)) == last - 1
    assert re.search(said, console.file.getvalue())  # type: ignore[attr-defined]


def test_folders_that_cannot_be_written_are_said_before_the_first_step(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for changes, folder in (({}, "file/run"), ({"profile": str(tmp_path / "file" / "trace")}, "run")):
        with pytest.raises(ConfigError, match=r"folders that can be written, got .*--runs-dir and --profile"):
            train(tiny(**changes), tmp_path / folder)


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("runs/a", "--name a"),
        ("runs/a/b", "--runs-dir runs/a --name b"),
        ("x y/[v2]", "--runs-dir 'x y' --name '[v2]'"),
    ],
)
def test_what_to_try_next_names_this_very_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=80)
    train(tiny(steps=1), Path(folder), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"python examples/train --resume {options} --steps 2 " in said
    assert f"python examples/train/sample.py {shlex.quote(folder)} " in said


def test_ranks_are_started_on_the_folder_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Else it is set for good.
    monkeypatch.setattr(torchrun, "run", started.append)
    monkeypatch.setattr(sys, "argv", ["train", "--cp", "2", "--name", "a/b"])
    app = typer.Typer()
    app.command()(command())
    app(standalone_mode=False)
    [args] = started
    assert args.training_script_args[-4:] == ["--runs-dir", "runs/a", "--name", "b"]


def test_what_is_no_run_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"expected a run configuration, got .*config\.json"):
        TrainConfig.load(tmp_path / "config.json")
    (tmp_path / "step-backup").mkdir()
    with pytest.raises(CheckpointError, match=r"a checkpoint, got .*step-backup"):
        next(generate(tmp_path / "step-backup", "", tokens=1, temperature=0.0, seed=0))


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
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, OptionError), match=message):
        TrainConfig(**changes)
