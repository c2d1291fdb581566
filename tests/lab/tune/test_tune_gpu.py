"""The tuner of a GPU's kernels, with interpreted kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnspan.experimental import triton
from attnspan_lab.cli import main
from attnspan_lab.tune.gpu import KERNELS, blocks, rank

SMALL: dict[str, Any] = {"length": 32, "heads": 1, "where": "cpu"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_other_blocks_compute_the_same_and_a_wrong_result_is_refused(kernel):
    with triton.interpreted():
        case = blocks(kernel, "float32", 16, **SMALL)
        other = replace(case["default"], block_m=16, block_n=16, warps=2)
        assert other != case["default"]
        results = case["make_call"](other)()
    case["check"](results)
    with pytest.raises(ValueError, match="differs from the default's"):
        case["check"](tuple(x * 1.1 for x in results))


@pytest.mark.parametrize("kind", ["full", "documents", "spans", "decode"])
def test_backends_are_ranked_and_those_that_fail_are_named(kind):
    sizes: dict[str, Any] = {"length": 64, "heads": 4, "where": "cpu", "backends": ("cpu", "math", "vendor")}
    times, reasons = rank(kind, "float32", 16, seconds=0.05, **sizes)
    assert set(times) == {"cpu", "math"}
    assert min(times.values()) > 0
    assert "BackendError" in reasons["vendor"]


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["attnspan", "tune"])
    with pytest.raises(SystemExit):
        main()
    assert "expected a GPU that torch can use" in capsys.readouterr().err
