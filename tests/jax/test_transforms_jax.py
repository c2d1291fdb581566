"""Attention under JAX's transformations: each gives what the same calls without it give."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax import export  # noqa: E402

from attnspan import alibi, causal, global_keys, segments, window  # noqa: E402
from attnspan.jax import attention, dropout_seeds  # noqa: E402

KERNELS = ("ffi", "xla")
HEADS, KV_HEADS, LENGTH, DIM = 4, 2, 10, 8
IDS = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 3, 3]])


def _normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _inputs(*lead: int) -> tuple[Any, Any, Any]:
    return (
        _normal(0, *lead, 2, HEADS, LENGTH, DIM),
        _normal(1, *lead, 2, KV_HEADS, LENGTH, DIM),
        _normal(2, *lead, 2, KV_HEADS, LENGTH, DIM),
    )


def _close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def _loss(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of the outputs, each with a weight of its own."""

    def loss(*arguments: Any) -> Any:
        out = attend(*arguments)
        return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum()

    return loss


def _attend(name: str, ids: Any = None, **keywords: Any) -> Callable[..., Any]:
    mask = causal() if ids is None else causal() & segments(ids)
    return functools.partial(attention, mask=mask, backend=name, **keywords)


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def test_jit_and_value_and_grad(name: str) -> None:
    inputs = _inputs()
    want = jax.value_and_grad(_loss(_attend("math")), (0, 1, 2))(*inputs)
    step = jax.value_and_grad(_loss(_attend(name)), (0, 1, 2))
    _close(step(*inputs), want)
    _close(jax.jit(step)(*inputs), want)
    _close(jax.jit(jax.grad(jax.jit(_loss(_attend(name))), (0, 1, 2)))(*inputs), want[1])


def test_the_lse_has_a_gradient_too(name: str) -> None:
    def loss(backend: str, q: Any) -> Any:
        out, lse = attention(q, *_inputs()[1:], mask=window(3), return_lse=True, backend=backend)
        return (out * lse[..., None]).sum() + (lse**2).sum()

    _close(
        jax.grad(functools.partial(loss, name))(_inputs()[0]),
        jax.grad(functools.partial(loss, "math"))(_inputs()[0]),
        1e-4,
    )


def test_gradients_of_a_part(name: str) -> None:
    q, k, v = _inputs()
    got = jax.grad(lambda v: _loss(_attend(name))(q, k, v))(v)
    _close(got, jax.grad(lambda v: _loss(_attend("math"))(q, k, v))(v))
    sinks = _normal(3, HEADS)
    grad = {
        backend: jax.grad(lambda sinks, b=backend: _loss(_attend(b, sinks=sinks))(q, k, v))(sinks)
        for backend in (name, "math")
    }
    _close(grad[name], grad["math"])


#: Which arguments carry the mapped axis, and where: q, k, v, ids, seed, sinks, slopes.
AXES: dict[str, tuple[Any, ...]] = {
    "q": (0, None, None, None, None, None, None),
    "k and v": (None, 0, 0, None, None, None, None),
    "everything": (0, 0, 0, 0, 0, 0, 0),
    "ids": (None, None, None, 0, None, None, None),
    "seeds": (None, None, None, None, 0, None, None),
    "sinks": (None, None, None, None, None, 0, None),
    "slopes": (None, None, None, None, None, None, 0),
    "other axes": (2, 1, -1, 1, 0, 1, 1),
}
PLACES = ("q", "k", "v", "ids", "seed", "sinks", "slopes")


@functools.cache
def _all_options(backend: str) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, ids: Any, seed: Any, sinks: Any, slopes: Any) -> Any:
        given = {"dropout_p": 0.25, "dropout_seed": seed, "sinks": sinks, "bias": alibi(slopes)}
        return attention(q, k, v, mask=causal() & segments(ids), backend=backend, **given)

    return call


def _arguments() -> tuple[Any, ...]:
    """Three of each argument."""
    q, k, v = _inputs(3)
    ids = jnp.stack([jnp.asarray(IDS), jnp.asarray(IDS[::-1]), jnp.zeros_like(IDS)])
    return q, k, v, ids, jnp.array([5, -1, 2**30]), _normal(3, 3, HEADS), abs(_normal(4, 3, HEADS))


