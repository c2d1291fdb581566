"""The command, and the CPU kernel as its backend: real calls, small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnspan.cli import main
from attnspan.kernels import cpu, tuned
from attnspan.tools.tune.cases import Case
from attnspan.tools.tune.cpu import CpuBackend, CpuConfig

pytestmark = pytest.mark.compiled_module("configurations are those of this machine's kernel")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_agree_whatever_the_configuration(direction: str, dtype: str) -> None:
    case = CpuBackend().open(Case(300, 32, "half", dtype, direction))
    legal = [config for config in case["configs"] if config.block_k % 128 == 0]
    for config in [case["default"], *legal[-3:]]:
        case["check"](case["make_call"](config)())


def test_wrong_results_and_illegal_configurations_raise() -> None:
    case = CpuBackend().open(Case(64, 32, "half"))
    (out,) = case["make_call"](case["default"])()
    case["check"]((out * (1 + 1e-6),))  # rounding
    with pytest.raises(ValueError, match=r"differs from the default's by 1.0e-03 of its norm"):
        case["check"]((out * 1.001,))
    out[0, 0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="differs from the default's by nan"):
        case["check"]((out,))
    with pytest.raises(ValueError, match="config: expected block_q"):
        case["make_call"](CpuConfig(block_q=7))()
    with pytest.raises(ValueError, match="head dims up to 576"):
        CpuBackend().open(Case(64, 640, "half"))


def test_configurations_are_those_of_the_core() -> None:
    assert tuple(CpuConfig.__dataclass_fields__) == tuned.CONFIG_FIELDS


def test_the_default_is_the_kernels_own_choice_despite_a_table() -> None:
    assert cpu.core is not None
    case = CpuBackend().open(Case(300, 64, "dense"))
    own = case["make_call"](CpuConfig())()[0].clone()
    step = cpu.core.blocks("forward", "float32")[0]
    cpu.core.set_tuned([("forward", cpu.isa(), "float32", 64, 9, "dense", step, 128, 0)])
    try:
        assert torch.equal(case["make_call"](CpuConfig())()[0], own)
    finally:
        cpu.core.set_tuned([])


def test_the_number_of_threads_is_searched_if_there_are_several() -> None:
    backend, case = CpuBackend(), Case(64, 32, "half")
    for threads, tried in {1: {0}, 2: {0, 1}}.items():
        backend.threads = threads
        assert {config.threads for config in backend.open(case)["configs"]} == tried


GRID = "--dtypes float32 --head-dims 16 --lengths 64 --masks half,decode --modes forward --seconds 0.05"


def attnspan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str) -> str:
    monkeypatch.setattr("sys.argv", ["attnspan", "tune", *options.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return capsys.readouterr().out


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    printed = attnspan(monkeypatch, capsys, GRID)
    assert "2 kinds of calls gained; 0 left for the next run" in printed
    (file,) = tmp_path.iterdir()
    assert f"cache: {file}" in printed
    value = json.loads(file.read_text())
    assert {entry["key"]["mask_kind"] for entry in value["entries"]} == {"decode", "half"}
    value["entries"][0]["ratio"] = "edited"
    value["entries"].append("damaged")
    file.write_text(json.dumps(value))
    printed = attnspan(monkeypatch, capsys, "--show")
    assert printed.count("cpu forward") == 2
    assert "float32 D=16 S<=64 half: " in printed


def test_where_the_cache_is_off_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "cache: off, nothing is written" in attnspan(monkeypatch, capsys, GRID)
    assert "cache: off" in attnspan(monkeypatch, capsys, "--show")
    assert not list(tmp_path.iterdir())
