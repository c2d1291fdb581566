"""What the compiler sees: one node, no breaks, a bounded number of compilations."""

import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything, few
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_fullgraph_at_the_first_call_of_a_fresh_process(backend: str) -> None:
    assert run_program("-c", FRESH.format(backend=backend)).strip() == "same"


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _inside(q: Tensor, k: Tensor, ids: Tensor, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=causal() & segments(ids), **options) for options in several]


def _outside(q: Tensor, k: Tensor, mask: Mask, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=mask, **options) for options in several]


def _compilations(
    shapes: list[tuple[int, int]],
    *names: str,
    inside: bool = True,
    mark: bool = False,
    backend: str = "aot_eager" if everything() else "eager",
) -> list[int]:
    """Run fullgraph over shapes with new values of everything; the number of compilations after each call.

    Outputs and every gradient are compared with those of eager calls, under options of these names.
    """
    counter = CompileCounterWithBackend(backend)
    function: Any = _inside if inside else _outside
    compiled, counts = torch.compile(function, fullgraph=True, backend=counter), []
    for batch, length in shapes:
        q, k = _inputs(batch, length)
        ids = torch.randint(0, 2, (batch, length)).cumsum(-1)
        mask: Any = (
            ids if inside else (causal() & segments(ids)).prepare(length, length, batch=batch, like=ids)
        )
        several = [OPTIONS[name](batch, HEADS, length, length) for name in names] or [{}]
        of_mask = (ids, (0, 1)) if inside else (mask.lowered.bounds, (0, 2))
        for x, dims in [(q, (0, 2)), (k, (0, 2)), of_mask] if mark else []:
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
        results = []
        for run in (compiled, function):
            outs = run(q, k, mask, several)
            gradients = torch.autograd.grad(torch.stack(outs).square().sum(), [q, *leaves(several)])
            results.append([*outs, *gradients])
        torch.testing.assert_close(*results)  # dtypes too
        counts.append(counter.frame_count)
    return counts


def _shapes(count: int) -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [(generator.randint(2, 5), generator.randint(2, 90)) for _ in range(count)]


SIDES = pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])


@pytest.mark.slow
@SIDES
def test_few_compilations_over_many_shapes(inside: bool) -> None:
    # The short run has no batch of one row, which is a program of its own.
    shapes = _shapes(4) if not everything() else [(1, 17), *_shapes(6), (1, 7), *_shapes(12)[6:]]
    counts = _compilations([shapes[0], *shapes], inside=inside)
    assert counts[1] == 1, "a new mask of the same shape is no recompilation"
    assert counts[-1] <= (4 if everything() else 3), counts
    assert counts[-1] == counts[-2], "compilations must end early"


@pytest.mark.slow
@SIDES
def test_one_compilation_where_dims_are_marked_dynamic(inside: bool) -> None:
    assert _compilations(_shapes(3), inside=inside, mark=True) == [1, 1, 1]


# Each kind of array once: the next test has "all".
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [[x] for x in OPTIONS] if everything() else [["dense, all heads, float16", "alibi, per batch row", "T5"]],
    ids=str,
)
def test_every_option_compiles_in_full_and_once(names: list[str]) -> None:
    assert _compilations([(2, 33)] * 2, *names) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["all", "dense", "dropout by seeds", "alibi, per batch row"], 1))
def test_few_compilations_of_options_over_many_shapes(name: str) -> None:
    assert _compilations(_shapes(6 if everything() else 3), name, backend="aot_eager")[-1] <= 2


@pytest.mark.slow
def test_a_new_seed_or_new_slopes_are_no_recompilation_but_take_effect() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, k: Tensor, slopes: Tensor, seed: Tensor) -> Tensor:
        return attention(q, k, k, bias=alibi(slopes), dropout_p=0.3, dropout_seed=seed)

    (q, k), slopes = _inputs(2, 33), torch.rand(HEADS)
    outs = [run(q, k, slopes * n, torch.tensor(seed)) for n in range(3) for seed in (5, 2**60)]
    assert counter.frame_count == 1
    assert not any(torch.equal(a, b) for a, b in combinations(outs, 2))


@pytest.mark.slow
def test_positions_of_a_prepared_mask_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_outside, fullgraph=True, backend=counter)
    k, slopes = torch.randn(2, 2, 24, 16), torch.rand(HEADS)
    for lengths in ([24, 13], [5, 9], [3, 3]):
        q, options = torch.randn(2, HEADS, 3, 16), [{"bias": alibi(slopes)}]
        mask = (causal() & cache(torch.tensor(lengths))).prepare(3, 24, batch=2, like=q)
        torch.testing.assert_close(compiled(q, k, mask, options), _outside(q, k, mask, options))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_illegal_spans_are_never_plausible(compiled: bool) -> None:
    x = torch.randn(1, 1, 3, 8)

    def run(x: Tensor, bounds: Tensor, backend: str) -> Tensor:
        return attention(x, x, x, mask=Spans(bounds, 3), backend=backend)

    attend = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    for row in ([0, 7], [0, -1], [3, 2], [-1, 3]):
        bounds = torch.tensor([[0, 1], row, [0, 3]], dtype=torch.int32).view(1, 1, 3, 1, 2)
        with pytest.raises(OPERATOR_ERROR, match="query 1"):
            attend(x, bounds, "cpu")
        if compiled:  # It waits for no value.
            assert attend(x, bounds, "math").isnan().all(-1).flatten().tolist() == [False, True, False]
            continue
        with pytest.raises(OPERATOR_ERROR, match="query 1"):
            attend(x, bounds, "math")


HOST = {
    "documents": causal() & documents([0, 50, 96]),
    "documents, NumPy": documents(np.array([0, 50, 96])),
    "segments": causal() & segments(np.repeat([3, 5], 48)[None]),
    "key padding": key_padding([70]),
}


@pytest.mark.slow
def test_masks_of_host_data_from_outside_of_the_program() -> None:
    torch.manual_seed(0)
    masks, (q, k, v) = list(HOST.values()), [torch.randn(1, 2, 96, 16, requires_grad=True) for _ in range(3)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attention(q, k, v, mask=mask) for mask in masks]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for name, found, wanted in zip(HOST, compiled(q, k, v), run(q, k, v), strict=True):
        assert found.equal(wanted), name
        gradients = (torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (found, wanted))
        assert all(a.equal(b) for a, b in zip(*gradients, strict=True)), name