WANTED = tuple(i for i, place in enumerate(PLACES) if place not in ("ids", "seed"))
_math = jax.jit(_all_options("math"))
_math_gradients = jax.jit(jax.grad(_loss(_all_options("math")), WANTED))


@pytest.mark.parametrize("case", AXES)
def test_vmap(case: str, name: str) -> None:
    axes = AXES[case]
    stacked = _arguments()
    given = [x if a is not None else x[0] for x, a in zip(stacked, axes, strict=True)]
    moved = [x if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(given, axes, strict=True)]
    got = jax.jit(jax.vmap(_all_options(name), in_axes=axes, out_axes=1))(*moved)
    want = [_math(*(x if a is None else x[i] for x, a in zip(given, axes, strict=True))) for i in range(3)]
    _close(got, jnp.stack(want, 1))


@pytest.mark.parametrize("case", ["q", "everything", "sinks"])
def test_vmap_of_grad_and_grad_of_vmap(case: str, name: str) -> None:
    axes, stacked = AXES[case], _arguments()
    given = [x if a is not None else x[0] for x, a in zip(stacked, axes, strict=True)]
    single = jax.grad(_loss(_all_options(name)), WANTED)
    got = jax.jit(jax.vmap(single, in_axes=axes))(*given)
    rows = [
        _math_gradients(*(x if a is None else x[i] for x, a in zip(given, axes, strict=True)))
        for i in range(3)
    ]
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *rows)
    _close(got, want, 1e-4)
    # What all share gets the sum over those that share it.
    shared = jax.jit(
        jax.grad(lambda *x: jax.vmap(_loss(_all_options(name)), in_axes=axes)(*x).sum(), WANTED)
    )(*given)
    summed = [w if axes[i] is not None else w.sum(0) for i, w in zip(WANTED, want, strict=True)]
    _close(list(shared), summed, 2e-4)


def test_nested_vmap(name: str) -> None:
    q, k, v = (
        _normal(0, 2, 3, 1, HEADS, 6, DIM),
        _normal(1, 3, 1, KV_HEADS, 6, DIM),
        _normal(2, 2, 1, KV_HEADS, 6, DIM),
    )
    inner = jax.vmap(_attend(name), in_axes=(0, 0, None))
    got = jax.vmap(inner, in_axes=(0, None, 0))(q, k, v)
    want = [[_attend("math")(q[i, j], k[j], v[i]) for j in range(3)] for i in range(2)]
    _close(got, jnp.stack([jnp.stack(row) for row in want]))


def test_vmap_over_rows_without_a_batch_axis(name: str) -> None:
    """What is written for one sequence, (S, H, D), mapped over the batch."""
    q, k, v = (x.swapaxes(1, 2) for x in _inputs())

    def one(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = causal() & segments(ids)
        return attention(q[None], k[None], v[None], mask=mask, layout="bshd", backend=name)[0]

    got = jax.vmap(one)(q, k, v, jnp.asarray(IDS))
    _close(got, attention(q, k, v, mask=causal() & segments(jnp.asarray(IDS)), layout="bshd", backend="math"))


def test_vmap_over_masks_of_some_axis(name: str) -> None:
    """Prepared masks, one for each mapped element, as pytrees."""
    masks = [(causal() & segments(ids)).placed(LENGTH, LENGTH) for ids in IDS]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *masks)
    q, k, v = _inputs()
    got = jax.vmap(lambda mask: attention(q, k, v, mask=mask, backend=name))(stacked)
    want = [attention(q, k, v, mask=mask, backend="math") for mask in masks]
    _close(got, jnp.stack(want))


