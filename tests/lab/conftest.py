"""Children of the lab that start in no time."""

import subprocess
from types import SimpleNamespace

import pytest
from forked import Forked

from attnspan_lab import children


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no interpreter for a `children.Child`. Its crashes leave no whole stack."""
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=Forked, **names))
