"""Whole runs: what they leave behind, and that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from attnspan.train.errors import CheckpointError, ConfigError
from attnspan.train.machine import matmul_ceiling
from attnspan.train.measure import Comparison, Graphs
from attnspan.train.run import resume_config, train
from covering import everything
from rich.console import Console

from attnspan.train.config import TrainConfig
from attnspan.train.sample import generate

Tiny = Callable[..., TrainConfig]

CHILD = """
import json, sys
from pathlib import Path
from attnspan.train import run
from attnspan.train.config import TrainConfig

config, folder, resume = TrainConfig(**json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3] == "resume"
config = run.resume_config(folder) if resume else config
run.train(config, folder, resume=resume, against_sdpa=False)
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of all whole lines, exact: JSON keeps every bit of a float."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def test_a_run_leaves_everything_in_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    console = quiet()
    summary = train(tiny(), tmp_path / "run", console=console)
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert figures["bits_per_byte_end"] == summary.bits_per_byte_end < summary.bits_per_byte_start
    assert 7.5 < summary.bits_per_byte_start < 8.5
    assert 0 < figures["share"]["share"] < 1
    assert len(figures["comparison"]["sdpa"]) == len(figures["comparison"]["attnspan"]) >= 2
    assert figures["warm"] is None, "compilation was off"
    assert resume_config(tmp_path / "run").steps == 12
    assert [step for step, _, _ in losses(tmp_path / "run")] == list(range(1, 13))
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text() == "step-00000012\n"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 12/12" in text
    for name, _ in summary.rows():
        assert name in text


