"""The cases of JAX's own tests of `jax.nn.dot_product_attention`, written anew: ours beside theirs.

Theirs vary the dtype, groups of heads, vmap, masks alone and combined, batch axes, and gradients of a bias of
every shape that broadcasts. Each case compares the output and the gradients of all inputs.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from attnspan.jax import dot_product_attention  # noqa: E402

theirs = jax.nn.dot_product_attention
BATCH, QUERIES, KEYS, HEADS, WIDTH = 4, 32, 48, 4, 16
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def _normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _inputs(
    dtype: Any = jnp.float32, group: int = 1, keys: int = KEYS, lead: tuple[int, ...] = (BATCH,)
) -> Any:
    lengths, heads = (QUERIES, keys, keys), (HEADS, HEADS // group, HEADS // group)
    return [
        _normal(i, *lead, n, h, WIDTH, dtype=dtype)
        for i, (n, h) in enumerate(zip(lengths, heads, strict=True))
    ]


@cache
def _program(fn: Any) -> Any:
    """The output and the gradients."""

    def both(*arrays: Any) -> Any:
        out, back = jax.vjp(fn, *arrays)
        return out, *back(jnp.ones_like(out))

    return jax.jit(both)


def _run(fn: Any, arrays: Any, dtype: Any) -> Any:
    """In float32, as JAX's test of low precisions reads them."""
    found = _program(fn)(*(x.astype(dtype) for x in arrays))
    return [np.asarray(x).astype(np.float32) for x in found]


def _compare(
    arrays: Any,
    dtype: Any = jnp.float32,
    ours: Any = dot_product_attention,
    peer: Any = theirs,
    **options: Any,
) -> None:
    if options:
        ours, peer = (partial(fn, **options) for fn in (ours, peer))
    found = _run(ours, arrays, dtype)
    exact = _run(peer, arrays, jnp.float32)
    # JAX's function does not run in float16 on a CPU.
    peers = _run(peer, arrays, jnp.bfloat16 if dtype == jnp.float16 else dtype)
    size = max(float(np.linalg.norm(x)) for x in exact)  # the gradient of a bias that all keys share is 0
    for got, other, wanted in zip(found, peers, exact, strict=True):
        error, of_peer = (float(np.linalg.norm(x - wanted)) for x in (got, other))
        of_peer /= 8 if dtype == jnp.float16 else 1
        # In float32 the peer is exact by definition: the bound is that of the errors of two kernels.
        assert error <= max(1.5 * of_peer, 2e-6 * size)


MAPPED = jax.vmap(theirs)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("implementation", [None, "cpu", "xla", "math"])
def test_groups_of_heads(dtype: Any, group: int, mapped: bool, implementation: str | None) -> None:
    ours = partial(dot_product_attention, implementation=implementation)
    fns = (jax.vmap(ours), MAPPED) if mapped else (ours, theirs)
    _compare(_inputs(dtype, group), dtype, *fns)


LENGTHS = {
    "query_seq_lengths": jnp.asarray([32, 5, 17, 1]),
    "key_value_seq_lengths": jnp.asarray([48, 9, 31, 2]),
}
CUSTOM = jnp.asarray((_normal(9, BATCH, HEADS, QUERIES, KEYS) > 0) | (np.arange(KEYS) == 0))
MODES: dict[str, dict[str, Any]] = {
    "bias": {"bias": jnp.asarray(_normal(5, BATCH, HEADS, QUERIES, KEYS))},
    "causal": {"is_causal": True},
    "padding": LENGTHS,
    "custom": {"mask": CUSTOM},
    "sliding window": {"local_window_size": (5, 3)},
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("second", [None, *MODES])
@pytest.mark.parametrize("first", MODES)
def test_masks_alone_and_combined(first: str, second: str | None) -> None:
    """Rows that are padding, or that two masks leave nothing, are left out: theirs are means there."""
    options = {**MODES[first], **MODES.get(second or first, {})}
    arrays = _inputs()
    lse = jax.jit(partial(dot_product_attention, **options, return_residual=True))(*arrays)[1]
    kept = (np.asarray(lse) > -np.inf).astype(np.float32)[..., None]

    def seen(fn: Any) -> Any:
        return lambda *x, **more: fn(*x, **more) * kept

    _compare(arrays, jnp.float32, seen(dot_product_attention), seen(theirs), **options)


BIASES = [(b, h, q, k) for b in (1, BATCH) for h in (1, HEADS) for q in (1, QUERIES) for k in (1, KEYS)]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_of_a_bias_that_broadcasts(shape: tuple[int, ...], mapped: bool) -> None:
    bias = _normal(6, *shape)

    def call(fn: Any) -> Any:
        return lambda q, k, v, b: fn(q, k, v, b, is_causal=True)

    fns = [call(fn) for fn in (dot_product_attention, theirs)]
    q, k, v = _inputs()
    if mapped:  # over heads of the bias and the queries, with shared keys
        q, bias = np.stack([q, 2 * q, -q]), np.stack([bias, -bias, bias / 2])
        fns = [jax.vmap(fn, (0, None, None, 0)) for fn in fns]
    _compare([q, k, v, bias], jnp.float32, *fns)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_scales_odd_lengths_and_no_batch_axis(dtype: Any) -> None:
    for scale in (0.0, -0.3, 4.0) if dtype == jnp.float32 else ():
        _compare(_inputs(), scale=scale)
    for causal in (False, True):
        _compare(_inputs(dtype, lead=()), dtype, is_causal=causal)
        for queries, keys in ((1, 48), (33, 1), (130, 257)) if dtype == jnp.float32 else ():
            q, k = _normal(0, 2, queries, 2, 8), _normal(1, 2, keys, 2, 8)
            _compare([q, k, k], is_causal=causal)
