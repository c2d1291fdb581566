"""Masks whose arrays a jitted function closes over: lowered while it is traced, so that XLA folds nothing."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnspan as a  # noqa: E402
from attnspan.jax import attention  # noqa: E402
from attnspan.library import per_head  # noqa: E402

LENGTH = 40
Q = jax.random.normal(jax.random.key(0), (2, 2, LENGTH, 8))
IDS = np.arange(LENGTH)[None] // np.array([[7], [15]])
STRIPES = np.broadcast_to(np.arange(LENGTH) % 4 < 2, (LENGTH, LENGTH))  # 10 runs in each row
INDEX = np.arange(0, 2 * LENGTH, 2)

MASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "segments": (lambda xp: a.causal() & a.segments(xp.asarray(IDS)), {}),
    "documents": (lambda xp: a.causal() & a.documents(xp.asarray([0, 9, LENGTH])), {}),
    "key_padding": (lambda xp: a.window(5) & a.key_padding(xp.asarray([33, 8])), {}),
    "keys": (lambda xp: a.causal() & a.keys(xp.asarray(STRIPES[0])), {}),
    "from_dense": (lambda xp: a.from_dense(xp.asarray(STRIPES)), {}),
    "spans": (lambda xp: a.spans(xp.asarray(a.window(5).spans(LENGTH, LENGTH).bounds)) & a.causal(), {}),
    "indices": (lambda xp: a.window(5), {"q_index": INDEX, "k_index": INDEX}),
}


def _names(program: Any) -> list[str]:
    return [equation.primitive.name for equation in program.jaxpr.eqns]


@pytest.mark.parametrize("xp", [jnp, np], ids=["jax", "numpy"])
@pytest.mark.parametrize("case", MASKS)
def test_the_program_is_that_of_a_prepared_mask(case: str, xp: Any) -> None:
    make, indices = MASKS[case]
    mask = make(xp)
    prepared = make(np).prepare(LENGTH, LENGTH, batch=2, **indices)
    given = {name: xp.asarray(x) for name, x in indices.items()}
    step = jax.jit(lambda q: attention(q, q, q, mask=mask, **given))
    known = jax.make_jaxpr(lambda q: attention(q, q, q, mask=prepared))(Q)
    assert _names(jax.make_jaxpr(lambda q: attention(q, q, q, mask=mask, **given))(Q)) == _names(known)
    np.testing.assert_array_equal(step(Q), attention(Q, Q, Q, mask=prepared))


def test_wrong_data_raises_while_it_is_traced() -> None:
    lengths = jnp.array([LENGTH, LENGTH + 1])
    with pytest.raises(ValueError, match=f"key_padding: lengths: expected .* at most {LENGTH}"):
        jax.eval_shape(lambda q: attention(q, q, q, mask=a.key_padding(lengths)), Q)


@pytest.mark.slow
def test_derivatives_and_vmap() -> None:
    mask = a.causal() & a.segments(jnp.asarray(IDS))
    prepared = mask.prepare(LENGTH, LENGTH, batch=2)

    def steps(mask: Any) -> Any:
        def loss(q: Any) -> Any:
            return (attention(q, q, q, mask=mask) ** 2).sum()

        return jax.grad(loss)(Q), jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([Q, 2 * Q]))

    for got, wanted in zip(steps(mask), steps(prepared), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_only_arrays_that_are_all_known_are_read() -> None:
    """An argument next to what is closed over, a function within a mask of masks, a class of a user."""
    same = IDS[:1] // 2

    class own(a.Mask):
        ids: Any

        def _lower(self, low: Any) -> Any:
            assert isinstance(self.ids, jax.Array)
            return low.lower(a.segments(self.ids))

    @jax.jit
    def results(q: Any, ids: Any) -> Any:
        masks = [
            a.segments(jnp.asarray(IDS)) & a.segments(ids),
            per_head([a.from_predicate(lambda b, h, i, j: ids[0, i] == ids[0, j]), a.segments(same)]),
            own(jnp.asarray(same)),
        ]
        return [attention(q, q, q, mask=mask) for mask in masks]

    whole = a.segments(same)
    wanted = [a.segments(IDS) & whole, whole, whole]
    for got, mask in zip(results(Q, jnp.asarray(same)), wanted, strict=True):
        np.testing.assert_allclose(got, attention(Q, Q, Q, mask=mask), atol=1e-6)
