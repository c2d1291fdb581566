"""Foreign kernels under torch.compile: the field's three failures are gone with `wrap`."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from checkpointing import FORWARD_CALLS, checkpointed
from closeness import relative_error
from covering import everything, few
from foreign_kernel import Library, fresh_name, inputs, wrap_foreign
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import causal
from attnspan.torch import Wrapped, attention, wrap

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own


def _around(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A model around the kernel: something before it and something after it."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.25) -> Tensor:
        return kernel(q * 2, k, v, softmax_scale=scale, causal=True)[0] + 1

    return run


# Failure 1: the graph breaks at the extension call.


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_with_wrap_it_is_one_graph(foreign: Library, backend: str) -> None:
    q, k, v = inputs(grad=True)
    run = _around(wrap_foreign(foreign, "whole"))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    out = compiled(q, k, v)
    assert counter.frame_count == 1
    assert torch.equal(out, _around(foreign.forward)(*(x.detach() for x in (q, k, v))))
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted_out = (
        attention(exact[0] * 2, *exact[1:], mask=causal(), scale=0.25, layout="bshd", backend="math") + 1
    )
    wanted = torch.autograd.grad(wanted_out.square().sum(), exact)
    for a, b in zip((out, *got), (wanted_out, *wanted), strict=True):
        # The library sums in float64 and rounds results once; the model around it rounds a few times more.
        assert relative_error(a, b) <= 4 * torch.finfo(torch.float32).eps


# Failure 2: "expected size 12==12, stride 24==8": the fake kernel tells other strides than the kernel makes.


def _head_major(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns (B, S, H, D) that is stored as (B, H, S, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).contiguous().transpose(1, 2)


@pytest.mark.slow
def test_with_wrap_strides_are_those_of_eager_mode_and_of_the_declaration() -> None:
    seen: list[tuple[int, ...]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q.stride())
        return torch.zeros(q.shape)

    def stored(q: Tensor) -> Tensor:
        batch, length, heads, dim = q.shape
        return q.new_empty(batch, heads, length, dim).transpose(1, 2)

    shown = wrap(spy, name=fresh_name("spy"), strides="any")
    honest = wrap(_head_major, name=fresh_name("honest"), outputs=stored, layout="bshd")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        q = (x * 2).expand(2, 6, 3, 8).transpose(1, 2)
        return shown(q, q, q), honest(x, x, x) + 1

    x = torch.randn(2, 1, 3, 8)
    eager = run(x)
    # The tags of an operator are no part of the caches' keys.
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        compiled = torch.compile(run, fullgraph=True)(x)
    assert seen == [(24, 8, 0, 1)] * 2
    assert torch.equal(compiled[1], eager[1])


# Failure 3: recompilations until the limit.


def _count(run: Callable[..., Tensor], calls: list[tuple]) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for call in calls:
        compiled(*call)
    return counter.frame_count


def _varlen(q: Tensor, k: Tensor, v: Tensor, max_seqlen: int) -> Tensor:
    assert type(max_seqlen) is int, "a kernel is given numbers"
    return q + k + v * max_seqlen


@pytest.mark.slow
@pytest.mark.parametrize("schema", few([None, "Tensor q, Tensor k, Tensor v, int max_seqlen"], 1))
def test_with_wrap_a_length_that_varies_is_one_more_compilation(schema: str | None) -> None:
    wrapped = wrap(_varlen, name=fresh_name("varlen"), schema=schema)
    q, k, v = inputs()
    # Once for the first value, once more with the value as an unknown.
    calls = [(q, k, v, 100 + n) for n in range(torch._dynamo.config.recompile_limit + 4)]
    assert _count(lambda *x: wrapped(*x), calls) == 2


@pytest.mark.slow
def test_a_scale_that_is_declared_to_vary_is_one_more_compilation(foreign: Library) -> None:
    q, k, v = inputs()
    wrapped, scales = wrap_foreign(foreign, "varying", varying=("softmax_scale",)), (0.1, 0.2, 0.4)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        _count(_around(wrap_foreign(foreign, "constant")), [(q, k, v, scale) for scale in scales])
    assert _count(_around(wrapped), [(q, k, v, scale) for scale in scales]) == 2
    for given in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        assert torch.equal(wrapped(q, k, v, given)[0], foreign.forward(q, k, v, 0.3)[0])
    assert torch.equal(wrapped(q, k, v)[0], foreign.forward(q, k, v)[0])


@pytest.mark.slow
def test_few_compilations_over_many_shapes(foreign: Library) -> None:
    generator = random.Random(0)
    sizes = [(generator.randint(2, 40), generator.randint(2, 5)) for _ in range(4)]
    calls = [tuple(inputs(length, length, batch, grad=True)) for length, batch in sizes]
    if everything():
        assert _count(_around(wrap_foreign(foreign, "shapes")), calls) <= 4
    for x, dim in itertools.product(itertools.chain(*calls), (0, 1)):
        torch._dynamo.mark_dynamic(x, dim)
    assert _count(_around(wrap_foreign(foreign, "marked")), calls) == 1


# The matrix: compilers x activation checkpointing.


class Model(nn.Module):
    """A block of attention under one kind of activation checkpointing."""

    def __init__(self, wrapped: Wrapped, ac: str) -> None:
        super().__init__()
        self.wrapped, self.ac = wrapped, ac
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def block(self, x: Tensor) -> Tensor:
        # Slices of one projection, which break the kernel's contract: it reads contiguous memory only.
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).unbind(2)
        out, lse = self.wrapped(q, k, v, causal=True)
        return x + self.out(out.flatten(2)) + lse.logsumexp(1).unsqueeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.ac, self.block, x)  # type: ignore[no-any-return]


def _step(wrapped: Wrapped, ac: str, compiler: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Model(wrapped, ac), torch.randn(2, 10, 24, requires_grad=True)
    if compiler != "eager":
        model.compile(fullgraph=True, backend=compiler)
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("ac", FORWARD_CALLS)
def test_checkpointing_under_each_compiler(foreign: Library, compiler: str, ac: str) -> None:
    wrapped = wrap_foreign(foreign, "cell")
    wanted = _step(wrapped, "none", "eager")
    before = foreign.calls
    got = _step(wrapped, ac, compiler)
    assert foreign.calls - before == FORWARD_CALLS[ac]
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


def test_recompute_compiled() -> None:
    wrapped = wrap(_head_contiguous, name=fresh_name("recompute"), layout="bshd", backward="recompute")
    q, k, v = inputs(grad=True)
    run = torch.compile(lambda *x: wrapped(*x).square(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(run(q, k, v).sum(), (q, v))
    wanted = torch.autograd.grad(_head_contiguous(q, k, v).square().sum(), (q, v))
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) <= 4 * torch.finfo(torch.float32).eps


def _head_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # what a compiler cannot look into
    return _head_major(q, k, v).contiguous()


def test_export_keeps_one_node_per_call(foreign: Library) -> None:
    wrapped = wrap_foreign(foreign, "export")

    class Block(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return wrapped(wrapped(q, k, k)[0], k, k)[0]

    q, k, _ = (x.detach() for x in inputs())
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Block(), (q, k), dynamic_shapes=({1: length}, {1: length}))
    assert [node.target for node in program.graph.nodes].count(wrapped.op) == 2
    q, k, _ = (x.detach() for x in inputs(17, 17))
    assert torch.equal(program.module()(q, k), Block()(q, k))
