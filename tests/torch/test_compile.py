"""What the compiler sees: one node, no breaks, a bounded number of compilations."""

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from covering import everything
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import Mask, Prepared, Spans, causal, segments
from attnspan.torch import attention

# Dynamo itself makes an instance of each autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

FRESH = """
import torch
from attnspan import causal, from_predicate, segments
from attnspan.torch import attention

ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
q, k = torch.randn(1, 4, 6, 16, requires_grad=True), torch.randn(1, 2, 6, 16, requires_grad=True)

@torch.compile(fullgraph=True, backend={backend!r})
def run(q, k):
    def same_document(b, h, i, j):
        return ids[b, i] == ids[b, j]

    return attention(q, k, k, mask=causal() & segments(ids) & from_predicate(same_document))

compiled = run(q, k)
grads = torch.autograd.grad(compiled.square().sum(), (q, k))
eager = attention(q, k, k, mask=causal() & segments(ids), backend="cpu")
for a, b in zip(grads, torch.autograd.grad(eager.square().sum(), (q, k))):
    torch.testing.assert_close(a, b)
torch.testing.assert_close(compiled, eager)
print("same")
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_fullgraph_at_the_first_call_of_a_fresh_process(backend: str) -> None:
    command = [sys.executable, "-c", FRESH.format(backend=backend)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _inside(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    return attention(q, k, k, mask=causal() & segments(ids))


def _outside(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    return attention(q, k, k, mask=mask)


def _prepared(ids: Tensor) -> Prepared:
    mask = causal() & segments(ids)
    return mask.prepare(ids.shape[1], ids.shape[1], batch=ids.shape[0], like=ids)


def _run_shapes(inside: bool, shapes: list, *, mark: bool, backend: str = "aot_eager") -> list[int]:
    """Run fullgraph over the shapes with a new mask each; the number of compilations after each call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    function: Any = _inside if inside else _outside
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    counts = []
    for batch, length in shapes:
        q, k = _inputs(batch, length)
        ids = torch.randint(0, 2, (batch, length)).cumsum(-1)
        mask: Any = ids if inside else _prepared(ids)
        if mark:
            of_mask = (ids, (0, 1)) if inside else (mask.lowered.bounds, (0, 2))
            for x, dims in [(q, (0, 2)), (k, (0, 2)), of_mask]:
                for dim in dims:
                    torch._dynamo.mark_dynamic(x, dim)
        out = compiled(q, k, mask)
        out.sum().backward()
        torch.testing.assert_close(out, function(q, k, mask))
        counts.append(counter.frame_count)
    return counts


def _shapes(count: int) -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [(generator.randint(2, 5), generator.randint(2, 90)) for _ in range(count)]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_few_compilations_over_many_shapes(inside: bool) -> None:
    # The short run has no batch of one row, which is a program of its own.
    shapes = _shapes(4) if not everything() else [(1, 17), *_shapes(6), (1, 7), *_shapes(12)[6:]]
    counts = _run_shapes(inside, shapes, mark=False, backend="aot_eager" if everything() else "eager")
    assert counts[-1] <= (4 if everything() else 3), counts
    assert counts[-1] == counts[-2], "compilations must end early"


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_one_compilation_where_dims_are_marked_dynamic(inside: bool) -> None:
    assert _run_shapes(inside, _shapes(3), mark=True) == [1, 1, 1]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_new_mask_of_the_same_shape_is_no_recompilation(inside: bool) -> None:
    assert _run_shapes(inside, [(2, 33)] * 3, mark=False, backend="eager") == [1] * 3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", [[0, 7], [0, -1], [3, 2], [-1, 3]], ids=str)
def test_illegal_spans_are_never_plausible(row: list[int], compiled: bool) -> None:
    x = torch.randn(1, 1, 3, 8)
    bounds = torch.tensor([[0, 1], row, [0, 3]], dtype=torch.int32).view(1, 1, 3, 1, 2)

    def run(x: Tensor, bounds: Tensor, backend: str) -> Tensor:
        return attention(x, x, x, mask=Spans(bounds, 3), backend=backend)

    attend = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with pytest.raises(ValueError, match="row 1"):
        attend(x, bounds, "cpu")
    if compiled:  # It waits for no value.
        assert attend(x, bounds, "math").isnan().all(-1).flatten().tolist() == [False, True, False]
    else:
        with pytest.raises(ValueError, match="row 1"):
            attend(x, bounds, "math")
