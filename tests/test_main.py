"""``python -m attnspan``: what it draws and explains, and what it says of what it cannot do."""

from __future__ import annotations

import pytest

from attnspan.__main__ import main


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_call_is_explained(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(framework)
    sizes = ["--q-len", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    main(["explain", "causal & window(8)", *sizes, *(["--jax"] if framework == "jax" else [])])
    said = capsys.readouterr().out
    assert "H=4/2 S=64x64 D=16/16 float32" in said
    assert f"{4 * (9 * 64 - 36):,} visible pairs" in said


def test_versions_are_said_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "--env"])
    said = capsys.readouterr().out
    assert said.startswith("python ")
    assert "CPU kernel" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "m:f"], "doctor is a command of the lab: pip install ./lab in a checkout"),
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
