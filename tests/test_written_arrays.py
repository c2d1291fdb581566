"""Whoever writes into an array of the mask after the forward pass does not change what backward computes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnspan as a
from attnspan import torch as at

LENGTH = 8
SLOPES = np.array([0.5, 0.25], np.float32)


def _aligned(x: np.ndarray) -> np.ndarray:
    """A copy where frameworks may share memory: JAX does for arrays at multiples of 64 bytes."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    y: np.ndarray = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def _bounds() -> np.ndarray:
    return _aligned(a.causal().spans(LENGTH, LENGTH).bounds)


def _index() -> np.ndarray:
    return _aligned(np.arange(LENGTH, dtype=np.int32))


#: The array that is written into, and the keywords of a call with it.
CALLS: dict[str, tuple[Callable[[], np.ndarray], Callable[[Any], dict[str, Any]]]] = {
    "spans": (_bounds, lambda x: {"mask": a.Spans(x, LENGTH)}),
    "prepared": (_bounds, lambda x: {"mask": a.Prepared(a.Spans(x, LENGTH))}),
    "bounds": (_bounds, lambda x: {"mask": a.spans(x)}),
    "q_index": (_index, lambda x: {"mask": a.causal(), "q_index": x, "bias": a.alibi(SLOPES)}),
    "q_index of a prepared mask": (
        _index,
        lambda x: {"mask": a.causal().prepare(LENGTH, LENGTH, q_index=x), "bias": a.alibi(SLOPES)},
    ),
    "k_index": (_index, lambda x: {"mask": a.causal(), "k_index": x, "bias": a.alibi(SLOPES)}),
    "slopes": (lambda: _aligned(SLOPES), lambda x: {"mask": a.causal(), "bias": a.alibi(x)}),
    "dense bias": (
        lambda: _aligned(np.ones((2, LENGTH, LENGTH), np.float32)),
        lambda x: {"mask": a.causal(), "bias": a.dense_bias(x)},
    ),
}


def _inputs() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, 2, LENGTH, 16)).astype(np.float32)


# A compiler cannot ask a NumPy array for its dtype: `bounds` and bare indices are refused there.
_COMPILED = ("spans", "dense bias")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_torch(compiled: bool) -> None:
    names = _COMPILED if compiled else CALLS
    k = torch.from_numpy(_inputs())

    def attend(q: torch.Tensor, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [at.attention(q, k, k, **call) for call in calls]

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend

    def gradients(written: bool) -> list[torch.Tensor]:
        q, arrays = torch.from_numpy(_inputs()).requires_grad_(), [CALLS[name][0]() for name in names]
        outs = run(q, [CALLS[name][1](array) for name, array in zip(names, arrays, strict=True)])
        for array in arrays if written else ():
            array.fill(0)
        return [torch.autograd.grad(x.square().sum(), q, retain_graph=True)[0] for x in outs]

    for name, got, want in zip(names, gradients(written=True), gradients(written=False), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["short way", "operator"])
@pytest.mark.parametrize("view", [False, True])
def test_torchs_own_arrays_are_counted(options: dict[str, Any], view: bool) -> None:
    bounds = torch.from_numpy(_bounds())
    q = torch.from_numpy(_inputs()).requires_grad_()
    out = at.attention(q, q, q, mask=a.Spans(bounds[:1] if view else bounds, LENGTH), **options)
    bounds.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    attend = pytest.importorskip("attnspan.jax").attention
    make, call = CALLS[name]
    found = []
    for written in (False, True):
        array, q = make(), jax.numpy.array(_inputs())
        given = call(array)
        out, pull = jax.vjp(lambda q, given=given: attend(q, q, q, **given), q)
        out.block_until_ready()
        if written:
            array.fill(0)
        found.append(pull(out)[0])
    np.testing.assert_array_equal(*found)


def test_numpy_arrays_of_any_kind_are_read() -> None:
    x, q = _bounds(), torch.from_numpy(_inputs())
    want = at.attention(q, q, q, mask=a.causal())
    reversed_twice = np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    for bounds in (np.broadcast_to(x, x.shape), reversed_twice, x.astype(">i4"), np.asfortranarray(x)):
        assert torch.equal(at.attention(q, q, q, mask=a.Spans(bounds, LENGTH)), want)
