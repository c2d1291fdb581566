"""What tests of the lab share."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from forked import Forked, run

from attnspan_lab import children
from attnspan_lab.bench import processes
from attnspan_lab.cli import main


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no interpreter for a child or a figure. Its crashes leave no whole stack."""
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    for module in (children, processes):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Forked, run=run, **names))


@pytest.fixture
def attnspan(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command here: exit code, what it printed, what it complained of. It cuts no word."""

    def run(*args: object, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["attnspan", *map(str, args)])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        assert "…" not in out
        assert "Traceback" not in err
        return int(str(code)), out, err

    return run