def _layers(backend: str, *, remat: Any = None) -> Callable[..., Any]:
    """A stack of layers, scanned, that share one mask."""

    def model(x: Any, weights: Any, mask: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            q, k, v = jnp.split((x @ w).reshape(2, LENGTH, 6, DIM), (4, 5), axis=2)
            out = attention(q, k, v, mask=mask, layout="bshd", backend=backend)
            return x + out.reshape(2, LENGTH, 4 * DIM), None

        body = layer if remat is None else remat(layer)
        return (jax.lax.scan(body, x, weights)[0] ** 2).sum()

    return model


def _model_inputs() -> tuple[Any, Any, Any]:
    weights = 0.2 * _normal(1, 3, 4 * DIM, 6 * DIM)
    mask = (causal() & segments(IDS)).prepare(LENGTH, LENGTH, batch=2)
    return _normal(0, 2, LENGTH, 4 * DIM), weights, mask


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
}


@pytest.mark.parametrize("remat", REMAT)
def test_scan_over_layers_with_checkpoints(remat: str, name: str) -> None:
    x, weights, mask = _model_inputs()
    step = jax.jit(jax.value_and_grad(_layers(name, remat=REMAT[remat]), (0, 1)))
    _close(step(x, weights, mask), _layers_by_math(), 1e-3)


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
        step = jax.grad(_layers("ffi", remat=remat))
        return _forward_kernels(jax.make_jaxpr(step)(x, weights, mask).jaxpr)

    counts = {name: kernels(remat) for name, remat in REMAT.items()}
    assert counts == {"none": 1, "full": 2, "dots": 2, "nothing": 2, "everything": 1}


def test_new_ids_compile_nothing(name: str) -> None:
    traces = []

    @jax.jit
    def step(q: Any, k: Any, v: Any, ids: Any) -> Any:
        traces.append(1)
        return attention(q, k, v, mask=causal() & (segments(ids) | global_keys(1)), backend=name)

    q, k, v = _inputs()
    for ids in (IDS, IDS[::-1].copy(), np.zeros_like(IDS)):
        got = step(q, k, v, jnp.asarray(ids))
        mask = causal() & (segments(ids) | global_keys(1))
        _close(got, attention(q, k, v, mask=mask, backend="math"))
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_masks_are_arguments_of_jit(name: str) -> None:
    traces = []

    @jax.jit
    def step(inputs: Any, mask: Any) -> Any:
        traces.append(1)
        return attention(*inputs, mask=mask, backend=name)

    inputs = _inputs()
    for ids in (IDS, IDS[::-1].copy()):
        mask = causal() & segments(ids)
        want = attention(*inputs, mask=mask, backend="math")
        _close(step(inputs, mask), want)
        _close(step(inputs, mask.prepare(LENGTH, LENGTH, batch=2)), want)
    assert len(traces) == 2  # One for the expression, one for spans.


def test_biases_are_arguments_of_jit(name: str) -> None:
    inputs, slopes = _inputs(), abs(_normal(3, HEADS))
    gradient = jax.jit(jax.grad(lambda bias: _loss(_attend(name, bias=bias))(*inputs)))
    got = gradient(alibi(slopes))
    want = jax.grad(lambda x: _loss(_attend("math", bias=alibi(x)))(*inputs))(slopes)
    _close(got.slopes, want, 1e-4)


def test_seeds_by_key_and_number(name: str) -> None:
    """A seed and those it gives for each row and head drop the same elements, another one others."""
    inputs = _inputs()

    def dropped(seed: Any) -> Any:
        return _attend(name, dropout_p=0.5, dropout_seed=seed)(*inputs)

    seeds = [jnp.array(77), jnp.array(78), jax.random.key(77), jax.random.fold_in(jax.random.key(77), 1)]
    outs = [dropped(seed) for seed in seeds]
    for seed, out in zip(seeds, outs, strict=True):
        np.testing.assert_array_equal(out, dropped(dropout_seeds(seed, 2, HEADS)))
    for i, out in enumerate(outs):
        assert all((out != other).any() for other in (*outs[:i], _attend(name)(*inputs)))


def test_donation(name: str) -> None:
    q, k, v = _inputs()
    want = attention(q, k, v, mask=causal(), backend="math")
    step = jax.jit(_attend(name), donate_argnums=0)
    given = q + 0
    _close(step(given, k, v), want)
    assert given.is_deleted()


