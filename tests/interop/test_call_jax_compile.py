"""JAX functions under torch.compile, fake tensors, functionalisation, checkpointing."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from covering import few
from programs import run_program
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from watching import Watching

from attnspan import causal, segments
from attnspan.torch import SpecializedShapesWarning, attention, call_jax

jax = pytest.importorskip("jax")
jnp = jax.numpy
bridge = importlib.import_module("attnspan.interop._call_jax")
functions = pytest.importorskip("attnspan.interop._functions")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
compiles = pytest.mark.skipif(
    not bridge._TELLS_FUNCTIONS_APART, reason="compilers of torch before 2.13 do not tell functions apart"
)


def mix(x: Any, w: Any, *, k: float = 1.0) -> Any:
    return {"y": jnp.tanh(x @ w) * k, "rest": [jnp.exp(x), (jnp.arange(3), None)]}


def _randn(*shape: int, seed: int = 0, **given: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **given)


def _step(x: Tensor, w: Tensor, k: float = 2.0) -> Tensor:
    out = call_jax(mix, x * 2, w, k=k)
    return out["y"].square().sum() + (out["rest"][0] + out["rest"][1][0]).sum()


@pytest.mark.long  # The other tests take aot_eager.
@compiles
def test_compiled_by_inductor_is_eager() -> None:
    x, w = _randn(5, 3, requires_grad=True), _randn(3, 4, seed=1, requires_grad=True)
    want = torch.autograd.grad(_step(x, w), (x, w))
    compiled = torch.compile(_step, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(x, w), (x, w)), want, strict=True):
        torch.testing.assert_close(a, b)


FIRST = """
import torch
from attnspan.torch import call_jax
def fn(x):
    import jax.numpy as jnp
    return jnp.sin(x)
