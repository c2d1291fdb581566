"""The command line: what it prints, what it exits with, what it says when something is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnspan import masks
from attnspan.cli import main

MODEL = {"dim": 16, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 8, "hidden": 16, "dtype": "float32"}
RUN = {"seq-len": 32, "batch-size": 1, "steps": 3, "warmup": 1, "eval-bytes": 64, "threads": 1}
TINY = [*(f"--{name}={value}" for name, value in (MODEL | RUN).items()), "--no-compile"]
SOURCE = str(Path(__file__).parents[1] / "src")

Result = tuple[int, str, str]
Command = Callable[..., Result]


def in_new_process(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=env)


def without(*packages: str) -> str:
    """Code that runs the command as if some packages were not installed."""
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in packages)
    return f"import sys; {blocked}; from attnspan.cli import main; main()"


@pytest.fixture
def attnspan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command here, in a folder: exit code, what it printed, what it complained."""

    def run(*args: str, cwd: Path) -> Result:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["attnspan", *args])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run named first has been trained, in a process of its own."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "data.txt").write_text("\n\n".join("abc" * n for n in range(1, 20)))
    args = ["train", "--name", "first", "--data", "data.txt", *TINY]
    done = in_new_process("from attnspan.cli import main; main()", *args, cwd=folder)
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


def test_train_leaves_a_page_of_its_steps_unless_told_not_to(attnspan: Command, trained: Path) -> None:
    folder = trained / "runs" / "first"
    assert [record["step"] for record in json.loads((folder / "monitor.json").read_text())["monitor"]] == [
        1,
        2,
        3,
    ]
    assert "Steps 1 to 3 of a watched training" in (folder / "monitor.html").read_text()
    args = ["train", "--name", "alone", "--data", "data.txt", *TINY, "--no-monitor"]
    code, out, _ = attnspan(*args, cwd=trained)
    assert code == 0
    assert "monitor" not in out
    assert not list((trained / "runs" / "alone").glob("monitor*"))


def test_a_run_that_fails_leaves_a_page_of_the_steps_before(
    attnspan: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnspan.train.step import Stepper

    step = Stepper.step

    def failing(self: Stepper, batch: object, index: int, *rest: object) -> object:
        if index == 2:
            raise MemoryError
        return step(self, batch, index, *rest)

    monkeypatch.setattr(Stepper, "step", failing)
    monkeypatch.chdir(trained)
    args = ["train", "--name", "failed", "--data", "data.txt", *TINY]
    monkeypatch.setattr(sys, "argv", ["attnspan", *args])
    with pytest.raises(MemoryError):
        main()
    assert "Steps 1 to 2 of a watched training" in (trained / "runs" / "failed" / "monitor.html").read_text()


def test_resume_takes_the_last_run_and_its_options(attnspan: Command, trained: Path) -> None:
    code, out, _ = attnspan("train", "--resume", cwd=trained)
    assert code == 0
    assert "resumed at step 3" in out


def test_resume_refuses_other_options(attnspan: Command, trained: Path) -> None:
    code, _, err = attnspan("train", "--resume", "--name", "first", "--lr", "1.0", cwd=trained)
    assert code == 2
    assert "expected --lr 0.003, as runs/first was started, got --lr 1.0" in err


def test_sample_continues_a_text_the_same_way_each_time(attnspan: Command, trained: Path) -> None:
    args = ("sample", "runs/first", "abc", "--tokens", "20")
    code, first, _ = attnspan(*args, cwd=trained)
    assert code == 0
    assert first.startswith("abc")
    assert attnspan(*args, cwd=trained)[1] == first
    args = ("sample", "runs/first/checkpoints/step-00000003", "abc", "--tokens", "20")
    assert attnspan(*args, cwd=trained)[1] == first
    assert attnspan(*args, "--seed", "1", cwd=trained)[1] != first


def test_show_writes_svg(attnspan: Command, tmp_path: Path) -> None:
    code, out, _ = attnspan(
        "show", "causal", "--q-len", "4", "--k-len", "8", "--svg", "mask.svg", cwd=tmp_path
    )
    assert (code, out) == (0, "mask.svg\n")
    assert (tmp_path / "mask.svg").read_text().startswith("<svg")
    assert "4 queries x 8 keys" in (tmp_path / "mask.svg").read_text()


ROOT = Path(__file__).parents[1]
SHOWN = re.findall(
    r"^\$? ?(attnspan show .*)$",
    (ROOT / "docs" / "masks.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_that_the_pages_show_run_as_they_stand(
    attnspan: Command, tmp_path: Path, line: str
) -> None:
    code, out, err = attnspan(*shlex.split(line)[1:], cwd=tmp_path)
    assert code == 0, err
    for drawn in tmp_path.iterdir():
        assert drawn.read_text(encoding="utf-8") == (ROOT / "docs" / "images" / drawn.name).read_text(
            encoding="utf-8"
        ), f"write it again: {line}"
    if "--svg" not in line:
        assert out.strip() in (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")


def test_the_page_shows_the_command_of_each_of_its_pictures() -> None:
    text = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\(images/(\w+)\.svg\)", text)
    drawn = [shlex.split(line)[-1].removesuffix(".svg") for line in SHOWN if "--svg" in line]
    assert pictures == drawn
    assert len(SHOWN) > len(drawn) > 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "causal & nonsense"], "got nonsense"),
        (["show", "causal", "--at", "1", "0"], "--at: expected a row below --batch and a head below --heads"),
        (["show", "causal", "--svg", "/proc/nowhere/a.svg"], "/proc/nowhere/a.svg: expected a writable file"),
        (["train", "--ac", "some"], "--ac to be one of none, selective, full, got 'some'"),
        (["train", "--data", "/nowhere"], "got /nowhere, which does not exist. Check the path."),
        (["train", "--from-step", "3"], "expected --from-step with --resume"),
        (["train", "--resume"], "expected a run with a checkpoint in runs, got none"),
        (["sample", "/nowhere"], "expected a run's folder or a checkpoint, got /nowhere"),
    ],
)
def test_a_users_error_is_one_message_without_a_traceback(
    attnspan: Command, tmp_path: Path, args: list[str], message: str
) -> None:
    code, _, err = attnspan(*args, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


@pytest.mark.parametrize(
    ("args", "blocked", "extra"),
    [
        (["show", "causal"], "typer", "cli"),
        (["train", *TINY], "torch", "train"),
        pytest.param(
            ["train", *TINY], "tensorboard", "train", marks=pytest.mark.long
        ),  # torch is loaded first
        pytest.param(["train", *TINY], "plotly", "bench", marks=pytest.mark.long),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, args: list[str], blocked: str, extra: str
) -> None:
    done = in_new_process(without(blocked), *args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"{blocked} is not installed: pip install 'attnspan[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(masks, "parse", broken)
    monkeypatch.setattr(sys, "argv", ["attnspan", "show", "causal"])
    with pytest.raises(ValueError, match="a defect"):
        main()


def test_help_shows_every_field_with_its_comment(attnspan: Command, tmp_path: Path) -> None:
    code, out, _ = attnspan("train", "--help", cwd=tmp_path)
    assert code == 0
    for text in ("--kv-heads", "--checkpoint-every", "--no-compile", "width of the residual"):
        assert text in out