def test_cond_and_while_loop(name: str) -> None:
    q, k, v = _inputs()

    @jax.jit
    def either(narrow: Any, q: Any) -> Any:
        masks = (window(2), causal())
        branches = [functools.partial(attention, mask=mask, backend=name) for mask in masks]
        return jax.lax.cond(narrow, *branches, q, k, v)

    for narrow, mask in ((True, window(2)), (False, causal())):
        _close(either(narrow, q), attention(q, k, v, mask=mask, backend="math"))

    def repeated(backend: str) -> Any:
        def step(state: Any) -> Any:
            i, x = state
            return i + 1, attention(x, k, v, mask=causal(), backend=backend)

        return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, q))[1]

    _close(jax.jit(lambda: repeated(name))(), repeated("math"))


def test_shapes_without_a_computation(name: str) -> None:
    q, k, _ = _inputs()
    narrow = jax.ShapeDtypeStruct((2, KV_HEADS, LENGTH, 5), jnp.bfloat16)
    q, k = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k))
    out, lse = jax.eval_shape(functools.partial(attention, return_lse=True, backend=name), q, k, narrow)
    assert (out.shape, out.dtype) == ((2, HEADS, LENGTH, 5), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, HEADS, LENGTH), jnp.float32)


def test_export_round_trip() -> None:
    inputs, ids = _inputs(), jnp.asarray(IDS)

    def step(ids: Any, *inputs: Any) -> Any:
        return jax.value_and_grad(_loss(_attend("xla", ids)))(*inputs)

    exported = export.export(jax.jit(step))(ids, *inputs)
    read = export.deserialize(exported.serialize())
    _close(read.call(ids, *inputs), jax.value_and_grad(_loss(_attend("math", ids)))(*inputs))


def test_forward_mode_is_refused_by_kernels(name: str) -> None:
    q, k, v = _inputs()
    with pytest.raises((TypeError, NotImplementedError), match=r'custom_vjp|backend="math"'):
        jax.jvp(lambda q: _attend(name)(q, k, v), (q,), (q,))


def test_second_derivatives_are_refused_by_kernels(name: str) -> None:
    q, k, v = _inputs()
    first = jax.grad(lambda q: _loss(_attend(name))(q, k, v))
    with pytest.raises(NotImplementedError, match=r'second derivative.*backend="math"'):
        jax.grad(lambda q: (first(q) ** 2).sum())(q)


def test_all_derivatives_by_math() -> None:
    """Second derivatives, by each order of modes, against differences of first ones."""
    q, k, v = (x[:1, :, :3, :4] for x in _inputs())
    keywords = {"bias": alibi(jnp.full(HEADS, 0.3)), "softcap": 3.0, "sinks": _normal(3, HEADS)}
    first = jax.grad(lambda q: _loss(_attend("math", **keywords))(q, k, v))
    direction = _normal(5, *q.shape)

    @jax.jit
    def by_all(q: Any) -> Any:
        forward = jax.jvp(first, (q,), (direction,))[1]
        reverse = jax.grad(lambda q: (first(q) * direction).sum())(q)
        step = 0.01 * direction
        return forward, reverse, (first(q + step) - first(q - step)) / 0.02

    forward, reverse, differences = by_all(q)
    assert abs(forward).max() > 0.1
    _close(reverse, forward)
    _close(forward, differences, 1e-2)


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def test_with_64_bits(name: str, wide: None) -> None:
    """Indices and seeds are int64 there, inputs stay what they are."""
    inputs = [x.astype(jnp.float32) for x in _inputs()]
    ids = jnp.asarray(IDS)
    assert ids.dtype == jnp.int64
    keywords = {"dropout_p": 0.5, "dropout_seed": jnp.array(2**40 + 1), "bias": alibi(jnp.ones(HEADS))}
    got = jax.jit(_attend(name, ids, **keywords))(*inputs)
    assert got.dtype == jnp.float32
    _close(got, _attend("math", ids, **keywords)(*inputs))
    exact = _attend("math", ids)(*(x.astype(jnp.float64) for x in inputs))
    assert exact.dtype == jnp.float64
    _close(_attend(name, ids)(*inputs), exact.astype(jnp.float32))
