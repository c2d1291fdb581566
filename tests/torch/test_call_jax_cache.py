"""Which functions share a trace, how long it lives, and many threads at once."""

import functools
import gc
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attnspan import causal
from attnspan.torch import RetraceWarning, call_jax

jax = pytest.importorskip("jax")
jnp = jax.numpy
functions = pytest.importorskip("attnspan.torch._call_jax.functions")

X = torch.arange(64.0)
traced: list[str] = []


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts traces from outside: a function that wrote to a list would not be shared."""

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (traced.append(make.__name__), make(*given))[1]

    monkeypatch.setattr(functions, "Forward", counted(functions.Forward))
    monkeypatch.setattr(functions, "derive", counted(functions.derive))
    traced.clear()
    functions.table.clear()
    yield
    functions.table.clear()


def scale_by(s: Any) -> Callable[[Any], Any]:
    def scaled(x: Any) -> Any:
        return x * s

    return scaled


def test_fresh_closures_share_one_trace() -> None:
    for _ in range(5):
        call_jax(scale_by(2.0), X)
        call_jax(lambda x: x + 1, X)
    assert len(traced) == 2


VALUES = [1, 1.0, True, 0.0, -0.0, 2**40 + 0.5, 3, float("inf"), 1 + 1j, 1 - 1j]


def test_what_is_captured_is_told_apart() -> None:
    for s in VALUES * 2:
        want = (torch.view_as_real(X * s) if isinstance(s, complex) else X * s).numpy()
        got = call_jax(scale_by(s), X)
        got = torch.view_as_real(got) if got.is_complex() else got
        assert (got.numpy().view("uint32") == want.view("uint32")).all(), s
    assert len(traced) == len(VALUES)


@pytest.mark.filterwarnings("ignore::attnspan.torch.RetraceWarning")
def test_captured_arrays_are_told_apart_and_may_die() -> None:
    weak = []
    for i in range(150):
        s = jnp.full(64, float(i))
        weak.append(weakref.ref(s))
        assert call_jax(scale_by(s), X)[1] == i, "an id that is taken again is no hit"
        assert call_jax(scale_by(s), X)[1] == i
    assert len(traced) == 150
    del s
    gc.collect()
    assert sum(w() is not None for w in weak) <= functions.KEPT


def test_dead_traces_hold_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "KEPT_BYTES", 10 * 256)
    weak = []
    for i in range(40):
        s = jnp.full(64, float(i))
        weak.append(weakref.ref(s))
        call_jax(scale_by(s), X)
    del s
    gc.collect()
    assert sum(w() is not None for w in weak) <= 10


def test_what_may_change_unseen_is_not_shared() -> None:
    state = {"s": 2.0}
    for s in (2.0, 3.0, 2.0):
        state["s"] = s
        assert call_jax(lambda x: x * state["s"], X)[1] == s

    class Holder:
        s = 2.0

    for s in (2.0, 3.0):
        Holder.s = s
        assert call_jax(lambda x: x * Holder.s, X)[1] == s
        assert call_jax(lambda x: (lambda h: x * h.s)(Holder), X)[1] == s


FACTOR = 2.0
THERE = ModuleType("there")
THERE.inner = ModuleType("inner")  # type: ignore[attr-defined]


def _by_factor(x: Any) -> Any:
    return x * FACTOR


def test_globals_are_part_of_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    for s in (2.0, 3.0, 4.0):
        monkeypatch.setitem(globals(), "FACTOR", s)
        THERE.inner.s = s  # type: ignore[attr-defined]
        assert call_jax(lambda x: x * FACTOR, X)[1] == s
        assert call_jax(lambda x: _by_factor(x), X)[1] == s, "also those of functions that are called"
        assert call_jax(lambda x: x * THERE.inner.s, X)[1] == s
        assert call_jax(lambda x: jax.vmap(lambda y: y * FACTOR)(x), X)[1] == s
        assert call_jax(jax.vmap(lambda y: y * FACTOR), X)[1] == s


def test_defaults_and_partials() -> None:
    for s in (2.0, 3.0):
        assert call_jax(lambda x, k=s: x * k, X)[1] == s
        assert call_jax(functools.partial(lambda k, x: x * k, s), X)[1] == s

        def by_keyword(x: Any, *, k: float = s) -> Any:
            return x * k

        assert call_jax(by_keyword, X)[1] == s


@dataclass(frozen=True)
class Frozen:
    s: float


def test_frozen_dataclasses_and_masks_are_shared() -> None:
    def by(frozen: Frozen) -> Callable[[Any], Any]:
        return lambda x: x * frozen.s

    assert [call_jax(by(Frozen(s)), X)[1].item() for s in (2.0, 3.0, 2.0, 3.0)] == [2, 3, 2, 3]
    assert len(traced) == 2
    for _ in range(3):
        mask = causal()
        call_jax(lambda x: mask.spans(4, 4, like=x).bounds, X)  # noqa: B023
    assert len(traced) == 3


class Model:
    def __init__(self, s: float) -> None:
        self.s = s

    def __call__(self, x: Any) -> Any:
        return x * self.s

    def method(self, x: Any) -> Any:
        return x * self.s


def test_objects_and_their_methods_count_as_themselves() -> None:
    for s in (2.0, 3.0):
        model = Model(s)
        for _ in range(3):
            assert call_jax(model, X)[1] == s
            assert call_jax(model.method, X)[1] == s
    assert len(traced) == 4
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


def test_traces_die_with_their_function() -> None:
    state: list[float] = [2.0]

    def fn(x: Any) -> Any:
        return x * state[0]

    x = X.clone().requires_grad_()
    out = call_jax(fn, x)
    weak = weakref.ref(fn), weakref.ref(functions.table.traces_of(fn))
    assert functions.table.count() == 1
    del fn
    gc.collect()
    assert functions.table.count() == 1, "the graph may still call it"
    out.sum().backward()
    assert (x.grad == 2).all(), "what backward needs lives on"
    del out
    gc.collect()
    assert [w() for w in weak] == [None, None]
    assert functions.table.count() == 0


@pytest.mark.filterwarnings("ignore::attnspan.torch.RetraceWarning")
def test_an_id_that_is_taken_again_is_another_function() -> None:
    state: list[float] = [0.0]
    seen: set[int] = set()
    again = 0
    for i in range(300):
        state[0] = float(i)

        # Not shared, as the list may change: known by its id while it lives.
        def fn(x: Any) -> Any:
            return x * state[0]

        again += id(fn) in seen
        seen.add(id(fn))
        assert functions.table.traces_of(fn).name.endswith("fn")
        if i % 60 == 0:
            assert call_jax(fn, X)[1] == i
        del fn
    assert again, "ids were taken again"


def test_ten_thousand_fresh_closures_are_flat() -> None:
    x = X.clone().requires_grad_()

    def step() -> None:
        call_jax(scale_by(2.0), x).sum().backward()
        x.grad = None

    for _ in range(500):
        step()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, functions.table.count()
    for _ in range(9_500):
        step()
    gc.collect()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, functions.table.count()
    assert after[0] - before[0] < 4_096, "4 MiB, or 0.4 KiB a call"
    assert after[1] == before[1] <= 2
    assert len(traced) == 1


def test_functions_that_never_match_are_warned_of() -> None:
    with pytest.warns(RetraceWarning, match=r"scaled of .*test_call_jax_cache.* traced as 64 functions"):
        [functions.table.traces_of(scale_by(float(i))) for i in range(64)]


def test_jax_settings_are_part_of_the_meaning() -> None:
    def ones(x: Any) -> Any:
        return jnp.ones(2) + x[0].astype(float)

    assert call_jax(ones, X).dtype == torch.float32
    with jax.enable_x64(True):
        assert call_jax(ones, X).dtype == torch.float64
    assert call_jax(ones, X).dtype == torch.float32


def _in_threads(run: Callable[[int], None], count: int) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(i: int) -> None:
        start.wait()
        try:
            run(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_share_one_trace() -> None:
    def run(i: int) -> None:
        for k in range(10):
            x = (X * (i + k)).requires_grad_()
            out = call_jax(scale_by(2.0), x)
            out.sum().backward()
            assert torch.equal(out, x * 2)
            assert (x.grad == 2).all()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        _in_threads(run, 8)
    finally:
        sys.setswitchinterval(interval)
    assert len(traced) == 1


def test_threads_with_functions_of_their_own() -> None:
    def run(i: int) -> None:
        state = [float(i)]
        for k in range(4):
            s = float(i * 10 + k)
            assert call_jax(scale_by(s), X)[1] == s
            assert call_jax(lambda x: x * state[0], X)[1] == i

    _in_threads(run, 6)


def test_shapes_beyond_the_limit_are_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MOST_PROGRAMS", 3)
    fn = scale_by(2.0)

    def call(n: int) -> Tensor:
        return call_jax(fn, torch.ones(n))

    for n in (1, 2, 3, 4, 4, 3, 2, 1):
        assert call(n).shape == (n,)
    assert len(traced) == 5
