"""cuDNN's attention: what is handed to it, and what is not. There is no GPU here to run it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_cases as cases
import pytest
from covering import few
from jax._src.cudnn import fused_attention_stablehlo
from oracle_cases import Case

import attnspan as a
from attnspan.call import Problem
from attnspan.jax.backends import MaskWords, Operands, Static, cudnn
from attnspan.options import ALIBI, DENSE

PROBLEM = Problem(1, 4, 2, 128, 128, 64, 64, 1, "bfloat16", "gpu")
CAUSAL = Static(scale=0.125, mask=("causal",), want_lse=False)
MASKS: dict[MaskWords, a.Mask] = {
    ("full",): a.full(),
    ("causal",): a.causal(),
    ("window", 5, 0): a.window(5),
    ("window", 0, 0): a.window(0),
    ("window", None, 0): a.window(None),
    ("window", None, None): a.window(None, None),
}


@pytest.mark.parametrize("words", few(MASKS, 3))
def test_the_function_that_is_called_means_the_same(
    words: MaskWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's own implementation of what cuDNN is asked for, against the oracle."""
    plain = partial(jax.nn.dot_product_attention, implementation="xla")

    def instead(*arrays: Any, implementation: str, **given: Any) -> Any:
        assert implementation == "cudnn"
        return plain(*arrays, **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    case = Case(q_len=17, k_len=17, head_dim=16, v_dim=16)
    lowered = MASKS[words].spans(q_len=17, k_len=17)
    problem = cases.make(case, np.asarray(lowered.bounds))
    problem.arrays["dlse"][:] = 0
    static = replace(case.static, mask=words, want_lse=False)
    exact, _ = cases.oracle(problem)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cudnn.forward(q, k, v, problem.given, static)[0]

    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(attend, *(jnp.asarray(problem.arrays[name]) for name in "qkv"))
        gradients = zip(("dq", "dk", "dv"), pull(jnp.asarray(problem.arrays["dout"])), strict=True)
    cases.check(problem, {"out": out, "lse": exact["lse"], **dict(gradients)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("words", "kind", "width"),
    [(("full",), "NO_MASK", 0), (("causal",), "CAUSAL", 0), (("window", 7, 0), "CAUSAL", 8)],
)
def test_it_is_lowered_to_cudnn(
    words: MaskWords, kind: str, width: int, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a GPU, JAX knows no version of cuDNN; nothing else keeps it from lowering the call.
    version = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", version)
    q, k = (jax.ShapeDtypeStruct((2, heads, 128, head_dim), jnp.dtype(dtype)) for heads in (4, 2))
    given = Operands(jax.ShapeDtypeStruct((1, 1, 128, 1, 2), jnp.dtype("int32")))

    def loss(q: Any, k: Any, v: Any, given: Operands) -> Any:
        out = cudnn.forward(q, k, v, given, replace(CAUSAL, mask=words))[0]
        return out.astype("float32").sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"__cudnn\$(\w+)", text) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    configs = [json.loads(x.replace("\\22", '"')) for x in re.findall(r'backend_config = "([^"]+)"', text)]
    for config in (x["cudnn_fmha_backend_config"] for x in configs):
        assert (config["mask_type"], config["sliding_window_length"]) == (kind, width)
        assert config["fmha_scale"] == 0.125


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"want_lse": True}, "no gradient"),
        ({"softcap": 3.0}, "no softcap"),
        ({"bias_kind": ALIBI}, "no position biases"),
        ({"bias_kind": DENSE}, "no dense bias"),
        ({"sinks": True}, "no sinks"),
        ({"dropout_p": 0.1}, "drops other weights"),
        ({"mask": None}, "known when the call is traced"),
        ({"mask": ("window", 3, 2)}, "without keys ahead"),
        ({"mask": ("window", 3, None)}, "without keys ahead"),
    ],
)
def test_calls_that_it_refuses(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    assert cudnn.supports(PROBLEM, CAUSAL) is None
    assert reason in str(cudnn.supports(PROBLEM, replace(CAUSAL, **change)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "not on cpu"),
        ({"dtype": "float32"}, "not float32"),
        ({"q_len": 5}, "5 queries"),
        ({"v_dim": 32}, "one head dim"),
        ({"head_dim": 60, "v_dim": 60}, "multiples of 8"),
        ({"head_dim": 160, "v_dim": 160}, "up to 128 on this device, not 160"),
        ({"batch": 0}, "no empty arrays"),
    ],
)
def test_problems_that_it_refuses(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    assert reason in str(cudnn.supports(replace(PROBLEM, **change), CAUSAL))


def test_wide_heads_need_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    monkeypatch.setattr(cudnn, "_is_hopper", lambda: True)
    wide = replace(PROBLEM, head_dim=256, v_dim=256)
    assert cudnn.supports(wide, CAUSAL) is None


def test_queries_and_keys_of_any_number_may_see_each_other_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    problem = replace(PROBLEM, q_len=5)
    assert cudnn.supports(problem, replace(CAUSAL, mask=("full",))) is None
    assert cudnn.supports(problem, replace(CAUSAL, mask=("window", None, None))) is None


def test_what_to_install_is_said() -> None:
    assert "jax[cuda13]" in str(cudnn.supports(PROBLEM, CAUSAL))


def test_options_that_would_be_ignored_are_no_call_of_ours() -> None:
    q = jnp.zeros((1, 4, 8, 64), jnp.bfloat16)
    given = Operands(jnp.zeros((1, 1, 8, 1, 2), np.int32), sinks=jnp.zeros(4))
    with pytest.raises(AssertionError):
        cudnn.forward(q, q, q, given, CAUSAL)
