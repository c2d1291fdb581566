"""Compiled programs meet new batch sizes and lengths: few compilations, one where axes are marked, exports."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from length_samples import DIM, HEADS, KV_HEADS, MASKS, PROBLEMS, Sample, Sizes
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import attnspan
from attnspan.torch import attention

NOT_MASKS = {"Mask", "Prepared", "SpansLargerThanMask", "register_pytrees"}
ORDERS = {"morton_order", "strided_order", "tile_order"}

_counts: dict[str, list[Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def _table() -> Any:
    """Print what was counted, under `pytest -s`."""
    yield
    print("\n| call | compilations | marked | exported |\n|---|---|---|---|")
    for name, row in sorted(_counts.items()):
        print(f"| {name} | {' | '.join(map(str, row))} |")


class Program:
    """A call that a compiler reads, and its inputs for a problem."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __call__(self, q: Tensor, k: Tensor, *arrays: Any) -> Tensor:
        if self.sample.outside:
            return attention(q, k, k, mask=arrays[0])
        return attention(q, k, k, mask=self.sample.build(k.shape[2], *arrays))

    def inputs(self, s: Sizes) -> tuple[Any, ...]:
        sample = self.sample
        s = s if sample.batch is None else replace(s, batch=sample.batch)
        keys = sample.keys(s)
        q = torch.randn(s.batch, HEADS, sample.rows(keys), DIM)
        k = torch.randn(s.batch, KV_HEADS, keys, DIM)
        if not sample.outside:
            return q, k, *sample.arrays(s)
        mask = sample.build(keys, *sample.arrays(s))
        return q, k, mask.prepare(q.shape[2], keys, batch=s.batch, like=q)


def _varying(program: Program) -> list[dict[int, tuple[int, int]]]:
    """For each input the axes that vary, each with its sizes in two problems, which tell axes apart."""
    first, second = (tree_leaves(program.inputs(s)) for s in PROBLEMS[:2])
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if isinstance(x, Tensor)]
    return [
        {d: (x.shape[d], y.shape[d]) for d in range(x.dim()) if x.shape[d] != y.shape[d]} for x, y in pairs
    ]


def _count(program: Program, problems: Sequence[Sizes], marked: bool = False) -> int:
    torch._dynamo.reset()
    axes = _varying(program) if marked else []
    counter = CompileCounterWithBackend("eager")
    # Not the method itself: its code would be shared with other programs.
    compiled = torch.compile(lambda *x: program(*x), fullgraph=True, backend=counter)
    for problem in problems:
        torch.manual_seed(problem.length)
        inputs = program.inputs(problem)
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        for x, dims in zip(tensors, axes, strict=False):
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(*inputs), program(*inputs))
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("sample", MASKS, ids=lambda s: s.name)
def test_few_compilations(sample: Sample) -> None:
    count = _count(Program(sample), PROBLEMS)
    _counts.setdefault(sample.name, ["-"] * 3)[0] = count
    assert count <= 4


@pytest.mark.slow
@pytest.mark.parametrize("sample", MASKS, ids=lambda s: s.name)
def test_one_compilation_where_axes_are_marked(sample: Sample) -> None:
    count = _count(Program(sample), [s for s in PROBLEMS if s.batch > 1], marked=True)
    _counts.setdefault(sample.name, ["-"] * 3)[1] = count
    assert count == 1


class Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, q: Tensor, k: Tensor, *arrays: Any) -> Tensor:
        return self.program(q, k, *arrays)


@pytest.mark.slow
@pytest.mark.parametrize("sample", MASKS, ids=lambda s: s.name)
def test_strict_export(sample: Sample) -> None:
    program = Program(sample)
    inputs = program.inputs(PROBLEMS[0])
    exported = torch.export.export(Module(program), inputs, dynamic_shapes=_dims(program), strict=True)
    for problem in PROBLEMS[1:4]:
        given = program.inputs(problem)
        torch.testing.assert_close(exported.module()(*given), program(*given))
    _counts.setdefault(sample.name, ["-"] * 3)[2] = "yes"


def _dims(program: Program) -> Any:
    """A `Dim` for each axis that varies; axes of the same sizes share it."""
    named: dict[tuple[int, int], Any] = {}

    def dim(sizes: tuple[int, int]) -> Any:
        x, y = sizes
        return named.setdefault(sizes, torch.export.Dim(f"size_{x}_{y}", min=2, max=4096))

    specs = [{d: dim(sizes) for d, sizes in axes.items()} for axes in _varying(program)]
    q, k, *arrays = specs
    return {"q": q, "k": k, "arrays": tuple(arrays)}


def test_every_mask_has_a_sample() -> None:
    public = (set(attnspan.masks.__all__) | set(attnspan.library.__all__)) - NOT_MASKS - ORDERS
    assert public == {sample.function for sample in MASKS}
