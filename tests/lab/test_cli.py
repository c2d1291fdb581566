"""The command line: what it prints, what it exits with, what it says when something is missing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnspan.library import text
from attnspan_lab.cli import main

SOURCE = os.pathsep.join(str(Path(__file__).parents[2] / x) for x in ("src", "lab/src", "examples"))

Command = Callable[..., tuple[int, str, str]]


def in_new_process(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=env)


def without(*packages: str) -> str:
    """Code that runs the command as if some packages were not installed."""
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in packages)
    return f"import sys; {blocked}; from attnspan_lab.cli import main; main()"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_show_writes_svg(attnspan: Command, tmp_path: Path) -> None:
    code, out, _ = attnspan("show", "causal", "--q-len", "4", "--k-len", "8", "--svg", "mask.svg")
    assert (code, out) == (0, "mask.svg\n")
    assert (tmp_path / "mask.svg").read_text().startswith("<svg")
    assert "4 queries x 8 keys" in (tmp_path / "mask.svg").read_text()


ROOT = Path(__file__).parents[2]
SHOWN = re.findall(
    r"^\$? ?(python -m attnspan show .*)$",
    (ROOT / "docs" / "masks.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_that_the_pages_show_run_as_they_stand(
    attnspan: Command, tmp_path: Path, line: str
) -> None:
    code, out, err = attnspan(*shlex.split(line)[3:])
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
        (
            ["show", "causal", "--at", "1", "0"],
            "--at: expected a batch element below --batch and a head below --heads",
        ),
        (
            ["show", "causal", "--svg", "/proc/nowhere/a.svg"],
            "No such file or directory: '/proc/nowhere",
        ),
        (["tune", "nothing"], "expected module:function, got 'nothing'"),
        (["tune", "nowhere:f"], "expected a function of a module, got No module named 'nowhere'"),
    ],
)
def test_a_users_error_is_one_message_without_a_traceback(
    attnspan: Command, tmp_path: Path, args: list[str], message: str
) -> None:
    code, _, err = attnspan(*args)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


@pytest.mark.slow
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    done = in_new_process(without("plotly"), "bench", "causal", "--html", "x.html", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "plotly is not installed: pip install ./lab in a checkout" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(text, "parse", broken)
    monkeypatch.setattr(sys, "argv", ["attnspan", "show", "causal"])
    with pytest.raises(ValueError, match="a defect"):
        main()


@pytest.mark.parametrize("command", ["show", "explain"])
def test_the_librarys_own_commands_are_passed_on(attnspan: Command, tmp_path: Path, command: str) -> None:
    code, out, err = attnspan(command, "causal", "--q-len", "4")
    assert code == 0, err
    assert ("10 visible pairs" in out) == (command == "explain")


@pytest.mark.parametrize(
    ("words", "found"), [("attnspan do", "doctor"), ("attnspan doctor --sta", "--stages")]
)
def test_a_shell_completes_commands_and_options(tmp_path: Path, words: str, found: str) -> None:
    asked = {"_ATTNSPAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = f"import os; os.environ.update({asked!r}); from attnspan_lab.cli import main; main()"
    assert in_new_process(code, cwd=tmp_path).stdout.split() == [found]


def test_completion_is_installed_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    code = "from attnspan_lab.cli import main; main()"
    done = in_new_process(code, "--install-completion", "bash", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [script] = tmp_path.rglob("attnspan.sh")
    assert "_ATTNSPAN_COMPLETE" in script.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("simulate causal --tokens 1K --ranks 2", "2 ranks, ulysses"),
        ("tune made:search --seconds 0.1", "made:search, about 0.1 s"),
    ],
)
def test_a_command_that_may_take_long_names_its_step_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, step: str
) -> None:
    case = "{'make_call': lambda n: lambda: sum(range(n)), 'configs': [], 'default': 9}"
    (tmp_path / "made.py").write_text(f"def search():\n    return {case}\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    code = "from attnspan_lab.cli import main; main()"
    done = in_new_process(code, *command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert step in done.stdout