x = torch.ones(4, requires_grad=True)
out = torch.compile(lambda x: call_jax(fn, x), fullgraph=True, backend="aot_eager")(x)
out.sum().backward()
assert torch.allclose(x.grad, x.cos())
print("ok")
"""


@pytest.mark.long
@compiles
def test_the_first_call_of_a_process_is_compiled() -> None:
    assert run_program("-c", FIRST, OMP_NUM_THREADS="1").strip() == "ok"


def scale_by(s: Any) -> Callable[[Any], Any]:
    return lambda x: x * s


@pytest.mark.skipif(bridge._TELLS_FUNCTIONS_APART, reason="for torch before 2.13")
def test_a_compiler_that_tells_no_functions_apart_is_refused() -> None:
    step = torch.compile(lambda x: call_jax(jnp.sin, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"call_jax in a compiled function: expected torch 2\.13 or newer"):
        step(_randn(5))


class Scaled(nn.Module):
    """Calls the function that it holds."""

    def __init__(self, s: float, fn: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.s, self.fn = s, fn or self.method

    def method(self, x: Any) -> Any:
        return x * self.s

    def forward(self, x: Tensor) -> Tensor:
        return call_jax(self.fn, x)


FORMS: dict[str, Callable[[float], Callable[[Any], Any]]] = {
    "closure": scale_by,
    "partial": lambda s: partial(jnp.multiply, s),
    "partial of a method": lambda s: partial(Scaled(s).method),
    "method": lambda s: Scaled(s).method,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", few(FORMS, 2))
@compiles
def test_functions_of_one_code_are_told_apart(form: str) -> None:
    x, module = _randn(5, requires_grad=True), Scaled(1.0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    step = torch.compile(lambda x, fn: call_jax(fn, x), fullgraph=True, backend="aot_eager")
    for s in (2.0, 3.0):
        module.fn = FORMS[form](s)
        for out in (step(x, module.fn), compiled(x)):
            torch.testing.assert_close(out, x * s)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full((5,), s))


@pytest.mark.slow
@compiles
def test_static_numbers_that_change() -> None:
    step = torch.compile(_step, fullgraph=True, backend="aot_eager")
    x, w = _randn(5, 3), _randn(3, 4, seed=1)
    for k in (2.0, 3.0):
        torch.testing.assert_close(step(x, w, k), _step(x, w, k))


@pytest.mark.slow
@compiles
def test_masks_in_a_graph() -> None:
    def bounds(like: Any, *, mask: Any) -> Any:
        return mask.spans(5, 5, batch=1, like=like).bounds

    def step(x: Tensor, ids: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        return call_jax(bounds, x, mask=causal() & segments(ids)), call_jax(bounds, x, mask=mask)

    ids = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    mask = causal() & segments(ids)
    want = mask.spans(5, 5, batch=1, like=torch.ones(1)).bounds
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        assert all(torch.equal(got, want) for got in run(_randn(5), ids, mask))


class Pair(NamedTuple):
    a: Any
    b: Any


@compiles
def test_results_that_a_graph_cannot_hold_are_refused() -> None:
    step = torch.compile(lambda x: call_jax(lambda x: Pair(x, x), x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="arrays in tuples, lists and dicts, got a Pair"):
        step(_randn(3))


# Dynamic shapes.


def _shaped(x: Any) -> Any:
    halves = jnp.concatenate([x, x])[: x.shape[0] // 2 + 1]
    return (jnp.sin(x) * x.shape[0]).reshape(-1), halves.sum(1)


@pytest.mark.slow
@compiles
def test_one_graph_for_all_sizes() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: call_jax(_shaped, x), fullgraph=True, backend=counter)
    for n in (5, 12):
        x = _randn(n, 4, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        flat, halves = step(x)
        want = call_jax(_shaped, x)
        torch.testing.assert_close((flat, halves), want)
        cotangents = torch.ones_like(flat), torch.ones_like(halves)
        got = torch.autograd.grad((flat, halves), x, cotangents)
        torch.testing.assert_close(got, torch.autograd.grad(want, x, cotangents))
    assert counter.frame_count == 1


@pytest.mark.slow
@compiles
def test_attention_of_jax_is_one_graph_for_all_lengths() -> None:
    from attnspan.jax import attention as attend

    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Any, ids: Any) -> Any:
        return call_jax(attend, q, q, q, mask=causal() & segments(ids), softcap=20.0)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (5, 16):
        q = _randn(1, 2, length, 8, requires_grad=True)
        ids = (torch.arange(length) // 3).int()[None]
        torch._dynamo.mark_dynamic(q, 2)
        torch._dynamo.mark_dynamic(ids, 1)
        want = attention(q, q, q, mask=causal() & segments(ids), softcap=20.0)
        for out in (compiled(q, ids), step(q, ids) if length == 5 else want):
            torch.testing.assert_close(out, want)
            got, wanted = (torch.autograd.grad(x.sum(), q, retain_graph=True) for x in (out, want))
            torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1


@pytest.mark.slow
@compiles
def test_one_function_in_graphs_of_fixed_and_of_free_sizes() -> None:
    # Of fixed sizes what backward needs is stored, of free ones it is computed again: one name, two ways.
    def fn(x: Any, y: Any) -> Any:
        return jnp.exp(jnp.sin(x)) * y.sum()

    step = torch.compile(lambda x, y: call_jax(fn, x, y), fullgraph=True, backend="aot_eager")
    outs = []
    for n, m in ((6, 4), (4, 4), (5, 3)):
        x, y = _randn(n, requires_grad=True), _randn(m, seed=1, requires_grad=True)
        outs.append((step(x, y), x, y))
    for out, x, y in outs:
        want = torch.autograd.grad(call_jax(fn, x, y).sum(), (x, y))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, y)), want)


@pytest.mark.slow
@compiles
def test_sizes_that_jax_cannot_take_as_symbols_are_numbers() -> None:
    def fn(x: Any) -> Any:
        return x * sum(range(x.shape[0]))

    step = torch.compile(lambda x: call_jax(fn, x), fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 6):
        x = _randn(n)
        with pytest.warns(SpecializedShapesWarning, match=r"fn cannot be traced by JAX .*dynamic=False"):
            out = step(x)
        torch.testing.assert_close(out, x * sum(range(n)))


def test_fake_tensors_run_nothing() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(_randn(5, 3, requires_grad=True))
        out = call_jax(lambda x: (x.T, x.sum()), x)
        assert [tuple(t.shape) for t in out] == [(3, 5), ()]
        assert torch.autograd.grad(out[1], x)[0].shape == (5, 3)


@compiles
def test_what_a_graph_calls_lives_on() -> None:
    import gc

    def make() -> Callable[[Tensor], Tensor]:
        fn = scale_by(7.0)
        return torch.compile(lambda x: call_jax(fn, x), fullgraph=True, backend="aot_eager")

    step = make()
    step(_randn(5))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: call_jax(scale_by(6.0), x))(_randn(5))
    functions._programs.clear()
    gc.collect()
    torch.testing.assert_close(step(_randn(5)), _randn(5) * 7)
    torch.testing.assert_close(graph(_randn(5)), _randn(5) * 6)


def test_a_name_of_another_process_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected a function of this process, got the unknown fn#1"):
        bridge.call_op([torch.ones(1)], "fn#1")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "reentrant", "selective", pytest.param("compiled", marks=compiles)])
def test_checkpointing(way: str) -> None:
    x, w = _randn(5, 3, requires_grad=True), _randn(3, 4, seed=1, requires_grad=True)
    want = torch.autograd.grad(_step(x, w), (x, w))
    contexts = partial(create_selective_checkpoint_contexts, [bridge.call_op, bridge.vjp_op])
    options = {"context_fn": contexts} if way == "selective" else {}

    def run(x: Tensor, w: Tensor) -> Any:
        return checkpoint(_step, x, w, use_reentrant=way == "reentrant", **options)

    if way == "compiled":
        got = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(x, w), (x, w))
    else:
        with Watching() as operators:
            run(x, w).backward()  # The only way that the reentrant kind knows.
        got = (x.grad, w.grad)
        assert operators.counts["attnspan.call_jax_vjp.default"] == (2 if way == "full" else 1)
        assert operators.counts["attnspan.call_jax_backward.default"] == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
