"""Under torch.compile(backend="openxla", fullgraph=True): one graph, the same numbers, also of new masks."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

import pytest
import torch
import torch_xla
from xla_cells import on_xla

import attnspan as a
from attnspan.xla import attention


def masks() -> dict[str, a.Mask]:
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    cu = torch.tensor([0, 5, 12])
    return {
        "causal": a.causal(),
        "segments": a.causal() & a.segments(ids, padding_id=7),
        "documents, prefix": (a.causal() | a.prefix(2, cu)) & a.documents(cu),
        "cache": a.causal() & a.cache(torch.tensor([8, 12])),
        "window, global": a.causal() & (a.window(3) | a.global_keys(2)),
        "prepared": (a.causal() & a.segments(ids)).prepare(12, 12, batch=2),
        "function": a.from_predicate(lambda b, h, i, j: (i >= j) & (i - j < 4), max_runs=1),
    }


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", masks())
def test_forward_and_backward_are_one_graph(name: str) -> None:
    torch.manual_seed(1)
    mask = on_xla(masks()[name])
    sinks, slopes = on_xla((torch.randn(2), torch.rand(2)))
    seed = on_xla(torch.tensor(-123456789012))

    def f(q, k, sinks, slopes):
        return attention(
            q, k, k, mask=mask, sinks=sinks, bias=a.alibi(slopes), dropout_p=0.2, dropout_seed=seed
        )

    results = []
    q, k = torch.randn(2, 2, 12, 8), torch.randn(2, 1, 12, 8)
    for call in (f, torch.compile(f, backend="openxla", fullgraph=True)):
        inputs = [x.clone().requires_grad_() for x in (*on_xla((q, k)), sinks, slopes)]
        out = call(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch_xla.sync()
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled.cpu(), plain.cpu())


def test_a_new_mask_each_step_is_one_compilation() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("openxla")

    def f(q, ids):
        return attention(q, q, q, mask=a.causal() & a.segments(ids))

    compiled = torch.compile(f, backend=counter, fullgraph=True)
    q = on_xla(torch.randn(1, 2, 12, 8))
    for cut in (3, 6, 9):
        ids = on_xla((torch.arange(12) >= cut).long()[None])
        torch.testing.assert_close(compiled(q, ids).cpu(), f(q, ids).cpu())
    assert counter.frame_count == 1
