"""flax's attention modules with `attention_fn`: their own results, gradients, masks, dropout and caches."""

from functools import partial

import pytest

flax = pytest.importorskip("flax")
jax = pytest.importorskip("jax")

import numpy as np  # noqa: E402
from closeness import error  # noqa: E402
from flax import linen, nnx  # noqa: E402

from attnspan import (  # noqa: E402
    alibi,
    alibi_slopes,
    causal,
    full,
    key_padding,
    relative,
    segments,
    window,
)
from attnspan import keys as key_mask  # noqa: E402
from attnspan.jax import attention_fn  # noqa: E402

jnp = jax.numpy
BATCH, LENGTH, HEADS, WIDTH = 2, 10, 4, 32
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
CHUNKS = jnp.asarray([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3])
TRIANGLE = linen.make_causal_mask(X[..., 0])
MASKS = {
    "none": None,
    "causal, floats": TRIANGLE,
    "causal, booleans": TRIANGLE.astype(bool),
    "padding": linen.make_attention_mask(
        jnp.ones((BATCH, LENGTH)), jnp.arange(LENGTH) < jnp.asarray([[4], [9]])
    ),
    "packed": linen.combine_masks(linen.make_attention_mask(CHUNKS, CHUNKS, jnp.equal), TRIANGLE),
    "each head": jnp.stack([jnp.tril(jnp.ones((LENGTH, LENGTH)), h) for h in range(HEADS)])[None],
}


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def _nnx(fn, **options):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), attention_fn=fn, **options)


def _close(got, wanted):
    """One norm over all leaves: the gradient of the keys' bias is 0, but for rounding."""
    got, wanted = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (got, wanted))
    assert error(got, wanted) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, long(True)])
def test_nnx_computes_what_it_did(is_causal):
    """Under all masks, in one program."""

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            return sum((model(x, mask=mask, is_causal=is_causal) ** 2).sum() for mask in MASKS.values())

        return nnx.value_and_grad(loss, argnums=(0, 1))(model, x)

    ours, theirs = (step(_nnx(fn), X) for fn in (attention_fn, nnx.dot_product_attention))
    _close(jax.tree.leaves(ours), jax.tree.leaves(theirs))


@pytest.mark.slow
def test_linen_computes_what_it_did():
    ours, theirs = (
        linen.MultiHeadDotProductAttention(HEADS, attention_fn=fn)
        for fn in (attention_fn, linen.dot_product_attention)
    )
    weights = theirs.init(jax.random.key(1), X)

    def step(layer):
        def loss(w, x):
            return sum((layer.apply(w, x, mask=mask) ** 2).sum() for mask in MASKS.values())

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, X)

    _close(step(ours), step(theirs))


@pytest.mark.slow
def test_masks_of_ours_go_where_arrays_went():
    _close(
        _nnx(attention_fn)(X, mask=causal() & segments(CHUNKS)),
        _nnx(nnx.dot_product_attention)(X, mask=MASKS["packed"]),
    )
    lengths = jnp.asarray([4, 9])
    layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    weights = layer.init(jax.random.key(1), X)
    _close(layer.apply(weights, X, mask=key_padding(lengths)), layer.apply(weights, X, mask=MASKS["padding"]))


def _linen(*arrays, **given):
    with jax.numpy_rank_promotion("allow"):  # as linen's own needs
        return linen.dot_product_attention(*arrays, **given)


