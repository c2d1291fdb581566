"""Eager calls of JAX: few Python calls before the program, one program for calls that are alike."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from attnspan import alibi, causal, full, segments, window  # noqa: E402
from attnspan.jax import attention  # noqa: E402
from attnspan.jax.rules import attend  # noqa: E402

S = 16
Q, K, V = (jax.random.normal(jax.random.key(i), (1, 4, S, 8)) for i in range(3))

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "causal": lambda: {"mask": causal()},
    "documents": lambda: {"mask": causal() & segments(np.arange(S) // 5)},
    "prepared": lambda: {"mask": causal().prepare(S, S)},
    "sinks": lambda: {"mask": window(4), "sinks": jnp.zeros(4)},
}


def _python_calls(function: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions of the package, and the number of files that they are in."""
    files: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        del arg
        if event == "call" and "/attnspan/" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files))


@pytest.mark.parametrize("name", CALLS)
def test_few_python_calls_stand_before_the_program(name: str) -> None:
    options = CALLS[name]()
    for _ in range(2):
        attention(Q, K, V, **options)
    calls, files = _python_calls(lambda: attention(Q, K, V, **options))
    assert calls <= (120 if name == "sinks" else 40)
    assert files <= (21 if name == "sinks" else 12)


def test_calls_that_are_alike_share_a_program_and_its_trace() -> None:
    attention(Q, K, V, mask=causal(), softcap=3.0)
    before = attend._cache_size()
    for mask in (full(), window(3), segments(np.arange(S) // 5), causal().prepare(S, S)):
        attention(V, Q, K, mask=mask, softcap=3)
    assert attend._cache_size() == before
    attention(Q, K, V, mask=causal(), softcap=2.5)
    assert attend._cache_size() == before + 1


def test_numbers_of_any_python_type_are_one_program() -> None:
    slopes = alibi(np.full(4, 0.5, np.float32))
    attention(Q, K, V, bias=slopes, scale=1.0, softcap=2.0)
    before = attend._cache_size()
    attention(Q, K, V, bias=slopes, scale=1, softcap=2)
    assert attend._cache_size() == before
    wide = attention(Q, K, V, softcap=2**60)
    np.testing.assert_allclose(wide, attention(Q, K, V), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"scale": 0.5},
        {"layout": "bshd"},
        {"return_lse": True},
        {"backend": "math"},
        {"mask": full()},
        {"dtype": "bfloat16"},
        {"q_len": 3},
        {"kv_heads": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_call_that_differs_in_one_point_is_another_call(other: dict[str, Any]) -> None:
    options = dict(other)
    dtype, q_len, kv = options.pop("dtype", "float32"), options.pop("q_len", S), options.pop("kv_heads", 4)
    arrays = Q[:, :, :q_len].astype(dtype), K[:, :kv].astype(dtype), V[:, :kv].astype(dtype)
    asked = {"mask": causal(), **options}
    attention(Q, K, V, mask=causal())
    got = [attention(*arrays, **asked) for _ in range(2)]
    step = jax.jit(lambda q, k, v: attention(q, k, v, **asked))
    for found in got:
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(step(*arrays)), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype


def test_a_wrong_call_raises_after_a_right_call_with_the_same_mask() -> None:
    mask = causal()
    attention(Q, K, V, mask=mask)
    for wrong in (K[:, :3], K[..., :4], K.astype("float16")):
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match="expected"):
                attention(Q, wrong, V, mask=mask)
