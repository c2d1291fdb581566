"""Attention under vmap gives what the same calls give one by one, whatever is mapped or shared."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from covering import everything

jax = pytest.importorskip("jax")
jnp = jax.numpy

from samples.jax_transforms import (  # noqa: E402
    DIM,
    HEADS,
    IDS,
    KV_HEADS,
    LENGTH,
    MOSTLY_CPU,
    attend,
    close,
    inputs,
    loss,
    normal,
)

from attnspan import alibi, causal, segments  # noqa: E402
from attnspan.jax import attention  # noqa: E402

#: Which arguments carry the mapped axis, and where: q, k, v, ids, seed, sinks, slopes.
AXES: dict[str, tuple[Any, ...]] = {
    "q, ids and sinks": (0, None, None, 0, None, 0, None),
    "k, v, seeds and slopes": (None, 0, 0, None, 0, None, 0),
    "everything": (0, 0, 0, 0, 0, 0, 0),
    "other axes": (2, 1, -1, 1, 0, 1, 1),
}
#: Each argument is mapped, and shared, in one of them.
CASES = AXES if everything() else ("other axes",)  # and one of gradients
XLA = [pytest.param("xla", "everything", marks=pytest.mark.long)]
PLACES = ("q", "k", "v", "ids", "seed", "sinks", "slopes")


@functools.cache
def _all_options(backend: str) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, ids: Any, seed: Any, sinks: Any, slopes: Any) -> Any:
        given = {"dropout_p": 0.25, "dropout_seed": seed, "sinks": sinks, "bias": alibi(slopes)}
        return attention(q, k, v, mask=causal() & segments(ids), backend=backend, **given)

    return call


@functools.cache
def _arguments() -> tuple[Any, ...]:
    """Three of each argument."""
    q, k, v = (np.asarray(x) for x in inputs(3))
    ids = np.stack([IDS, IDS[::-1], np.zeros_like(IDS)]).astype(np.int32)
    seeds = np.array([5, -1, 2**30], np.int32)
    return q, k, v, ids, seeds, np.asarray(normal(3, 3, HEADS)), abs(np.asarray(normal(4, 3, HEADS)))


WANTED = tuple(i for i, place in enumerate(PLACES) if place not in ("ids", "seed"))


@functools.cache
def _one_by_one(gradients: bool) -> Callable[..., Any]:
    """One of the mapped calls, compiled once for all cases."""
    function = _all_options("cpu")
    return jax.jit(jax.grad(loss(function), WANTED) if gradients else function)  # type: ignore[no-any-return]


def _expected(case: str, gradients: bool = False) -> tuple[list[Any], Any]:
    """The arguments of a case, and what its calls give one by one, stacked."""
    given = [x if a is not None else x[0] for x, a in zip(_arguments(), AXES[case], strict=True)]
    calls = [[x if a is None else x[i] for x, a in zip(given, AXES[case], strict=True)] for i in range(3)]
    rows = [_one_by_one(gradients)(*call) for call in calls]
    return given, jax.tree.map(lambda *xs: np.stack(xs), *rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [*(("cpu", x) for x in CASES), *XLA])
def test_vmap(name: str, case: str) -> None:
    axes = AXES[case]
    given, want = _expected(case)
    moved = [x if a is None else np.moveaxis(x, 0, a) for x, a in zip(given, axes, strict=True)]
    got = jax.jit(jax.vmap(_all_options(name), in_axes=axes, out_axes=1))(*moved)
    close(got, np.moveaxis(want, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("cpu", "k, v, seeds and slopes"),
        *(pytest.param("cpu", x, marks=pytest.mark.long) for x in ("everything", "q, ids and sinks")),
        *XLA,
    ],
)
def test_vmap_of_grad_and_grad_of_vmap(name: str, case: str) -> None:
    axes = AXES[case]
    given, want = _expected(case, gradients=True)
    function = loss(_all_options(name))

    @jax.jit
    def both(*given: Any) -> Any:
        total = jax.grad(lambda *x: jax.vmap(function, in_axes=axes)(*x).sum(), WANTED)
        return jax.vmap(jax.grad(function, WANTED), in_axes=axes)(*given), total(*given)

    each, total = both(*given)
    close(each, want, 1e-4)
    # What all share gets the sum over those that share it.
    summed = [w if axes[i] is not None else w.sum(0) for i, w in zip(WANTED, want, strict=True)]
    close(list(total), summed, 2e-4)


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_nested_vmap(name: str) -> None:
    q, k, v = (
        normal(0, 2, 3, 1, HEADS, 6, DIM),
        normal(1, 3, 1, KV_HEADS, 6, DIM),
        normal(2, 2, 1, KV_HEADS, 6, DIM),
    )

    @jax.jit
    def nested(q: Any, k: Any, v: Any) -> Any:
        inner = jax.vmap(attend(name), in_axes=(0, 0, None))
        return jax.vmap(inner, in_axes=(0, None, 0))(q, k, v)

    @jax.jit
    def plain(q: Any, k: Any, v: Any) -> Any:
        rows = [[attend("cpu")(q[i, j], k[j], v[i]) for j in range(3)] for i in range(2)]
        return jnp.stack([jnp.stack(row) for row in rows])

    close(nested(q, k, v), plain(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_vmap_over_rows_without_a_batch_axis(name: str) -> None:
    """What is written for one sequence, (S, H, D), mapped over the batch."""
    given = [x.swapaxes(1, 2) for x in inputs()]

    def one(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = causal() & segments(ids)
        return attention(q[None], k[None], v[None], mask=mask, layout="bshd", backend=name)[0]

    @jax.jit
    def whole(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return attention(q, k, v, mask=causal() & segments(ids), layout="bshd", backend="cpu")

    ids = jnp.asarray(IDS)
    close(jax.jit(jax.vmap(one))(*given, ids), whole(*given, ids))


@pytest.mark.parametrize("name", MOSTLY_CPU)
def test_vmap_over_masks(name: str) -> None:
    """Prepared masks, one for each mapped element, as pytrees."""
    masks = [(causal() & segments(ids)).spans(LENGTH, LENGTH) for ids in IDS]
    stacked = jax.tree.map(lambda *x: np.stack(x), *masks)

    @functools.partial(jax.jit, static_argnums=0)
    def call(backend: str, mask: Any) -> Any:
        return attention(*inputs(), mask=mask, backend=backend)

    got = jax.vmap(functools.partial(call, name))(stacked)
    close(got, np.stack([call("math", mask) for mask in masks]))
