"""What the compiler sees: one node, no breaks, a bounded number of compilations."""

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from covering import few
from samples import MASKS, Q_LEN
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import Mask, Prepared, Spans, causal, segments, window
from attnspan.torch import Attention, attention

FRESH = """
import torch
from attnspan import causal, segments
from attnspan.torch import attention

ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
q, k = torch.randn(1, 4, 6, 16, requires_grad=True), torch.randn(1, 2, 6, 16, requires_grad=True)

@torch.compile(fullgraph=True, backend={backend!r})
def run(q, k):
    return attention(q, k, k, mask=causal() & segments(ids))

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
    run = subprocess.run(
        [sys.executable, "-c", FRESH.format(backend=backend)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 2, (batch, length)).cumsum(-1)


def _inside(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    return attention(q, k, k, mask=causal() & segments(ids))


def _outside(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    return attention(q, k, k, mask=mask)


def _prepared(ids: Tensor) -> Prepared:
    mask = causal() & segments(ids)
    return mask.prepare(ids.shape[1], ids.shape[1], batch=ids.shape[0], like=ids)


def _run_shapes(
    function: Callable[..., Tensor], make_mask: Callable[[Tensor], object], shapes: list, *, mark: bool
) -> list[int]:
    """Run fullgraph over the shapes with a new mask each; the number of compilations after each call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    counts = []
    for batch, length in shapes:
        q, k = _inputs(batch, length)
        ids = _ids(batch, length)
        mask = make_mask(ids)
        if mark:
            bounds = [mask.lowered.bounds] if isinstance(mask, Prepared) else []
            ids_marked = [(ids, (0, 1))] if mask is ids else [(b, (0, 2)) for b in bounds]
            for x, dims in [(q, (0, 2)), (k, (0, 2)), *ids_marked]:
                for dim in dims:
                    torch._dynamo.mark_dynamic(x, dim)
        out = compiled(q, k, mask)
        out.sum().backward()
        torch.testing.assert_close(out, function(q, k, mask))
        counts.append(counter.frame_count)
    return counts


def _shapes() -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [(generator.randint(1, 5), generator.randint(2, 90)) for _ in range(12)]


@pytest.mark.parametrize(
    ("function", "make_mask"), [(_inside, lambda ids: ids), (_outside, _prepared)], ids=["inside", "outside"]
)
def test_few_compilations_over_many_shapes(
    function: Callable[..., Tensor], make_mask: Callable[[Tensor], object]
) -> None:
    counts = _run_shapes(function, make_mask, _shapes(), mark=False)
    assert counts[-1] <= 4, counts
    assert counts[6] == counts[-1], "compilations must end early"


@pytest.mark.parametrize(
    ("function", "make_mask"), [(_inside, lambda ids: ids), (_outside, _prepared)], ids=["inside", "outside"]
)
def test_one_compilation_where_dims_are_marked_dynamic(
    function: Callable[..., Tensor], make_mask: Callable[[Tensor], object]
) -> None:
    shapes = [(batch + 1, length) for batch, length in _shapes()]
    assert _run_shapes(function, make_mask, shapes, mark=True)[-1] == 1


@pytest.mark.parametrize("function", [_inside, _outside], ids=["inside", "outside"])
def test_a_new_mask_of_the_same_shape_is_no_recompilation(function: Callable[..., Tensor]) -> None:
    make_mask = _prepared if function is _outside else lambda ids: ids
    assert _run_shapes(function, make_mask, [(2, 33)] * 8, mark=False) == [1] * 8


# test_export_masks.py has every mask as an input, test_dynamic_lengths.py makes every mask inside.
@pytest.mark.parametrize("name", few(MASKS, 3))
def test_every_mask_compiles_in_full(name: str) -> None:
    mask = MASKS[name]()
    q, k = _inputs(2, Q_LEN)
    compiled = torch.compile(_outside, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, mask), _outside(q, k, mask))


def test_export_keeps_one_node_per_call() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Attention(mask=causal() & window(3))

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return self.attend(self.attend(q, k, k), k, k)  # type: ignore[no-any-return]

    q, k = (x.detach() for x in _inputs(2, 24))
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Block(), (q, k), dynamic_shapes=({2: length}, {2: length}))
    nodes = [node for node in program.graph.nodes if node.target is torch.ops.attnspan.forward.default]
    assert len(nodes) == 2
    q, k = (x.detach() for x in _inputs(2, 31))
    torch.testing.assert_close(program.module()(q, k), Block()(q, k))


def test_masks_are_pytrees() -> None:
    ids = torch.tensor([[0, 0, 1]])
    leaves, spec = torch.utils._pytree.tree_flatten(causal() & segments(ids))
    assert any(leaf is ids for leaf in leaves)
    rebuilt = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert torch.equal(rebuilt.spans(3, 3).bounds, (causal() & segments(ids)).spans(3, 3).bounds)


# Dynamo itself makes an instance of each autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_math_backend_compiles_in_full() -> None:
    q, k = _inputs(2, 9)

    def run(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, k, k, mask=causal(), backend="math")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k)
    torch.testing.assert_close(compiled, run(q, k))
    (got,) = torch.autograd.grad(compiled.square().sum(), q)
    (wanted,) = torch.autograd.grad(run(q, k).square().sum(), q)
    torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_illegal_spans_are_never_plausible_when_compiled() -> None:
    x = torch.randn(1, 1, 3, 8)
    bounds = torch.tensor([[0, 1], [0, 7], [0, 3]], dtype=torch.int32).view(1, 1, 3, 1, 2)

    def run(x: Tensor, bounds: Tensor, backend: str) -> Tensor:
        return attention(x, x, x, mask=Spans(bounds, 3), backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert compiled(x, bounds, "math").isnan().all(-1).flatten().tolist() == [False, True, False]
    with pytest.raises(ValueError, match="row 1"):
        compiled(x, bounds, "cpu")
