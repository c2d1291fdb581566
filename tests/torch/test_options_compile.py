"""Options under the compiler, checkpointing and export: one node, few compilations, equal gradients."""

import random
import re
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from checkpointing import checkpointed
from closeness import relative_error
from covering import everything, few
from samples import OPTIONS, counted_kernel_calls, parameters
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from attnspan import Prepared, alibi, cache, causal, relative, segments
from attnspan.kernels import cpu
from attnspan.torch import attention

HEADS = 4
EPS = torch.finfo(torch.float32).eps


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _run(q: Tensor, k: Tensor, ids: Tensor, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=causal() & segments(ids), **options) for options in several]


def _agree(compiled: Callable[..., list[Tensor]], names: list[str], batch: int, length: int) -> None:
    """Run both on fresh inputs, and compare outputs and every gradient."""
    q, k = _inputs(batch, length)
    ids = torch.randint(0, 2, (batch, length)).cumsum(-1)
    several = [OPTIONS[name](batch, HEADS, length, length) for name in names]
    wanted = [q, *parameters(several)]
    results = []
    for run in (compiled, _run):
        outs = run(q, k, ids, several)
        results.append([*outs, *torch.autograd.grad(torch.stack(outs).square().sum(), wanted)])
    for got, true in zip(*results, strict=True):
        assert got.dtype == true.dtype
        torch.testing.assert_close(got, true)


# Each kind of array once: the next test has "all".
@pytest.mark.parametrize(
    "names",
    [[x] for x in OPTIONS] if everything() else [["dense per row", "alibi per row", "t5"]],
    ids=str,
)
def test_every_option_compiles_in_full_and_once(names: list[str]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_run, fullgraph=True, backend=counter)
    for _ in range(2):  # New values of everything: seed, slopes, table, mask.
        _agree(compiled, names, 2, 33)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", few(["all", "dense", "dropout seeds", "alibi per row"], 1))
def test_few_compilations_over_many_shapes(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_run, fullgraph=True, backend=counter)
    generator = random.Random(0)
    for _ in range(6 if everything() else 3):
        _agree(compiled, [name], generator.randint(2, 5), generator.randint(2, 90))
    assert counter.frame_count <= 2


def test_a_new_seed_or_new_slopes_are_no_recompilation_but_take_effect() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, k: Tensor, slopes: Tensor, seed: Tensor) -> Tensor:
        return attention(q, k, k, bias=alibi(slopes), dropout_p=0.3, dropout_seed=seed)

    q, k = _inputs(2, 33)
    slopes = torch.rand(HEADS)
    outs = [run(q, k, slopes * n, torch.tensor(seed)) for n in range(3) for seed in (5, 2**60)]
    assert counter.frame_count == 1
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert not torch.equal(a, b)


def test_positions_of_a_prepared_mask_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def run(q: Tensor, k: Tensor, slopes: Tensor, mask: Prepared) -> Tensor:
        return attention(q, k, k, mask=mask, bias=alibi(slopes))

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    k, slopes = torch.randn(2, 2, 24, 16), torch.rand(HEADS)
    for lengths in ([24, 13], [5, 9], [3, 3]):
        q = torch.randn(2, HEADS, 3, 16)
        mask = (causal() & cache(torch.tensor(lengths))).prepare(3, 24, batch=2, like=q)
        torch.testing.assert_close(compiled(q, k, slopes, mask), run(q, k, slopes, mask))
    assert counter.frame_count == 1


class Block(nn.Module):
    """Attention with every option on a fused projection."""

    def __init__(self, kv_heads: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.heads = (HEADS, kv_heads, kv_heads)
        self.qkv = nn.Linear(32, sum(self.heads) * dim, bias=False)
        self.out = nn.Linear(HEADS * dim, 32, bias=False)
        self.table = nn.Parameter(torch.randn(HEADS, 9))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)
        mixed = attention(
            *(q, k, v),
            mask=causal(),
            softcap=5.0,
            bias=relative(self.table),
            sinks=self.sinks,
            dropout_p=0.25,
            dropout_seed=seed,
            layout="bshd",
        )
        return x + self.out(mixed.flatten(2))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        return checkpointed(self.kind, self.block, x, seed)  # type: ignore[no-any-return]


def _step(kind: str, compiled: bool) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = Checkpointed(kind)
    x = torch.randn(2, 24, 32, requires_grad=True)
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    with counted_kernel_calls() as calls:
        out = model(x, torch.tensor(9))
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], calls


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_what_is_recomputed_drops_the_same(kind: str, forwards: int, compiled: bool) -> None:
    got, calls = _step(kind, compiled)
    wanted, _ = _step("none", compiled=False)
    assert (calls.count("forward"), calls.count("backward")) == (forwards, 1)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) <= 16 * EPS


def test_export_keeps_one_node() -> None:
    block = Block().eval()
    length = torch.export.Dim("length", min=2, max=4096)
    example = (torch.randn(2, 24, 32), torch.tensor(3))
    program = torch.export.export(block, example, dynamic_shapes=({1: length}, None))
    nodes = [node for node in program.graph.nodes if "attnspan" in str(node.target)]
    assert [node.target for node in nodes] == [torch.ops.attnspan.forward.default]
    x, seed = torch.randn(2, 31, 32), torch.tensor(8)
    torch.testing.assert_close(program.module()(x, seed), block(x, seed))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # imported by inductor
def test_the_program_copies_nothing_and_stores_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v are read where the projection wrote them, and no buffer has q_len * k_len elements."""
    length, block = 331, Block()
    offsets: list[tuple[int, ...]] = []
    original = cpu.forward

    def spy(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> None:
        offsets.append(tuple(x.storage_offset() for x in (q, k, v)))
        assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1 or len(offsets) > 1
        original(q, k, v, *rest, **options)

    monkeypatch.setattr(cpu, "forward", spy)
    compiled = torch.compile(block, fullgraph=True, backend="inductor")

    x, seed = torch.randn(2, length, 32, requires_grad=True), torch.tensor(1)

    def step() -> list[Tensor]:
        out = compiled(x, seed)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]

    found, programs = run_and_get_code(step)
    wanted = block(x, seed)
    for a, b in zip(
        found, [wanted, *torch.autograd.grad(wanted.square().sum(), [x, *block.parameters()])], strict=True
    ):
        assert relative_error(a, b) <= 16 * EPS
    assert offsets[:1] == [(0, HEADS * 8, (HEADS + 2) * 8)]
    assert len(programs) == 2
    buffers = [
        tuple(map(int, shape.strip("(,) ").split(",")))
        for program in programs
        for shape in re.findall(r"= empty_strided_cpu\((\([^)]*\)),", program)
    ]
    assert (2 * length, 64) in buffers  # the projection: the pattern does find buffers
    assert max(map(prod, buffers)) < length**2
    for program in programs:
        assert not re.search(r"aten\.(clone|copy|constant_pad_nd)|contiguous", program)
    (call,) = re.findall(r"torch\.ops\.attnspan\.forward\.default\((.*)\)", programs[0])
    views = re.findall(r"reinterpret_tensor\((buf\d+), \(2, [42], 331, 8\), \(\d+, 8, 64, 1\)", call)
    assert len(views) == 3
    assert len(set(views)) == 1
