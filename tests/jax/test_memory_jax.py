"""Masks that eager calls of JAX lower once: the memory never returns old values, and holds no tracer."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from attnspan import Spans, alibi, causal, from_predicate, segments, window  # noqa: E402
from attnspan.jax import attention  # noqa: E402
from attnspan.jax.lowering import _memory  # noqa: E402

S = 16
Q, K, V = (jax.random.normal(jax.random.key(i), (2, 4, S, 8)) for i in range(3))


def _ids() -> np.ndarray[Any, Any]:
    return np.tile(np.arange(S) // 5, (2, 1))


def _run(mask: Any, **options: Any) -> np.ndarray[Any, Any]:
    return np.asarray(attention(Q, K, V, mask=mask, **options))


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_calls_share_one_lowering(xp: Any) -> None:
    gc.collect()
    mask, before = causal() & segments(xp.asarray(_ids())), len(_memory._masks)
    first = _run(mask)
    for _ in range(3):
        np.testing.assert_array_equal(_run(mask), first)
    assert len(_memory._masks) == before + 1


def test_writing_into_an_array_of_numpy_lowers_again() -> None:
    ids = _ids()
    mask = causal() & segments(ids)
    before = _run(mask)
    for first in (9, 3):
        ids[1, first:] = 7
        wanted = _run(causal() & segments(jnp.asarray(ids.copy())))
        np.testing.assert_array_equal(_run(mask), wanted)
        assert not np.array_equal(wanted, before)
        before = wanted
    ids[1, [3, 5]] = 99  # an id in two runs
    with pytest.raises(ValueError, match="query 3"):
        _run(mask)


@pytest.mark.slow
def test_a_write_after_the_call_changes_neither_the_output_nor_the_gradient() -> None:
    bounds = np.array(causal().spans(S, S).lowered.bounds)
    for mask, array in ((Spans(bounds, S), bounds), (segments(ids := _ids()), ids)):
        wanted, step = jax.vjp(lambda q, mask=mask: attention(q, K, V, mask=mask), Q)
        out, wanted = np.array(wanted), np.array(step(Q)[0])
        got, step = jax.vjp(lambda q, mask=mask: attention(q, K, V, mask=mask), Q)
        array[...] = 0
        np.testing.assert_array_equal(got, out)
        np.testing.assert_array_equal(step(Q)[0], wanted)


def test_a_mask_with_the_number_of_a_dead_mask_is_another_mask() -> None:
    numbers = set()
    for n in range(40):
        mask = segments((np.arange(S) + n) // 5)
        numbers.add(id(mask))
        wanted = mask.prepare(S, S)
        np.testing.assert_array_equal(_run(mask), _run(wanted))
        del mask
    assert len(numbers) < 40
    gc.collect()
    assert all(reference() is not None for reference, _ in _memory._masks.values())


@pytest.mark.slow
def test_sizes_are_part_of_the_key() -> None:
    mask = causal() & segments(jnp.asarray(np.arange(S) // 5))
    for q, k in ((Q, K), (Q[:, :, :3], K), (Q[:1], K[:1]), (Q, K)):
        got = attention(q, k, k, mask=mask)
        wanted = mask.prepare(q.shape[2], S, batch=q.shape[0])
        np.testing.assert_array_equal(got, attention(q, k, k, mask=wanted))
    with pytest.raises(ValueError, match="segments"):
        attention(Q[:, :, :3], K[:, :, :3], V[:, :, :3], mask=mask)


@pytest.mark.slow
def test_no_tracer_is_remembered() -> None:
    ids, kept, closed = jnp.asarray(_ids()), [], segments(jnp.asarray(_ids()))

    def step(q: Any, ids: Any) -> Any:
        mask = causal() & segments(ids)
        kept.append(mask)
        return attention(q, K, V, mask=mask) + attention(Q, K, V, mask=mask) + attention(Q, K, V, mask=closed)

    wanted = step(Q, ids)
    np.testing.assert_allclose(jax.jit(step)(Q, ids), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(step, (None, 0))(Q, jnp.stack([ids, ids]))[1], wanted, rtol=1e-5, atol=1e-6
    )
    jax.grad(lambda q: step(q, ids).sum())(Q)
    known = [one.lowered for _, known in _memory._masks.values() for one in known]
    for mask in (*known, *_memory._static.values()):
        assert type(mask.lowered.bounds) is np.ndarray
    np.testing.assert_array_equal(step(Q, ids), wanted)


def test_threads_share_the_memory() -> None:
    ids, errors = [np.arange(S) // (1 + n) for n in range(5)], []
    masks = [causal() & segments(x) for x in ids]
    wanted = [_run(mask.prepare(S, S)) for mask in masks]

    def step(start: int) -> None:
        try:
            for n in range(60):
                at = (start + n) % len(masks)
                np.testing.assert_array_equal(_run(masks[at]), wanted[at])
                _run(window(start + n))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=step, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(_memory._static) <= 16


@pytest.mark.slow
def test_functions_are_not_remembered() -> None:
    limit = [3]
    mask = from_predicate(lambda b, h, i, j: j < limit[0])  # noqa: ARG005
    before = _run(mask)
    limit[0] = 5
    assert not np.array_equal(_run(mask), before)


@pytest.mark.slow
def test_options_by_position_read_the_indices_of_a_remembered_mask() -> None:
    mask, bias = segments(jnp.asarray(_ids())), alibi(np.full(4, 0.5, np.float32))
    wanted = _run(mask.prepare(S, S, batch=2), bias=bias)
    for _ in range(2):
        np.testing.assert_array_equal(_run(mask, bias=bias), wanted)