# Both are torch's own, raised while it imports its compiler and while it traces.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_run_has_one_graph_and_never_compiles_again(tiny: Tiny, tmp_path: Path) -> None:
    torch._dynamo.reset()
    summary = train(tiny(compile=True, steps=4), tmp_path / "run", against_sdpa=False, console=quiet())
    assert summary.warm == Graphs(compiled=1, breaks=0)
    assert summary.later == Graphs(compiled=0, breaks=0)
    torch._dynamo.reset()
    eager = train(tiny(steps=4), tmp_path / "eager", against_sdpa=False, console=quiet())
    # Two computations of the same float32 sums: some hundred roundings apart.
    tolerance = 1000 * torch.finfo(torch.float32).eps
    assert summary.bits_per_byte_end == pytest.approx(eager.bits_per_byte_end, rel=tolerance)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_calls_per_document_do_not_compile_again_for_other_documents(tiny: Tiny, tmp_path: Path) -> None:
    torch._dynamo.reset()
    config = tiny(compile=True, steps=6, attention="sdpa-documents")
    summary = train(config, tmp_path / "run", against_sdpa=False, console=quiet())
    assert summary.warm.breaks > 0, "they are outside of the graphs"
    assert summary.later == Graphs(compiled=0, breaks=0)
    torch._dynamo.reset()


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(tiny: Tiny, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny(steps=3, seed=seed), tmp_path / name, against_sdpa=False, console=quiet())
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def start(config: TrainConfig, folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(config)), str(folder), how],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def kill_when(child: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """Kill as soon as the condition holds; whether that was before the end."""
    while child.poll() is None:
        if condition():
            child.send_signal(signal.SIGKILL)
            child.communicate()
            return True
        time.sleep(0.001)
    _, error = child.communicate()
    assert child.returncode == 0, error.decode()
    return False


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


@pytest.mark.slow
def test_after_kill_at_several_moments_losses_equal_the_uninterrupted_run(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(steps=24, checkpoint_every=4)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    moments: list[Callable[[], bool]] = [
        lambda: lines(cut) >= 6,  # between two checkpoints
        lambda: lines(cut) >= 11 and any((cut / "checkpoints").glob(".step-*.tmp/__0_0*")),  # amid its files
    ]
    moments = moments if everything() else moments[1:]
    how = "start"
    for moment in moments:
        assert kill_when(start(config, cut, how), moment), "the moment passed unseen"
        assert (cut / "checkpoints" / "LATEST").is_file()
        how = "resume"
    train(config, whole, against_sdpa=False, console=quiet())
    train(resume_config(cut), cut, resume=True, against_sdpa=False, console=quiet())
    assert losses(cut) == losses(whole)
    assert [step for step, _, _ in losses(whole)] == list(range(1, 25))
    scores = [json.loads((folder / "summary.json").read_text()) for folder in (whole, cut)]
    for name in ("bits_per_byte_start", "bits_per_byte_end"):
        assert scores[0][name] == scores[1][name]


def test_a_damaged_checkpoint_stops_the_resume_and_an_older_one_continues_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(tiny(checkpoint_every=4), folder, against_sdpa=False, console=quiet())
    expected = losses(folder)
    file = folder / "checkpoints" / "step-00000012" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*1000 bytes.*--resume --from-step 8"):
        train(resume_config(folder), folder, resume=True, against_sdpa=False, console=quiet())
    assert losses(folder) == expected, "nothing is lost"
    train(resume_config(folder), folder, resume=True, from_step=8, against_sdpa=False, console=quiet())
    assert losses(folder) == expected
    assert (folder / "checkpoints" / "LATEST").read_text() == "step-00000012\n"


def test_a_run_is_not_started_twice_nor_resumed_from_nothing(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny(steps=1), tmp_path / "run", against_sdpa=False, console=quiet())
    with pytest.raises(ConfigError, match=r"expected a new run, got .*run, which holds one\. Pass --resume"):
        train(tiny(steps=1), tmp_path / "run", against_sdpa=False, console=quiet())
    (tmp_path / "run" / "checkpoints" / "LATEST").unlink()
    with pytest.raises(ConfigError, match="expected a new run"):
        train(tiny(steps=1), tmp_path / "run", against_sdpa=False, console=quiet())
    with pytest.raises(CheckpointError, match=r"expected a run to resume in .*none"):
        resume_config(tmp_path / "none")


@pytest.mark.parametrize("change", ["another", "a document more", "none"])
def test_a_run_is_resumed_only_on_its_own_data(tiny: Tiny, tmp_path: Path, change: str) -> None:
    data, folder = tmp_path / "data.txt", tmp_path / "run"
    documents = [f"document {index} of a few" for index in range(30)]
    data.write_text("\n\n".join(documents))
    train(tiny(steps=2, held_out=0.2, data=str(data)), folder, against_sdpa=False, console=quiet())
    texts = {"another": ["Document 0 of a few", *documents[1:]], "a document more": [*documents, "last"]}
    data.write_text("\n\n".join(texts.get(change, documents)))
    if change == "none":
        train(resume_config(folder), folder, resume=True, against_sdpa=False, console=quiet())
        return
    with pytest.raises(CheckpointError, match=r"documents that .*run was trained with.*Restore the data"):
        train(resume_config(folder), folder, resume=True, against_sdpa=False, console=quiet())


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"expected a run configuration, got .*config\.json"):
        resume_config(tmp_path)


def test_a_folder_beside_the_checkpoints_is_no_checkpoint_to_sample(tmp_path: Path) -> None:
    (tmp_path / "step-backup").mkdir()
    with pytest.raises(CheckpointError, match=r"a checkpoint, got .*step-backup"):
        next(generate(tmp_path / "step-backup", "", tokens=1, temperature=0.0, seed=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ac": "some"}, r"--ac to be one of none, selective, full, got 'some'"),
        ({"attention": "flash"}, r"--attention to be one of attnspan, sdpa"),
        ({"dtype": "float16"}, r"--dtype to be one of auto, float32, bfloat16"),
        ({"steps": 0}, r"--steps of at least 1, got 0"),
        ({"lr": -1.0}, r"--lr of at least 0\.0"),
        ({"lr": float("nan")}, r"--lr of at least 0\.0, got nan"),
        ({"held_out": 1.0}, r"--held-out below 1"),
        ({"heads": 3, "kv_heads": 2}, r"--kv-heads to divide --heads, got 3 heads and 2"),
        ({"head_dim": 7}, r"an even --head-dim, got 7"),
        ({"cp": 0}, r"--cp of at least 1, got 0"),
        (
            {"cp": 2, "attention": "sdpa"},
            r"--attention attnspan beside --cp above 1, got --attention sdpa and",
        ),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)  # type: ignore[arg-type]


def test_the_ceiling_is_a_speed_that_a_product_reaches() -> None:
    ceiling = matmul_ceiling(torch.float32, seconds=0.05)
    factor = torch.randn(1024, 1024)
    start = time.perf_counter()
    factor @ factor
    slow = 2 * 1024**3 / (time.perf_counter() - start)
    assert slow / 20 < ceiling < slow * 20


def test_the_comparison_is_a_ratio_of_medians_with_quartiles() -> None:
    comparison = Comparison(attnspan=[1.0, 2.0, 9.0], sdpa=[4.0, 4.0, 90.0])
    assert comparison.ratio == 2.0
    assert comparison.spread == (2.0, 10.0)
