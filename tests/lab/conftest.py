"""What tests of the lab share."""

import subprocess
from types import SimpleNamespace

import pytest
from forked import Forked, run

from attnspan_lab import children
from attnspan_lab.bench import processes


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no interpreter for a child or a figure. Its crashes leave no whole stack."""
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    for module in (children, processes):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Forked, run=run, **names))
