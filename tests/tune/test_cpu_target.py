"""The CPU kernel as a target: real calls, small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnspan.bench.results import Results
from attnspan.cli import main
from attnspan.kernels import cpu
from attnspan.tune.cases import Case
from attnspan.tune.cpu import CpuTarget

pytestmark = pytest.mark.compiled_module("configurations are those of this machine's kernel")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_agree_whatever_the_configuration(direction: str, dtype: str) -> None:
    target = CpuTarget(threads=2)
    case = Case(direction, dtype, 2, 300, 300, 32, "causal")
    bench = target.open(case)
    assert bench.check(bench.make_call(target.default)()) is None
    legal = [config for config in target.configs(case) if config["block_k"] % 128 == 0]
    for config in legal[-3:]:
        assert bench.check(bench.make_call(config)()) is None, config


def test_another_result_is_told_apart() -> None:
    target = CpuTarget(threads=1)
    bench = target.open(Case("forward", "float32", 1, 64, 64, 32, "causal"))
    (out,) = bench.make_call(target.default)()
    assert bench.check((out,)) is None
    assert bench.check((out * (1 + 1e-6),)) is None, "rounding"
    found = bench.check((out * 1.001,))
    assert found is not None
    assert found.startswith("another result than the default's: 1.0e-03 of its norm")
    out[0, 0, 3, 3] = torch.nan
    assert bench.check((out,)) is not None


def test_an_illegal_configuration_raises_when_it_is_called() -> None:
    target = CpuTarget(threads=1)
    bench = target.open(Case("forward", "float32", 1, 64, 64, 32, "causal"))
    with pytest.raises(ValueError, match="config: expected block_q"):
        bench.make_call({"block_q": 7, "block_k": 0, "threads": 0})()


def test_the_default_is_the_kernels_own_choice_even_beside_a_table() -> None:
    assert cpu._core is not None
    target = CpuTarget(threads=1)
    bench = target.open(Case("forward", "float32", 1, 64, 300, 64, "full"))
    own = bench.make_call(target.default)()[0].clone()
    step = cpu._core.blocks("forward", "float32")[0]
    cpu._core.set_tuned([("forward", cpu.isa(), "float32", 64, 9, "dense", step, 128, 0)])
    try:
        assert torch.equal(bench.make_call(target.default)()[0], own)
    finally:
        cpu._core.set_tuned([])


def test_the_number_of_threads_is_searched_where_there_are_several() -> None:
    case = Case("forward", "float32", 1, 64, 64, 32, "full")
    assert {config["threads"] for config in CpuTarget(threads=2).configs(case)} == {0, 1}
    assert {config["threads"] for config in CpuTarget(threads=1).configs(case)} == {0}


def test_the_command_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", f"{tmp_path}/")
    gains = tmp_path / "gains.json"
    grid = ["--dtypes", "float32", "--head-dims", "16", "--lengths", "64", "--masks", "half,decode"]
    command = ["attnspan", "tune", *grid, "--modes", "forward", "--seconds", "0.05", "--json", str(gains)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    printed = capsys.readouterr().out
    assert "forward float32 D=16 S<=64 half" in printed
    assert "2 kinds of calls on" in printed
    (file,) = tmp_path.glob("tuned-*.json")
    assert f"written to {file}" in printed
    keys = [entry["key"]["mask_kind"] for entry in json.loads(file.read_text())["entries"]]
    assert keys == ["decode", "half"]
    tuning = Results.load(gains).tuning
    assert {gain.key["mask_kind"] for gain in tuning} <= {"half", "decode"}