@pytest.mark.slow
@pytest.mark.parametrize("lead", [(), (2, 3), *map(long, [(3,), (1, 1)])])
def test_any_batch_axes(lead):
    q, k, v = (jax.random.normal(jax.random.key(i), (*lead, n, HEADS, 8)) for i, n in enumerate((5, 7, 7)))
    bias = jax.random.normal(jax.random.key(3), (*lead[-1:], 1, 5, 7))
    mask = jax.random.bernoulli(jax.random.key(4), 0.7, (*lead, HEADS, 5, 7)).at[..., 0].set(True)
    given = [{"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask}, {"mask": mask[..., :1, :]}]
    ours = jax.jit(lambda: [attention_fn(q, k, v, **x) for x in (*given, {"is_causal": True})])
    theirs = jax.jit(lambda: [_linen(q, k, v, **x) for x in (*given, {"mask": jnp.tril(jnp.ones((5, 7)))})])
    for got, wanted in zip(ours(), theirs(), strict=True):
        _close(got, wanted)


def _weights(rng, **options):
    """The weights of 64 keys, which all would be 1 / 64: (batch, heads, queries, keys)."""
    q = jnp.zeros((2, 16, 3, 64))
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None], (2, 64, 3, 64))
    k = jnp.zeros((2, 64, 3, 64))
    return attention_fn(q, k, v, dropout_rng=rng, dropout_rate=0.25, **options).transpose(0, 2, 1, 3)


