"""The command line: what it prints, what it exits with, what it says when something is missing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attnspan.library import text
from attnspan_lab.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$? ?(python -m attnspan show .*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_show_writes_svg(attnspan):
    code, out, _ = attnspan("show", "causal", "--q-len", "4", "--k-len", "8", "--svg", "mask.svg")
    assert (code, out) == (0, "mask.svg\n")
    drawn = Path("mask.svg").read_text()
    assert drawn.startswith("<svg")
    assert "4 queries x 8 keys" in drawn


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_that_the_pages_show_run_as_they_stand(attnspan, tmp_path, line):
    code, out, err = attnspan(*shlex.split(line)[3:])
    assert code == 0, err
    for drawn in tmp_path.iterdir():
        kept = ROOT / "docs" / "images" / drawn.name
        assert drawn.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), f"write again: {line}"
    assert "--svg" in line or out.strip() in PAGE


def test_the_page_shows_the_command_of_each_of_its_pictures():
    pictures = re.findall(r"\]\(images/(\w+)\.svg\)", PAGE)
    drawn = [shlex.split(line)[-1].removesuffix(".svg") for line in SHOWN if "--svg" in line]
    assert pictures == drawn
    assert len(SHOWN) > len(drawn) > 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("show 'causal & nonsense'", "got nonsense"),
        ("show causal --at 1 0", "--at: expected a batch element below --batch and a head below --heads"),
        ("show causal --svg /proc/nowhere/a.svg", "No such file or directory: '/proc/nowhere"),
        ("tune nothing", "expected module:function, got 'nothing'"),
        ("tune nowhere:f", "expected a function of a module, got No module named 'nowhere'"),
        ("bench causal --html x.html", "plotly is not installed: pip install ./lab in a checkout"),
    ],
)
def test_a_users_error_is_one_message_without_a_traceback(attnspan, tmp_path, monkeypatch, args, message):
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, _, err = attnspan(*shlex.split(args))
    assert (code, len(err.splitlines()), message in err) == (2, 1, True), err
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_a_defect_keeps_its_traceback(monkeypatch):
    def broken(_):
        raise ValueError("a defect")

    monkeypatch.setattr(text, "parse", broken)
    monkeypatch.setattr(sys, "argv", ["attnspan", "show", "causal"])
    with pytest.raises(ValueError, match="a defect"):
        main()


@pytest.mark.parametrize("command", ["show", "explain"])
def test_the_librarys_own_commands_are_passed_on(attnspan, command):
    code, out, err = attnspan(command, "causal", "--q-len", "4")
    assert code == 0, err
    assert ("10 visible pairs" in out) == (command == "explain")


COMPLETE = """
import atexit, sys
from attnspan_lab.cli import main
atexit.register(lambda: print({"torch", "jax"} & {*sys.modules}))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"), [("attnspan do", "doctor"), ("attnspan doctor --sta", "--stages")]
)
def test_a_shell_completes_commands_and_options_without_a_framework(words, found):
    asked = {"_ATTNSPAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", COMPLETE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | asked)
    assert done.stdout.split() == [found, "set()"], done.stderr


def test_completion_is_installed_for_a_shell(attnspan, tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert attnspan("--install-completion", "bash")[0] == 0
    [script] = tmp_path.rglob("attnspan.sh")
    assert "_ATTNSPAN_COMPLETE" in script.read_text()


@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("simulate causal --tokens 1K --ranks 2", "2 ranks, ulysses"),
        ("tune made:search --seconds 0.1", "made:search, about 0.1 s"),
    ],
)
def test_a_command_that_may_take_long_names_its_step_on_a_terminal(attnspan, monkeypatch, command, step):
    case = "{'make_call': lambda n: lambda: sum(range(n)), 'configs': [], 'default': 9}"
    Path("made.py").write_text(f"def search():\n    return {case}\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    code, out, err = attnspan(*command.split(), columns=120)
    assert code == 0, err
    assert step in out
