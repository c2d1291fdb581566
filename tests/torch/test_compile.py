"""What the compiler sees: one node, no breaks, a bounded number of compilations."""

from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything
from programs import run_program
from samples.parts import leaves
from samples.torch_calls import OPERATOR_ERROR, OPTIONS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import Mask, Spans, alibi, cache, causal, documents, key_padding, segments
from attnspan.torch import attention

# Dynamo itself makes an instance of each autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

HEADS = 4

FRESH = """
import torch
from attnspan import causal, from_predicate, segments
from attnspan.torch import attention

ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
q, k = torch.randn(1, 4, 6, 16, requires_grad=True), torch.randn(1, 2, 6, 16, requires_grad=True)

@torch.compile(fullgraph=True, backend="eager")
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


@pytest.mark.slow
def test_fullgraph_at_the_first_call_of_a_fresh_process() -> None:
    assert run_program("-c", FRESH).strip() == "same"


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _inside(q: Tensor, k: Tensor, ids: Tensor, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=causal() & segments(ids), **options) for options in several]


def _outside(q: Tensor, k: Tensor, mask: Mask, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=mask, **options) for options in several]


#: In the ordinary run each kind of array once.
KINDS = [*OPTIONS] if everything() else ["all", "dense, all heads, float16"]


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "names"), [(False, []), (True, KINDS)], ids=str)
def test_few_compilations_over_many_shapes(inside: bool, names: list[str]) -> None:
    """New values of everything, forward and backward. test_dynamic_lengths.py has axes that are marked."""
    counter = CompileCounterWithBackend("aot_eager" if everything() else "eager")
    function: Any = _inside if inside else _outside
    compiled, counts, random = torch.compile(function, fullgraph=True, backend=counter), [], Random(0)
    shapes = [(random.randint(2, 5), random.randint(2, 90)) for _ in range(12 if everything() else 2)]
    # A batch of one is a program of its own.
    for batch, length in [shapes[0], *shapes, *[(1, 17)] * everything()]:
        q, k = _inputs(batch, length)
        mask: Any = torch.randint(0, 2, (batch, length)).cumsum(-1)
        if not inside:
            mask = (causal() & segments(mask)).prepare(length, length, batch=batch, like=mask)
        several = [OPTIONS[name](batch, HEADS, length, length) for name in names] or [{}]
        results = []
        for run in (compiled, function):
            outs = run(q, k, mask, several)
            gradients = torch.autograd.grad(torch.stack(outs).square().sum(), [q, *leaves(several)])
            results.append([*outs, *gradients])
        torch.testing.assert_close(*results)  # dtypes too
        counts.append(counter.frame_count)
    assert counts[1] == 1, "new values of the same shapes are no recompilation"
    assert counts[-1] <= (4 if everything() else 2), counts


@pytest.mark.slow
def test_new_numbers_are_no_recompilation_but_take_effect() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(_outside, fullgraph=True, backend=counter)
    q, k, slopes, outs = torch.randn(2, HEADS, 3, 16), torch.randn(2, 2, 24, 16), torch.rand(HEADS), []
    for n, lengths in enumerate(([24, 13], [5, 9], [3, 3])):
        seed = torch.tensor(5 << 9 * n)
        options = [{"bias": alibi(slopes * (n + 1)), "dropout_p": 0.3, "dropout_seed": seed}]
        mask = (causal() & cache(torch.tensor(lengths))).prepare(3, 24, batch=2, like=q)
        outs += compiled(q, k, mask, options)
        torch.testing.assert_close(outs[-1], *_outside(q, k, mask, options))
    assert counter.frame_count == 1
    assert not any(torch.equal(a, b) for a, b in combinations(outs, 2))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_illegal_spans_are_never_plausible(compiled: bool) -> None:
    x = torch.randn(1, 1, 3, 8)

    def run(x: Tensor, bounds: Tensor, backend: str) -> Tensor:
        return attention(x, x, x, mask=Spans(bounds, 3), backend=backend)

    attend = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    for row in ([0, 7], [0, -1], [3, 2], [-1, 3]):
        bounds = torch.tensor([[0, 1], row, [0, 3]], dtype=torch.int32).view(1, 1, 3, 1, 2)
        with pytest.raises(OPERATOR_ERROR, match="query 1"):
            attend(x, bounds, "cpu")
        if compiled:  # It waits for no value.
            assert attend(x, bounds, "math").isnan().all(-1).flatten().tolist() == [False, True, False]
            continue
        with pytest.raises(OPERATOR_ERROR, match="query 1"):
            attend(x, bounds, "math")


@pytest.mark.slow
def test_masks_of_host_data_from_outside_of_the_program() -> None:
    masks = [causal() & documents([0, 5, 9]), key_padding([7])]
    masks.append(causal() & segments(np.repeat([3, 5], [5, 4])[None]))
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([attention(q, k, v, mask=mask) for mask in masks])

    results = []
    for call in (torch.compile(run, backend="aot_eager", fullgraph=True), run):
        outs = call(q, k, v)
        results.append([outs, *torch.autograd.grad(outs.sum(), (q, k, v))])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
