"""Settings of JAX by which careful users find mistakes in their own code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import everything

from attnspan import Mask, alibi, causal, from_predicate, key_padding, keys, reference, segments
from attnspan.jax import attention, dot_product_attention

# Inside of a block that sets one, a setting could not be restored: a config reads as the block says.
pytestmark = pytest.mark.below_promotion

Q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 6, 8)), jnp.float32)
IDS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2]])
MASKS: dict[str, Mask] = {
    "segments": causal() & segments(IDS),
    "keys": keys(jnp.asarray(IDS) < 2),
    "padding": key_padding(jnp.array([3, 6])),
    "predicate": from_predicate(lambda _, __, q, k: q >= k),
}
BACKENDS = (None, *(pytest.param(name, marks=pytest.mark.long) for name in ("math", "xla")))
SETTINGS = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_enable_checks": True,
}


@pytest.fixture(params=["all", *(SETTINGS if everything() else ())])
def setting(request):
    names = SETTINGS if request.param == "all" else [request.param]
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, SETTINGS[name])
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [None, *(pytest.param(x, marks=pytest.mark.long) for x in ("math", "xla"))]
)
def test_calls_have_their_values_under_each_setting(setting, backend):
    given = {"bias": alibi(jnp.ones(4)), "dropout_p": 0.3, "softcap": 5.0, "backend": backend}

    @jax.jit
    def loss(q, sinks):
        outs = [attention(q, q, q, mask=mask, backend=backend) for mask in MASKS.values()]
        other = attention(q, q, q, dropout_seed=jax.random.key(3), sinks=sinks, **given)
        return sum((out * out).sum() for out in outs) + other.sum(), outs

    grads, outs = jax.grad(loss, (0, 1), has_aux=True)(Q, jnp.ones(4))
    for out, mask in zip(outs, MASKS.values(), strict=True):
        bounds = mask.prepare(6, 6, batch=2).lowered.bounds
        assert np.abs(np.asarray(out) - reference.forward(Q, Q, Q, bounds, 8**-0.5)[0]).max() < 2e-6
    assert all(np.isfinite(np.asarray(x)).all() and np.abs(np.asarray(x)).max() > 0.1 for x in grads)


@pytest.mark.slow
def test_the_drop_in_vmap_and_spans_under_each_setting(setting):
    x = Q.swapaxes(1, 2)
    ours = jax.vmap(lambda x: dot_product_attention(x, x, x, is_causal=True))(x)
    np.testing.assert_allclose(ours, dot_product_attention(x, x, x, is_causal=True), atol=2e-6)
    found = jax.jit(lambda lengths: key_padding(lengths).spans(2, 3, batch=2).dense())(jnp.array([1, 3]))
    assert found[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]
