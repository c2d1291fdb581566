"""The same lowering in JAX, eager and under jit."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

import numpy as np
import pytest
from covering import everything, few
from samples.library import LIBRARY
from samples.masks import SAMPLES

import attnspan as a

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytest.importorskip("attnspan.jax")  # registers the masks
pytestmark = pytest.mark.slow


Q_LEN = 7
BY_DATA = {"reordered", "tiled_natten", "morton_natten", "tree"}  # A tree's depth decides R too.
# One of each function of the library: a compilation takes a while.
LAST = {sample.function: sample for sample in LIBRARY}
TRACED = [*SAMPLES, *(sample for name, sample in LAST.items() if name not in BY_DATA)]
EAGER = few(SAMPLES, 5)  # each operation is a program of its own
EAGER += [LAST[name] for name in sorted(BY_DATA)] if everything() else []


def _array(x):
    return jnp.asarray(x if x.dtype == bool else x.astype(np.int32))


def _lower(masks, samples, like, rows):
    return [
        mask.spans(
            Q_LEN, sample.keys, like=like, **sample.sizes, **({} if sample in SAMPLES else {"q_index": rows})
        ).bounds
        for mask, sample in zip(masks, samples, strict=True)
    ]


def _numpys(samples):
    return _lower([sample.mask() for sample in samples], samples, None, np.arange(Q_LEN))


def test_eager_gives_numpys_spans():
    found = _lower([sample.mask(_array) for sample in EAGER], EAGER, jnp.zeros(1), jnp.arange(Q_LEN))
    for sample, got, want in zip(EAGER, found, _numpys(EAGER), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want, err_msg=sample.name)


@pytest.mark.parametrize("way", WAYS := ["an argument", "holds NumPy's", "holds JAX's"])
def test_jit_gives_numpys_spans(way):
    # One program for all; in the ordinary run each sample goes one way.
    samples = TRACED if everything() else TRACED[WAYS.index(way) :: 3]
    masks = [sample.mask(np.asarray if way == "holds NumPy's" else _array) for sample in samples]
    given = jnp.zeros(1), jnp.arange(Q_LEN)
    if way == "an argument":
        found = jax.jit(lambda masks, *given: _lower(masks, samples, *given))(masks, *given)
    else:
        found = jax.jit(lambda *given: _lower(masks, samples, *given))(*given)
    for sample, got, want in zip(samples, found, _numpys(samples), strict=True):
        # Offsets shared by two masks are two arguments under jit, so R may be larger there.
        seen, wanted = (np.asarray(a.Spans(x, sample.keys).compact().bounds) for x in (np.asarray(got), want))
        np.testing.assert_array_equal(seen, wanted, err_msg=sample.name)


def test_spans_arithmetic():
    want = (a.causal() & (a.window(2) | a.global_keys(1))).spans(9, 9)
    spans, keys = a.Spans(jnp.asarray(want.bounds), 9), np.array([0, 3, 4, 8])

    def arrays(spans):
        taken = spans.take_keys(keys).take_queries(keys).dense()
        return spans.dense(), spans.cost(), spans.block_states(2, 3), taken

    for got, right in zip(jax.jit(arrays)(spans), arrays(want), strict=True):
        np.testing.assert_array_equal(got, right)
    assert spans.coverage() == want.coverage()


def _is_illegal(bounds):
    return (np.asarray(bounds) == np.array([0, -1])).all((-1, -2))[0, 0].tolist()


def test_broken_promises_are_illegal_under_jit():
    ids = jnp.array([1, 0, 1, 2])
    bounds = jax.jit(lambda ids: (a.causal() & a.segments(ids)).spans(4, 4).bounds)(ids)
    assert _is_illegal(bounds) == [True, False, True, False]


def test_masks_from_booleans_are_encoded_under_jit():
    @jax.jit
    def lower(ids):
        of_values = a.from_predicate(lambda b, h, q, k: ids[q] == ids[k], 3)
        masks = of_values, a.from_dense(ids[:, None] == ids[None], 3)
        return [(a.causal() & mask).spans(12, 12, like=ids).bounds for mask in masks]

    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, 2, 12) + np.arange(12) // 4 * 2
        for bounds in lower(jnp.asarray(ids)):
            assert bounds.shape == (1, 1, 12, 3, 2)
            want = (ids[:, None] == ids) & np.tri(12, dtype=bool)
            np.testing.assert_array_equal(a.Spans(bounds, 12).dense()[0, 0], want)
    assert lower._cache_size() == 1


def test_too_many_runs_are_illegal_under_jit():
    visible = jnp.array([[True, False] * 6, [True] * 12, [False] * 11 + [True]])

    @jax.jit
    def lower(x):
        few, some, exact = (a.from_dense(x, max_runs=runs).spans(3, 12).bounds for runs in (5, None, 6))
        return few, some, exact, a.from_dense(x[:, :0]).spans(3, 0).bounds

    few, some, exact, nothing = lower(visible)
    assert _is_illegal(few) == [True, False, False]
    assert some.shape[3] == 8
    np.testing.assert_array_equal(a.Spans(exact, 12).dense()[0, 0], visible)
    assert not nothing.any()


def test_a_predicate_whose_arrays_are_traced_needs_indices_of_their_kind():
    lower = jax.jit(lambda ids: a.from_predicate(lambda b, h, q, k: ids[q] == ids[k]).spans(12, 12).bounds)
    with pytest.raises(ValueError, match=r"got numpy indices and a traced jax result\. Pass like="):
        lower(jnp.zeros(12))


@pytest.mark.parametrize(
    "fn",
    [lambda b, h, q, k: q > k and k > 2, lambda b, h, q, k: k > 0 if (q > k).any() else k > 1],
    ids=["and", "if"],
)
def test_what_a_predicate_raises_under_jit_has_its_name(fn):
    mask = a.from_predicate(fn)
    with pytest.raises(ValueError, match=r"from_predicate\(<lambda>\): .*raised .* Write it with &"):
        jax.jit(lambda like: mask.spans(3, 3, like=like).bounds)(jnp.zeros(1))


def test_only_what_a_predicate_holds_is_traced():
    from attnspan.jax import attention

    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 6, 8)), jnp.float32)

    def attend(ids):
        return attention(q, q, q, mask=a.from_predicate(lambda b, h, i, j: ids[i] == ids[j]))

    ids = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2]])
    want = [attention(q, q, q, mask=a.segments(x)) for x in ids]
    for found in (jax.jit(jax.vmap(attend))(ids), [attend(jnp.asarray(x)) for x in ids]):
        np.testing.assert_array_equal(jnp.stack(want), jnp.stack(list(found)))
