"""What a GPU's table holds and decides, and the tuner that writes it, with interpreted kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnspan.call import Problem
from attnspan.cli import main
from attnspan.kernels import measured, triton, tuned
from attnspan.kernels.triton._config import Config, config_of
from attnspan.kernels.tuned import Key
from attnspan.tools.tune.gpu import KINDS, TritonBackend, blocks_grid, rank, rankings
from attnspan.tools.tune.run import run, save
from attnspan.torch._backends import candidates, choose_backend

GPU = "NVIDIA Example, sm_90"
CALL = Problem(1, 4, 2, 64, 64, 64, 64, 1, "bfloat16", "cuda", "causal", "", 90, GPU)


def choice(kind: str, dim: int, **times: int) -> dict[str, Any]:
    return {"key": vars(Key("choice", "both", "sm_90", "bfloat16", dim, 0, kind)), "config": times}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this machine's tables."""
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    measured.forget()
    yield tmp_path
    measured.forget()


def test_the_fastest_backend_that_was_measured_runs(folder: Path) -> None:
    assert choose_backend(CALL, None).name == "vendor"
    entries = choice("causal", 64, vendor=300, flex=400, triton=200), choice("spans", 64, flex=5, triton=9)
    save(folder / tuned.file_name(GPU), GPU, *entries)
    measured.forget()
    assert choose_backend(CALL, None).name == "triton"
    assert candidates(CALL, named=False)["triton"].supports(CALL) is None
    assert choose_backend(replace(CALL, head_dim=40, v_dim=40), None).name == "triton", "the next larger"
    assert choose_backend(replace(CALL, band=""), None).name == "flex"
    others: list[dict[str, Any]] = [{"head_dim": 128, "v_dim": 128}, {"band": "window"}, {"dtype": "float16"}]
    for other in (*others, {"gpu": "NVIDIA Other, sm_90"}):
        assert choose_backend(replace(CALL, **other), None).name == "vendor", other
    assert choose_backend(replace(CALL, q_len=1), None).name == "vendor", "decoding was not measured"
    assert choose_backend(CALL, "flex").name == "flex"


def test_what_the_fastest_cannot_run_goes_to_the_next(folder: Path) -> None:
    save(folder / tuned.file_name(GPU), GPU, choice("causal", 512, triton=1, vendor=2))
    measured.forget()
    wide = replace(CALL, head_dim=512, v_dim=512)
    assert choose_backend(wide, None).name == "flex"
    assert "up to 256" in choose_backend(wide, None).refusals["triton"]


def test_tables_of_this_machine_go_before_those_of_the_package(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path_factory.mktemp("shipped")
    monkeypatch.setattr(measured, "_TABLES", shipped)
    name = tuned.file_name(GPU)
    save(shipped / name, GPU, choice("causal", 64, flex=1, vendor=2), choice("full", 64, triton=1, flex=2))
    measured.forget()
    assert choose_backend(CALL, None).name == "flex"
    save(folder / name, GPU, choice("causal", 64, triton=1, vendor=2))
    measured.forget()
    assert choose_backend(CALL, None).name == "triton"
    assert choose_backend(replace(CALL, band="full"), None).name == "triton"


def test_measured_blocks_are_used(folder: Path) -> None:
    key = vars(Key("triton", "forward", "sm_90", "bfloat16", 128, 12, "half"))
    config = {"block_m": 32, "block_n": 128, "warps": 4, "stages": 3}
    save(folder / tuned.file_name(GPU), GPU, {"key": key, "config": config})
    measured.forget()
    assert config_of("forward", torch.bfloat16, 128, 4096, 90, GPU) == Config(**config)
    assert config_of("forward", torch.bfloat16, 100, 4096, 90, GPU) == Config(**config)
    assert config_of("forward", torch.bfloat16, 128, 16, 90, GPU).block_m == 16, "few rows"
    bf16, fp16 = torch.bfloat16, torch.float16
    for other in (("keys", bf16, 128), ("forward", fp16, 128), ("forward", bf16, 256)):
        assert config_of(*other, 4096, 90, GPU) == config_of(*other, 4096, 90)


def test_tables_of_the_package_are_those_of_its_version() -> None:
    for path in measured._TABLES.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert tuned.file_name(device) == path.name
        assert tuned.read(path, device), "tune again, or say in the file that it still holds"


def test_blocks_are_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspan.tools.tune import gpu

    tried = [Config(16, 16, 4, 1), Config(32, 16, 4, 1)]
    monkeypatch.setattr(gpu, "_configs", lambda *_: tried)
    monkeypatch.setattr(gpu, "_HEADS", 1)
    path = folder / "blocks.json"
    with triton.interpreted():
        backend = TritonBackend("cpu")
        cases = blocks_grid(["float32"], [16], length=32)
        entries = list(run(backend, cases, path, seconds=2.0, minutes=5))
    assert [entry["key"]["direction"] for entry in entries] == ["forward", "queries", "keys"]
    assert all(entry["tried"] >= 1 and not entry["failures"] for entry in entries)
    assert len(tuned.read(path, backend.device)) == 3


def test_wrong_blocks_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with triton.interpreted():
        case = TritonBackend("cpu").open(blocks_grid(["float32"], [16], length=16)[0])
        (out,) = case["make_call"](case["default"])()
    case["check"]((out,))
    with pytest.raises(ValueError, match="differs from the default's"):
        case["check"]((out * 1.1,))


def test_backends_are_ranked_and_those_that_fail_are_named() -> None:
    sizes: dict[str, Any] = {"length": 64, "heads": 4, "where": "cpu", "backends": ("cpu", "math", "vendor")}
    found = list(rankings("here", "none", ["float32"], [16], seconds=0.05, **sizes))
    assert [entry["key"]["mask_kind"] for entry in found] == list(KINDS)
    for entry in found:
        assert set(entry["config"]) == {"cpu", "math"}
        assert min(entry["config"].values()) > 0
        assert "vendor: BackendError" in entry["reason"]
    assert rank("full", "float32", 16, seconds=0.05, **{**sizes, "backends": ("vendor",)})[0] == {}


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["attnspan", "tune", "--device", "cuda"])
    with pytest.raises(SystemExit):
        main()
    assert "expected a GPU that torch can use" in capsys.readouterr().err
