"""The same lowering in JAX, eager and under jit."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

import numpy as np
import pytest
from mask_samples import BATCH, IDS, KEYS, SAMPLES

import attnspan as a

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _pytrees():
    a.masks.register_pytrees(
        lambda cls, flatten, unflatten: jax.tree_util.register_pytree_node(
            cls, flatten, lambda context, children: unflatten(children, context)
        )
    )


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_eager_and_jit_give_numpys_spans(sample):
    q_len = 7
    want = sample.mask().spans(q_len, KEYS, batch=BATCH).bounds
    mask = sample.mask(jnp.asarray)
    eager = mask.spans(q_len, KEYS, batch=BATCH, like=jnp.zeros(1)).bounds
    assert isinstance(eager, jax.Array)
    np.testing.assert_array_equal(eager, want)
    lowered = jax.jit(lambda mask, like: mask.spans(q_len, KEYS, batch=BATCH, like=like))(mask, jnp.zeros(1))
    spans = a.Spans(lowered.bounds, KEYS)
    # Offsets shared by two masks are two arguments under jit, so R may be larger there: compare what is seen.
    np.testing.assert_array_equal(spans.compact().bounds, a.Spans(want, KEYS).compact().bounds)


def test_spans_arithmetic():
    spans, want = (
        (a.causal() & (a.window(2) | a.global_keys(1))).spans(9, 9, like=like)
        for like in (jnp.zeros(1), None)
    )
    for name, arguments in (
        ("dense", ()),
        ("cost", ()),
        ("block_states", (2, 3)),
        ("block_ranges", (2, 3)),
    ):
        np.testing.assert_array_equal(getattr(spans, name)(*arguments), getattr(want, name)(*arguments))
    keys = np.array([0, 3, 4, 8])
    taken, wanted = (x.take_keys(keys).take_queries(keys).compact() for x in (spans, want))
    np.testing.assert_array_equal(taken.bounds, wanted.bounds)
    assert spans.coverage() == want.coverage()


def test_broken_promises_are_illegal_under_jit():
    ids = jnp.array([1, 0, 1, 2])
    bounds = jax.jit(lambda ids: (a.causal() & a.segments(ids)).spans(4, 4).bounds)(ids)
    assert (bounds == jnp.array([0, -1])).all(-1)[0, 0, :, 0].tolist() == [True, False, True, False]


def test_masks_from_data_are_prepared_outside():
    mask = a.from_predicate(lambda b, h, q, k: q >= k)
    with pytest.raises(ValueError, match=r"mask\.prepare"):
        jax.jit(lambda like: mask.spans(3, 3, like=like).bounds)(jnp.zeros(1))
    prepared = mask.prepare(3, 3, like=jnp.zeros(1))
    bounds = jax.jit(lambda mask: (mask & a.global_keys(2)).spans(3, 3).bounds)(prepared)
    assert bounds[0, 0, :, 0].tolist() == [[0, 1], [0, 2], [0, 2]]
