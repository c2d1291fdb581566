"""Attention under JAX's transformations: each gives what the same calls without it give."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from covering import everything

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax import export  # noqa: E402
from samples.jax_transforms import (  # noqa: E402
    DIM,
    HEADS,
    IDS,
    KERNELS,
    KV_HEADS,
    LENGTH,
    MOSTLY_CPU,
    attend,
    close,
    inputs,
    loss,
    normal,
)

from attnspan import alibi, causal, global_keys, segments, window  # noqa: E402
from attnspan.jax import SAVE_NAMES, attention, dropout_seeds  # noqa: E402

QKV = inputs()


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_jit_and_value_and_grad(name: str) -> None:
    step = jax.jit(jax.value_and_grad(jax.jit(loss(attend(name))), (0, 1, 2)))
    by_math = jax.jit(jax.value_and_grad(loss(attend("math")), (0, 1, 2)))
    close(step(*QKV), by_math(*QKV))


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_gradients_of_a_part(name: str) -> None:
    """Of v, and of the sinks, alone: what is not asked for is left out."""
    q, k, v = QKV

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(backend: str, v: Any, sinks: Any) -> Any:
        of_v = jax.grad(lambda v: loss(attend(backend))(q, k, v))(v)
        return of_v, jax.grad(lambda sinks: loss(attend(backend, sinks=sinks))(q, k, v))(sinks)

    sinks = normal(3, HEADS)
    close(gradients(name, v, sinks), gradients("math", v, sinks))


def _layers(backend: str, *, remat: Any = None) -> Callable[..., Any]:
    """A stack of layers, scanned, that share one mask."""

    def model(x: Any, weights: Any, mask: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            q, k, v = jnp.split((x @ w).reshape(2, LENGTH, 6, DIM), (4, 5), axis=2)
            out = attention(q, k, v, mask=mask, layout="bshd", backend=backend)
            return x + out.reshape(2, LENGTH, 4 * DIM), None

        body = layer if remat is None else remat(layer)
        return (jax.lax.scan(body, x, weights)[0] ** 2).mean()

    return model


def _model_inputs() -> tuple[Any, Any, Any]:
    weights = 0.2 * normal(1, 3, 4 * DIM, 6 * DIM)
    mask = (causal() & segments(IDS)).prepare(LENGTH, LENGTH, batch=2)
    return normal(0, 2, LENGTH, 4 * DIM), weights, mask


@functools.cache
def _layers_by_math() -> Any:
    x, weights, mask = _model_inputs()
    return jax.jit(jax.value_and_grad(_layers("math"), (0, 1)))(x, weights, mask)


REMAT: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "nothing": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable),
    "everything": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable),
    "by name": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*SAVE_NAMES)
    ),
}


# Which policy runs the kernel again is counted below, for all of them.
VALUES = REMAT if everything() else ("by name",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"),
    [*(("cpu", remat) for remat in VALUES), pytest.param("xla", "dots", marks=pytest.mark.long)],
)
def test_scan_over_layers_with_checkpoints(name: str, remat: str) -> None:
    x, weights, mask = _model_inputs()
    step = jax.jit(jax.value_and_grad(_layers(name, remat=REMAT[remat]), (0, 1)))
    close(step(x, weights, mask), _layers_by_math())


def _forward_kernels(program: Any) -> int:
    """Calls of the forward kernel in a program and all that it calls."""
    count = 0
    for equation in program.eqns:
        count += equation.params.get("target_name") == "attnspan_forward"
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            count += _forward_kernels(inner) if hasattr(inner, "eqns") else 0
    return count


def test_checkpointing_runs_the_kernel_again() -> None:
    """Full checkpointing has the forward kernel twice, none and a policy that keeps its results once."""
    x, weights, mask = _model_inputs()

    def kernels(remat: Any) -> int:
        step = jax.grad(_layers("cpu", remat=remat))
        return _forward_kernels(jax.make_jaxpr(step)(x, weights, mask).jaxpr)

    counts = {name: kernels(remat) for name, remat in REMAT.items()}
    assert counts == {"none": 1, "full": 2, "dots": 2, "nothing": 2, "everything": 1, "by name": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_masks_are_arguments_of_jit_and_new_ids_compile_nothing(name: str) -> None:
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(backend: str, mask: Any) -> Any:
        traces.append(backend)
        return attention(*QKV, mask=mask, backend=backend)

    for ids in (IDS, IDS[::-1].copy(), np.zeros_like(IDS)):
        mask = causal() & (segments(ids) | global_keys(1))
        want = step("math", mask)
        close(step(name, mask), want)
        close(step(name, mask.spans(LENGTH, LENGTH, batch=2)), want)
    assert traces.count(name) == 2  # One for the expression, one for spans.


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_biases_are_arguments_of_jit(name: str) -> None:
    slopes = abs(normal(3, HEADS))

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=1)
    def gradient(backend: str, bias: Any) -> Any:
        return loss(attend(backend, bias=bias))(*QKV)

    got = gradient(name, alibi(slopes))
    assert abs(got.slopes).min() > 0
    close(got, gradient("math", alibi(slopes)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_seeds_by_key_and_number(name: str) -> None:
    """A seed and those it gives for each row and head drop the same elements, another one others."""

    @jax.jit
    def dropped(seed: Any) -> Any:
        return attend(name, dropout_p=0.5, dropout_seed=seed)(*QKV)

    key = jax.random.key(77)
    seeds = [jnp.array(77), jnp.array(78), key, jax.random.fold_in(key, 1)]
    outs = [dropped(seed) for seed in seeds]
    for seed, out in zip(seeds, outs, strict=True):
        np.testing.assert_array_equal(out, dropped(dropout_seeds(seed, 2, HEADS)))
    for i, out in enumerate(outs):
        assert all((out != other).any() for other in outs[:i])


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_donation(name: str) -> None:
    q, k, v = QKV
    step = jax.jit(attend(name), donate_argnums=0)
    want, given = step(jnp.array(q), k, v), jnp.array(q)
    np.testing.assert_array_equal(step(given, k, v), want)
    assert given.is_deleted()
    assert not q.is_deleted()


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_cond_and_while_loop(name: str) -> None:
    q, k, v = QKV

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend: str, narrow: Any) -> Any:
        def step(state: Any) -> Any:
            i, x = state
            branches = [
                functools.partial(attention, mask=mask, backend=backend) for mask in (window(2), causal())
            ]
            return i + 1, jax.lax.cond(narrow & (i > 0), *branches, x, k, v)

        return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, q))[1]

    results = [run(name, narrow) for narrow in (True, False)]
    close(results, [run("math", narrow) for narrow in (True, False)])
    assert (results[0] != results[1]).any()


def test_shapes_without_a_computation(name: str) -> None:
    narrow = jax.ShapeDtypeStruct((2, KV_HEADS, LENGTH, 5), jnp.bfloat16)
    q, k = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in QKV[:2])
    out, lse = jax.eval_shape(functools.partial(attention, return_lse=True, backend=name), q, k, narrow)
    assert (out.shape, out.dtype) == ((2, HEADS, LENGTH, 5), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, HEADS, LENGTH), jnp.float32)


def test_export_of_the_kernel_is_refused_by_jax() -> None:
    with pytest.raises(ValueError, match=r"custom call.*no compatibility guarantees"):
        export.export(jax.jit(attend("cpu")))(*QKV)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_are_refused_by_kernels(name: str) -> None:
    remedy = r'Pass backend="math", or call attention inside `with attnspan\.backend\("math"\)'
    for forward in (jax.jvp, lambda f, x, _: jax.jacfwd(f)(*x)):
        with pytest.raises(NotImplementedError, match=f"expected reverse mode.*{remedy}"):
            forward(lambda q: attend(name)(q, *QKV[1:]), QKV[:1], QKV[:1])
    first = jax.grad(lambda q: loss(attend(name))(q, *QKV[1:]))
    for second in (
        lambda q: jax.grad(lambda q: (first(q) ** 2).sum())(q),
        lambda q: jax.jvp(first, (q,), (q,)),
        jax.jit(jax.hessian(lambda q: loss(attend(name))(q, *QKV[1:]))),
    ):
        with pytest.raises(NotImplementedError, match=f"second derivatives.*{remedy}"):
            second(QKV[0])


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
def test_with_64_bits(wide: None) -> None:
    """Indices and seeds are int64 there, inputs stay what they are."""
    seed, ids = jnp.array(2**40 + 1), jnp.asarray(IDS)
    assert ids.dtype == seed.dtype == jnp.int64
    keywords = {"dropout_p": 0.5, "dropout_seed": seed, "bias": alibi(np.ones(HEADS, np.float32))}
    outs = [jax.jit(attend(name, ids, **keywords))(*QKV) for name in ("cpu", "math")]
    exact = jax.jit(attend("math", ids, **keywords))(*(np.asarray(x, np.float64) for x in QKV))
    assert exact.dtype == jnp.float64
    for out in outs:
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)


#: What programs that are compiled ahead of their calls take.
AHEAD = [
    (causal() & segments(IDS)).prepare(LENGTH, LENGTH, batch=2, like=jnp.ones(1)),
    causal() & segments(jnp.asarray(IDS)),
    segments(jnp.asarray(IDS), jnp.asarray(IDS)) | window(1),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [False, True], ids=["mask", "shapes"])
@pytest.mark.parametrize("mask", AHEAD, ids=repr)
def test_a_program_compiled_ahead_takes_the_mask_or_the_shapes_that_it_was_lowered_with(
    mask: Any, shapes: bool
) -> None:
    def call(q: Any, mask: Any) -> Any:
        return attention(q, *QKV[1:], mask=mask)

    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask) if shapes else mask
    compiled = jax.jit(call).lower(QKV[0], given).compile()
    np.testing.assert_allclose(compiled(QKV[0], mask), call(QKV[0], mask), atol=1e-6)
