"""A block of attention: {eager, compiled} x checkpointing x masks and options; export; no copies."""

import re
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from checkpointing import FORWARD_CALLS, checkpointed
from closeness import relative_error
from covering import cells, everything, few
from samples.torch_calls import K_LEN, MASKS, Q_LEN, counted_kernel_calls
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from attnspan import Mask, causal, relative
from attnspan.torch import attention

WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
SPLIT = (HEADS, KV_HEADS, KV_HEADS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # Imported by inductor.
]


class Block(nn.Module):
    """Attention on a fused projection, under a mask, or causal with every option and a seed."""

    ac = "none"

    def __init__(self, options: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, sum(SPLIT) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        if options:
            self.table = nn.Parameter(torch.randn(HEADS, 9))
            self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return checkpointed(self.ac, self.attend, x, given)  # type: ignore[no-any-return]

    def attend(self, x: Tensor, given: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(SPLIT), -1)).split(SPLIT, 2)
        options: dict[str, Any] = {"mask": given}
        if hasattr(self, "table"):
            options = {"mask": causal(), "softcap": 5.0, "bias": relative(self.table), "sinks": self.sinks}
            options |= {"dropout_p": 0.25, "dropout_seed": given}
        return x + self.out(attention(q, k, v, layout="bshd", **options).flatten(2))  # type: ignore[no-any-return]


def _run(backend: str | None, ac: str, given: Any) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = Block(isinstance(given, Tensor))
    model.ac = ac
    x = torch.randn(2, Q_LEN, WIDTH, requires_grad=True)
    if backend is not None:
        model.compile(fullgraph=True, backend=backend)
    with counted_kernel_calls() as calls:
        out = model(x, given)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], calls


def _mask(name: str) -> Mask:
    return MASKS[name]().prepare(Q_LEN, K_LEN, batch=2, heads=HEADS, like=torch.empty(0))


def _close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        # Sums over at most BATCH * Q_LEN * WIDTH products, in another order: a few roundings each.
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


#: A backend of the compiler, or none, with a kind of checkpointing.
KINDS = [*product((None, "aot_eager"), FORWARD_CALLS), *[("inductor", "selective")] * everything()]
DROPOUT = "all options, and a seed"
DROPPED = [((None, "selective"), DROPOUT), ((None, "full"), DROPOUT), (("aot_eager", "full"), DROPOUT)]


# Masks come prepared, so that a mask is no more than its spans to either factor. A second run drops the same.
@pytest.mark.parametrize(
    ("kind", "name"), cells(KINDS, [DROPOUT, *few(MASKS, 3)], strength=1, named=DROPPED), ids=str
)
def test_cell(kind: tuple[str | None, str], name: str) -> None:
    (backend, ac), given = kind, torch.tensor(9) if name == DROPOUT else _mask(name)
    got, calls = _run(backend, ac, given)
    wanted, _ = _run(None, "none", given)
    assert (calls.count("forward"), calls.count("backward")) == (FORWARD_CALLS[ac], 1)
    _close(got, wanted)


def test_export_keeps_one_node() -> None:
    block = Block(options=True).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    example = (torch.randn(2, 24, WIDTH), torch.tensor(3))
    program = torch.export.export(block, example, dynamic_shapes=({1: length}, None))
    nodes = [node for node in program.graph.nodes if "attnspan" in str(node.target)]
    assert [node.target for node in nodes] == [torch.ops.attnspan.attention.default]
    x, seed = torch.randn(2, 31, WIDTH), torch.tensor(8)
    torch.testing.assert_close(program.module()(x, seed), block(x, seed))


def test_the_program_copies_nothing_and_stores_no_scores() -> None:
    """q, k and v are read where the projection wrote them, and no buffer has q_len * k_len elements."""
    length, block = 331, Block(options=True)
    x, seed = torch.randn(2, length, WIDTH, requires_grad=True), torch.tensor(1)

    def step(run: Any) -> list[Tensor]:
        out = run(x, seed)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]

    found, programs = run_and_get_code(step, torch.compile(block, fullgraph=True, backend="inductor"))
    _close(found, step(block))
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
    (call,) = re.findall(r"torch\.ops\.attnspan\.attention\.default\((.*)\)", programs[0])
    views = re.findall(r"reinterpret_tensor\((buf\d+), \(2, [42], 331, 8\), \(\d+, 8, 64, 1\), (\d+)\)", call)
    assert [int(offset) for _, offset in views] == [0, HEADS * DIM, (HEADS + KV_HEADS) * DIM]
    assert len({buffer for buffer, _ in views}) == 1