KEYS = {
    "typed": lambda seed: jax.random.key(seed),
    "raw": lambda seed: jax.random.PRNGKey(seed),
    "four words": lambda seed: jax.random.key(seed, impl="rbg"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", [KEYS["typed"], *map(long, list(KEYS.values())[1:])], ids=KEYS)
def test_dropout(key):
    shared, own = _weights(key(0)), _weights(key(0), broadcast_dropout=False)
    for weights in (shared, own):
        dropped = weights == 0
        np.testing.assert_allclose(weights[~dropped], 1 / 64 / 0.75, rtol=1e-5)
        assert abs(dropped.mean() - 0.25) < (0.06 if weights is shared else 0.03)
    assert (shared == shared[:1, :1]).all()
    pairs = [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((1, 1), (0, 2))]
    assert all((own[a] != own[b]).any() for a, b in pairs)
    assert (_weights(key(0)) == shared).all()
    assert (_weights(key(1)) != shared).any()
    assert (_weights(None, deterministic=True) == 1 / 64).all()


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [False, long(True)])
def test_modules_draw_keys(broadcast):
    model = _nnx(attention_fn, dropout_rate=0.5, broadcast_dropout=broadcast)
    first, second = model(X, deterministic=False), model(X, deterministic=False)
    assert (first != second).any()
    assert (model(X, deterministic=True) == model(X, deterministic=True)).all()
    layer = linen.MultiHeadDotProductAttention(
        HEADS, dropout_rate=0.5, attention_fn=attention_fn, broadcast_dropout=broadcast, deterministic=False
    )
    weights = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    a, b = (layer.apply(weights, X, rngs={"dropout": jax.random.key(i)}) for i in (1, 2))
    assert (a != b).any()


@pytest.mark.slow
def test_decoding_with_the_modules_cache():
    outs = []
    for fn in (attention_fn, nnx.dot_product_attention):
        model = _nnx(fn)
        model.init_cache((BATCH, LENGTH, WIDTH))
        outs.append(jnp.stack([model(X[:, i : i + 1], decode=True)[:, 0] for i in range(4)], 1))
    _close(*outs)
    _close(outs[0], _nnx(attention_fn)(X[:, :4], is_causal=True))


def _decoded(fn, **given):
    model = _nnx(fn)
    model.init_cache((BATCH, LENGTH, WIDTH))
    step = nnx.jit(lambda model, x: model(x, decode=True, **given)[:, 0])
    return jnp.stack([step(model, X[:, i : i + 1]) for i in range(LENGTH)], 1)


@pytest.mark.slow
def test_decoding_is_causal_up_to_the_cache():
    _close(_decoded(attention_fn, is_causal=True), _nnx(nnx.dot_product_attention)(X, is_causal=True))


LAYER_MASKS = {
    "window": (causal() & window(2), {}),
    "packed": (causal() & segments(CHUNKS), {"is_causal": True}),
    "next to an array": (window(2), {"mask": jnp.arange(LENGTH)[None, None, None] != 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["next to an array", *map(long, list(LAYER_MASKS)[:2])])
def test_a_mask_of_the_layer_in_training_and_decoding(case):
    mask, given = LAYER_MASKS[case]
    whole = mask & causal() & (key_mask(given["mask"][0, 0]) if "mask" in given else full())
    wanted = _nnx(attention_fn)(X, mask=whole)
    fn = partial(attention_fn, layer_mask=mask)
    _close(_decoded(fn, **given), wanted)
    _close(_nnx(fn)(X, **{"is_causal": True, **given}), wanted)


@pytest.mark.slow
def test_the_cache_of_linen_takes_a_mask_of_the_layer():
    fn = partial(attention_fn, layer_mask=causal() & window(2))
    layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=fn, decode=True)
    variables = layer.init(jax.random.key(1), X)
    weights, outs = {"params": variables["params"]}, []
    for i in range(4):
        out, variables = layer.apply({**variables, **weights}, X[:, i : i + 1], mutable=["cache"])
        outs.append(out[:, 0])
    whole = linen.MultiHeadDotProductAttention(HEADS, attention_fn=linen.dot_product_attention)
    near = (TRIANGLE - jnp.tril(TRIANGLE, -3))[:1]
    _close(jnp.stack(outs, 1), whole.apply(weights, X, mask=near)[:, :4])


SLOPES = jnp.asarray(alibi_slopes(HEADS))
TABLE = SLOPES[:, None] * jnp.arange(
    -LENGTH, LENGTH + 1
)  # equal to the slopes' bias for keys before the query


@pytest.mark.slow
@pytest.mark.parametrize("bias", [alibi(SLOPES), long(relative(TABLE))], ids=["alibi", "relative"])
def test_a_bias_of_the_layer_in_training_and_decoding(bias):
    positions = jnp.arange(LENGTH)
    dense = -SLOPES[:, None, None] * abs(positions[:, None] - positions[None])[None]
    wanted = _nnx(partial(nnx.dot_product_attention, bias=dense[None]))(X, mask=TRIANGLE)
    fn = partial(attention_fn, bias=bias)
    _close(_nnx(fn)(X, is_causal=True), wanted)
    _close(_decoded(fn, is_causal=True), wanted)


@pytest.mark.parametrize("mask", [window(2), causal().prepare(1, LENGTH)], ids=repr)
def test_masks_that_modules_combine_with_arrays_are_refused(mask):
    with pytest.raises(
        AttributeError,
        match=r"an array, got a mask of attnspan\. Pass the mask to the layer: .*layer_mask=mask",
    ):
        _decoded(attention_fn, mask=mask)
    assert not hasattr(mask, "ndim")


@pytest.mark.slow
def test_dtypes_and_shared_key_heads():
    q = X.reshape(BATCH, LENGTH, HEADS, 8)
    _close(attention_fn(q, q[:, :, :2], q[:, :, 2:]), nnx.dot_product_attention(q, q[:, :, :2], q[:, :, 2:]))
    assert attention_fn(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(q.astype(jnp.bfloat16), q, q).dtype == jnp.float32
    low = _nnx(attention_fn, dtype=jnp.bfloat16, param_dtype=jnp.float32)(X)
    np.testing.assert_allclose(low, _nnx(nnx.dot_product_attention)(X), atol=3e-2)


def test_what_needs_stored_weights_is_refused():
    with pytest.raises(ValueError, match=r"sow weights in\. Call the module without sow_weights=True"):
        _nnx(attention_fn)(X, sow_weights=True)
    layer = linen.MultiHeadDotProductAttention(
        HEADS, attention_fn=attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(ValueError, match=r"got \['qk'\]\. Leave quantised layers"):
        layer.init(jax.random.key(0), X)
    q = jnp.ones((2, 3, 4, 8))
    with pytest.raises(ValueError, match=r"a key where dropout_rate > 0, got None\. Pass a key"):
        attention_fn(q, q, q, dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"key: expected \(\*\(2,\), length"):
        attention_fn(q, q[0], q)
    with pytest.raises(ValueError, match=r"batch axes that broadcast to \(2,\).*got \(3,\)"):
        attention_fn(q, q, q, bias=jnp.ones((3, 1, 3, 3)))
    with pytest.raises(ValueError, match=r"that broadcasts to \(B, N, T, S\) = \(2, 4, 3, 3\)"):
        attention_fn(q, q, q, mask=jnp.ones((2, 1, 5, 5)))
