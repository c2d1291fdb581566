"""The tuner of a GPU's kernels, with interpreted kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnspan.experimental import triton
from attnspan.experimental.triton._config import Config
from attnspan_lab.cli import main
from attnspan_lab.tune.cache import entries, tuned
from attnspan_lab.tune.gpu import KERNELS, blocks, rank

SMALL: dict[str, Any] = {"length": 32, "heads": 1, "where": "cpu"}


@pytest.mark.slow
def test_blocks_are_searched(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    with triton.interpreted():
        for kernel in KERNELS:
            case = blocks(kernel, "float32", 16, **SMALL)
            case["configs"] = [Config(16, 16, 4, 1), Config(32, 16, 4, 1)]
            found = tuned(kernel, path=path, seconds=1.0, **case)
            assert found.tried >= 1
            assert not found.failures
    assert [x["key"]["name"] for x in entries(path)] == list(KERNELS)


def test_wrong_blocks_are_not_taken() -> None:
    with triton.interpreted():
        case = blocks("forward", "float32", 16, **SMALL)
        (out,) = case["make_call"](case["default"])()
    case["check"]((out,))
    with pytest.raises(ValueError, match="differs from the default's"):
        case["check"]((out * 1.1,))


@pytest.mark.parametrize("kind", ["full", "documents", "spans", "decode"])
def test_backends_are_ranked_and_those_that_fail_are_named(kind: str) -> None:
    sizes: dict[str, Any] = {"length": 64, "heads": 4, "where": "cpu", "backends": ("cpu", "math", "vendor")}
    times, reasons = rank(kind, "float32", 16, seconds=0.05, **sizes)
    assert set(times) == {"cpu", "math"}
    assert min(times.values()) > 0
    assert "BackendError" in reasons["vendor"]


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["attnspan", "tune"])
    with pytest.raises(SystemExit):
        main()
    assert "expected a GPU that torch can use" in capsys.readouterr().err
