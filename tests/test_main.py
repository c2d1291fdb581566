"""``python -m attnspan``: what it draws and explains, and what it says of what it cannot do."""

from __future__ import annotations

import sys

import pytest

from attnspan.__main__ import main
from attnspan.base.machine import openmp_runtimes


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_call_is_explained(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(framework)
    sizes = ["--q-len", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    main(["explain", "causal & window(8)", *sizes, *(["--jax"] if framework == "jax" else [])])
    said = capsys.readouterr().out
    assert "H=4/2 S=64x64 D=16/16 float32" in said
    assert f"{4 * (9 * 64 - 36):,} visible pairs" in said


def test_the_environment_is_printed_for_a_report_without_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "/home/someone/cache")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/home/someone/dump --xla_cpu_foo=1")
    monkeypatch.setattr("attnspan.__main__.openmp_runtimes", lambda: ["libgomp.so.1", "libiomp5.so"])
    main(["explain", "--env"])
    said = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert facts["ATTNSPAN_TUNE_CACHE"] == "(path)"
    assert facts["XLA_FLAGS"] == "--xla_dump_to=(path) --xla_cpu_foo=1"
    assert facts["OpenMP"] == "libgomp.so.1, libiomp5.so (they compete for the cores: keep one)"
    assert {"python", "attnspan", "attnspan-lab", "torch", "jax", "transformers", "diffusers"} <= set(facts)
    assert "someone" not in said
    for text in ("CPU kernel ", "GPU  ", "threads "):
        assert text in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_openmp_runtimes_of_the_process_are_found() -> None:
    import torch

    torch.ones(2) + 1
    assert any(name.startswith(("libgomp", "libomp", "libiomp5")) for name in openmp_runtimes() or ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "m:f"], "doctor is a command of attnspan-lab: pip install ./lab in a checkout"),
        (["explain", "nonsense"], "got nonsense"),
        (["explain", "--dtype", "float31"], "--dtype: expected an element type of torch, got float31"),
        (["explain", "--jax", "--dtype", "float31"], "--dtype: expected an element type of JAX, got float31"),
        (["show"], "show: expected a mask, got none"),
        (["show", "causal", "--svg", "/proc/nowhere/a.svg"], "No such file or directory"),
    ],
)
def test_a_users_error_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
