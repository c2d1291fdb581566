"""Compiled programs meet new batch sizes and lengths: few compilations, one where axes are marked, exports."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from length_samples import DIM, HEADS, KV_HEADS, MASKS, PROBLEMS, Sample, Sizes
from torch import Tensor
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


def _count(program: Callable[..., Tensor], inputs: Any, mark: Callable[[Any], None]) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(program, fullgraph=True, backend=counter)
    for problem in PROBLEMS:
        if problem.batch == 1 and mark is not _nothing:
            continue
        torch.manual_seed(problem.length)
        given = inputs(problem)
        mark(given)
        torch.testing.assert_close(compiled(*given), program(*given))
    return counter.frame_count


def _nothing(_: Any) -> None:
    pass


@pytest.mark.parametrize("sample", MASKS, ids=lambda s: s.name)
def test_few_compilations(sample: Sample) -> None:
    program = Program(sample)
    count = _count(program.__call__, program.inputs, _nothing)
    _counts.setdefault(sample.name, [0, 0, "no"])[0] = count
    assert count <= 4


def test_every_mask_has_a_sample() -> None:
    public = (set(attnspan.masks.__all__) | set(attnspan.library.__all__)) - NOT_MASKS - ORDERS
    assert public == {sample.function for sample in MASKS}
