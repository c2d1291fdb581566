"""How often a function is traced, how long what it holds lives, and many threads at once."""

# ruff: noqa: ARG005  (functions of a fixed signature, some of which need a part of it)

import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from attnspan.torch import RetraceWarning, call_jax

jax = pytest.importorskip("jax")
jnp = jax.numpy
functions = pytest.importorskip("attnspan.interop._functions")

X = torch.arange(64.0)
#: An entry for each time that JAX called one of the functions below: no time for programs that are there.
traced: list[Any] = []


def scale_by(s: Any) -> Callable[[Any], Any]:
    def scaled(x: Any) -> Any:
        traced.append(s)
        return x * s

    return scaled


def test_the_same_function_is_traced_once_for_each_shape() -> None:
    fn, counts = scale_by(2.0), []
    for n in (1, 2, 1, 2):
        assert torch.equal(call_jax(fn, torch.ones(n)), torch.full((n,), 2.0))
        counts.append(len(traced))
    assert counts[0] < counts[1] == counts[3]


STATE = {"s": 0.0}


class Model:
    def __init__(self, s: float) -> None:
        self.s = s

    def __call__(self, x: Any) -> Any:
        traced.append(self.s)
        return x * self.s

    def method(self, x: Any) -> Any:
        return self(x)


def test_a_fresh_function_is_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for s in (2.0, 3.0):
        monkeypatch.setitem(STATE, "s", s)
        by_state, partial = lambda x: x * STATE["s"], functools.partial(jnp.multiply, s)
        for fresh in (scale_by(s), by_state, partial, jax.jit(scale_by(s))):
            assert call_jax(fresh, X)[1] == s


@pytest.mark.slow
def test_objects_and_their_methods_count_as_themselves() -> None:
    for s in (2.0, 3.0):
        model = Model(s)
        for name in ("__call__", "method"):
            assert call_jax(getattr(model, name), X)[1] == s
            before = len(traced)
            assert [call_jax(getattr(model, name), X)[1] for _ in range(2)] == [s, s]
            assert len(traced) == before
        assert call_jax(model, X)[1] == s
    for i in range(20):
        other = MethodType(lambda _self, x, i=i: x * i, model)
        assert call_jax(other, X)[1] == i, "a fresh function, at an id that is taken again"
        del other
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


def test_jax_settings_are_part_of_the_meaning() -> None:
    def ones(x: Any) -> Any:
        return jnp.ones(2) + x[0].astype(float)

    assert call_jax(ones, X).dtype == torch.float32
    with jax.enable_x64(True):
        assert call_jax(ones, X).dtype == torch.float64
    assert call_jax(ones, X).dtype == torch.float32

    def draw(x: Any) -> Any:
        return 0 * x + jax.random.uniform(jax.random.key(0), x.shape)

    drawn = [call_jax(draw, X)]
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        drawn.append(call_jax(draw, X))
        assert drawn[1].tolist() == jax.jit(draw)(X.numpy()).tolist()
    assert drawn[0].tolist() == jax.jit(draw)(X.numpy()).tolist() != drawn[1].tolist()


@dataclass(frozen=True)
class Shown:
    s: Any


def test_static_values_are_told_apart_by_bits_and_types() -> None:
    def of(x: Any, s: Any) -> Any:
        return x * s.s if isinstance(s, Shown) else x / s[0]

    ints = torch.ones(3, dtype=torch.int32)
    dtypes = [call_jax(of, ints, s=Shown(s)).dtype for s in (1, 1.0, True, 1)]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]
    for zero in (0.0, np.float32(0.0)):
        values = [
            call_jax(of, torch.ones(3), s=Shown(frozenset({1})) and (z,))[0].item() for z in (zero, -zero)
        ]
        assert values == [float("inf"), float("-inf")]


def test_a_function_lives_as_long_as_backward_needs_it_and_no_longer() -> None:
    x = X.clone().requires_grad_()
    for i in range(3):
        s = jnp.full(64, float(i))
        fn = scale_by(s)
        out, weak = call_jax(fn, x), [weakref.ref(fn), weakref.ref(s)]
        traced.clear()
        del fn, s
        gc.collect()
        out.sum().backward()
        assert x.grad[1] == i, "what backward needs lives on"
        del out
        x.grad = None
        gc.collect()
        assert [w() for w in weak] == [None, None], "the function, and what it closed over"


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MOST_PROGRAMS", 3)
    monkeypatch.setattr(functions, "MOST_FUNCTIONS", 2)
    functions._programs.clear()
    fn = scale_by(2.0)
    call_jax(fn, torch.ones(1))
    one = len(traced)
    for n in (1, 2, 3, 4, 4, 3, 2):
        call_jax(fn, torch.ones(n))
    many = len(traced)
    call_jax(fn, torch.ones(1))
    assert one < many < len(traced), "the oldest makes room"
    kept = [scale_by(float(s)) for s in range(5)]
    assert [call_jax(fn, X)[1] for fn in kept] == [*range(5)]
    before = len(traced)
    assert call_jax(kept[0], X)[1] == 0
    assert len(traced) > before


def _square(x: Any) -> Any:
    return x * x


def _scaled(x: Any, k: float) -> Any:
    return x * k


RETRACED: dict[str, tuple[Callable[[int], Any], str]] = {
    "closure": (lambda i: call_jax(scale_by(2.0), X), "scaled"),
    "transform": (lambda i: call_jax(jax.grad(_square), torch.ones(())), "_square"),
    "static number": (lambda i: call_jax(_scaled, X, k=i), "_scaled"),
}


@pytest.mark.parametrize("case", RETRACED)
def test_what_is_traced_again_and_again_is_warned_of_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MANY_TRACES", 2)
    functions._counts.clear()
    run, name = RETRACED[case]
    text = rf"{name} of .*test_call_jax_cache.* 2 times .*Create the function once.* tensors"
    with pytest.warns(RetraceWarning, match=text) as found:
        [run(i) for i in range(4)]
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 6):  # New shapes are no reason to warn.
            call_jax(_square, torch.ones(n))


def test_threads_share_one_trace() -> None:
    fn, start = scale_by(2.0), threading.Barrier(8)

    def run(i: int) -> None:
        start.wait()
        for k in range(4):
            x = (X * (i + k)).requires_grad_()
            out = call_jax(fn, x)
            out.sum().backward()
            assert torch.equal(out, x * 2)
            assert (x.grad == 2).all()
            assert call_jax(scale_by(3.0 + k), X)[1] == 3.0 + k if i == 0 else True

    traced.clear()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert traced.count(2.0) == 1
