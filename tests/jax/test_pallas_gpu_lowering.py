"""The kernels for GPUs are lowered to Triton's language where there is no GPU: what it lacks shows here."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import few

from attnspan.jax.backends import Operands, Static
from attnspan.jax.backends import pallas_gpu as kernels
from attnspan.options import ALIBI, DENSE, SIGNED_ALIBI

BATCH, HEADS, KV_HEADS, ROWS, KEYS = 2, 4, 2, 300, 333


def _shape(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _lowered(static: Static, dtype: str, head_dim: int, **given: Any) -> str:
    q, k = (
        _shape(BATCH, heads, length, head_dim, dtype=dtype)
        for heads, length in ((HEADS, ROWS), (KV_HEADS, KEYS))
    )
    runs = given.pop("runs", 1)
    operands = Operands(_shape(BATCH, 1, ROWS, runs, 2, dtype="int32"), **given)

    def both(q: Any, k: Any, v: Any, given: Operands, dout: Any, dlse: Any) -> Any:
        out, lse = kernels.forward(q, k, v, given, static)
        return kernels.backward(dout, dlse, q, k, v, given, out, lse, static, True)

    traced = jax.jit(both).trace(q, k, k, operands, q, _shape(BATCH, HEADS, ROWS))
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def _names(text: str) -> list[str]:
    """The kernels, in order."""
    return re.findall(r'name = "attnspan_(\w+)"', text)


BOTH = ["forward", "dq", "dkv"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str, head_dim: int) -> None:
    text = _lowered(Static(scale=0.125), dtype, head_dim)
    assert _names(text) == BOTH


SLOPES = {"bias": _shape(BATCH, HEADS)}
OPTIONS: dict[str, tuple[Static, dict[str, Any]]] = {
    "three spans a row": (Static(scale=0.1), {"runs": 3}),
    "alibi": (Static(scale=0.1, bias_kind=ALIBI), SLOPES),
    "softcap, sinks, signed alibi, indices given": (
        Static(scale=0.1, softcap=30.0, bias_kind=SIGNED_ALIBI, sinks=True),
        {
            **SLOPES,
            "sinks": _shape(HEADS),
            "q_index": _shape(1, ROWS, dtype="int32"),
            "k_index": _shape(BATCH, KEYS, dtype="int32"),
        },
    ),
    "dense": (Static(scale=0.1, bias_kind=DENSE), {"bias": _shape(1, HEADS, ROWS, KEYS, dtype="bfloat16")}),
    "dense, per key": (Static(scale=0.1, bias_kind=DENSE), {"bias": _shape(BATCH, 1, 1, KEYS)}),
    "dropout": (
        Static(scale=0.1, dropout_p=0.1),
        {"seeds": _shape(BATCH, HEADS, 2, dtype="uint32")},
    ),
}


@pytest.mark.parametrize("option", few(OPTIONS, 3))
def test_options(option: str) -> None:
    static, given = OPTIONS[option]
    expected = [*BOTH, "dbias"] if static.bias_kind == DENSE else BOTH
    assert _names(_lowered(static, "bfloat16", 64, **given)) == expected


@pytest.mark.parametrize("option", few(["dropout", "dense, per key"], 1))
def test_numbers_of_64_bits_change_nothing(option: str) -> None:
    static, given = OPTIONS[option]
    with jax.enable_x64(True):
        text = _lowered(static, "float32", 64, **given)
    assert _names(text)[:3] == BOTH


def test_odd_sizes() -> None:
    assert _names(_lowered(Static(scale=0.1), "float16", 80)) == BOTH
