"""cuDNN's attention: what is handed to it, and what is not. There is no GPU here to run it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
import torch
from covering import few
from samples.jax_problems import cotangents_of, part_of
from samples.problems import check, make
from test_backends import PLAIN

import attnspan as a
from attnspan.call import Problem
from attnspan.call.options import ALIBI, DENSE
from attnspan.jax.backends import cudnn
from attnspan.jax.part import JaxPart
from attnspan.masks.bands import Band

PROBLEM = Problem(1, 4, 2, 128, 128, 64, 64, 1, "bfloat16", "gpu")
CAUSAL = JaxPart(*[None] * 4, 0.125, band=Band(None, 0), want_lse=False)
# What is said of a mask, and what cuDNN is asked for: whether it is causal, and keys before and after.
MASKS: dict[Band, tuple[a.Mask, bool, tuple[int, int] | None]] = {
    Band(): (a.full(), False, None),
    Band(None, 0): (a.causal(), True, None),
    Band(5, 0): (a.window(5), True, (5, 0)),
    Band(0, 0): (a.window(0), True, (0, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("band", few(MASKS, 2), ids=str)
def test_the_function_that_is_called_means_the_same(band: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own implementation of what cuDNN is asked for, against the oracle."""
    plain = partial(jax.nn.dot_product_attention, implementation="xla")

    def instead(*arrays: Any, implementation: str, **given: Any) -> Any:
        assert implementation == "cudnn"
        assert (given["is_causal"], given["local_window_size"]) == MASKS[band][1:]
        return plain(*arrays, **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    problem = make(replace(PLAIN, q_len=17, k_len=17, head_dim=16, v_dim=16))
    problem.bounds = torch.from_numpy(MASKS[band][0].spans(17, 17).bounds)
    problem.dlse[:] = 0
    part = part_of(problem)
    part = replace(part, band=band, want_lse=False)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cudnn.forward(replace(part, q=q, k=k, v=v))[0]

    @jax.jit  # Eager operations would be programs of their own.
    def results(dout: Any, *qkv: Any) -> Any:
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(dout)

    with jax.default_matmul_precision("highest"):
        found = results(cotangents_of(problem)[0], part.q, part.k, part.v)
    check(problem, dict(zip(("out", "dq", "dk", "dv"), found, strict=True)))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, None),
    ({}, {"want_lse": True}, "no gradient"),
    ({}, {"softcap": 3.0}, "no softcap"),
    ({}, {"bias_kind": ALIBI}, "no position biases"),
    ({}, {"bias_kind": DENSE}, "no dense bias"),
    ({}, {"sinks": True}, "no sinks"),
    ({}, {"dropout_p": 0.1}, "drops other weights"),
    ({}, {"band": None}, "known at tracing time"),
    ({}, {"band": Band(3, 2)}, "without keys ahead"),
    ({}, {"band": Band(3, None)}, "without keys ahead"),
    ({"device": "cpu"}, {}, "not on cpu"),
    ({"dtype": "float32"}, {}, "not float32"),
    ({"q_len": 5}, {}, "5 queries"),
    ({"q_len": 5}, {"band": Band()}, None),
    ({"v_dim": 32}, {}, "one head dim"),
    ({"head_dim": 60, "v_dim": 60}, {}, "multiples of 8"),
    ({"head_dim": 160, "v_dim": 160}, {}, "up to 128 on this device, not 160"),
    ({"batch": 0}, {}, "no empty arrays"),
]


@pytest.mark.parametrize(("sizes", "numbers", "reason"), REFUSED)
def test_what_it_refuses(
    sizes: dict[str, Any], numbers: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    found = cudnn.supports(replace(PROBLEM, **sizes), replace(CAUSAL, **numbers))
    assert found is None if reason is None else reason in str(found)


def test_wide_heads_need_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    monkeypatch.setattr(cudnn, "_is_hopper", lambda: True)
    assert cudnn.supports(replace(PROBLEM, head_dim=256, v_dim=256), CAUSAL) is None


def test_what_to_install_is_said() -> None:
    assert "jax[cuda13]" in str(cudnn.supports(PROBLEM, CAUSAL))
