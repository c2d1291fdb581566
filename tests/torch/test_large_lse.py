"""A bias that all keys of a row share changes nothing but the lse, eager and compiled."""

import pytest
import torch
from torch import Tensor

from attnspan import alibi, causal, dense_bias, relative, t5_buckets
from attnspan.torch import attention


def _table(depth: float) -> Tensor:
    return torch.full((4, 8), depth, requires_grad=True)


BIASES = {
    "t5": lambda table: relative(table, t5_buckets(8, 16)),
    "relative": lambda table: relative(table[:, :7]),
    "dense": lambda table: dense_bias(table.mean(1)[None, :, None, None].expand(1, 4, 40, 40)),
}


def _attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, kind: str, backend: str) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, mask=causal(), bias=BIASES[kind](table), backend=backend, return_lse=True)
    return out, lse


def _results(kind: str, depth: float, backend: str, compiled: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table = _table(depth)
    attend = torch.compile(_attend, backend="aot_eager", fullgraph=True) if compiled else _attend
    out, lse = attend(*leaves, table, kind, backend)
    dlse = torch.randn(lse.shape, generator=generator)
    grads = torch.autograd.grad([out, lse], [*leaves, table], [dout, dlse])
    torch.testing.assert_close(lse.detach().mean(), torch.tensor(depth), rtol=1e-3, atol=10)
    return [out.detach(), *grads]


@pytest.mark.parametrize("depth", [-1e6, -1e9])
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize(("backend", "compiled"), [("cpu", False), ("cpu", True), ("math", False)])
def test_results_are_those_without_it(backend: str, compiled: bool, kind: str, depth: float) -> None:
    plain = _results(kind, 0.0, backend, False)
    for got, exact in zip(_results(kind, depth, backend, compiled), plain, strict=True):
        assert float((got - exact).norm()) <= 4e-6 * float(exact.norm())


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_keys_far_behind_alibi(backend: str) -> None:
    # A window that hides the last 4,000 keys: all that a row sees is far away, and nearly alike.
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 40, 40))
    q_index = torch.tensor([[4_000_000]], dtype=torch.int32)
    slopes = torch.tensor([0.25, 0.01])
    v = v.requires_grad_()
    out = attention(q, k, v, bias=alibi(slopes), q_index=q_index, backend=backend)
    distance = torch.arange(40).double()  # of all keys less what they share
    scores = (q.double() @ k.double().transpose(2, 3)) / 4 + slopes.double()[:, None, None] * distance
    exact = scores.softmax(-1) @ v.detach().double()
    assert float((out.detach() - exact).norm()) <= 1e-6 * float(exact.norm())
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv.sum(2), torch.ones(1, 2, 16))
