"""Derivatives of every order and mode, and how far a NaN reaches, with the math backend and the kernel."""

import pytest
import torch
from samples import make_sample
from torch import Tensor

from attnspan import Spans
from attnspan.torch import attention

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own


def _double() -> tuple[tuple[Tensor, ...], Spans]:
    sample = make_sample(
        batch=1, q_heads=2, kv_heads=1, q_len=3, k_len=5, head_dim=3, v_dim=2, dtype=torch.float64
    ).requires_grad()
    rows = [[[0, 0], [5, 5]], [[0, 2], [2, 4]], [[1, 1], [3, 5]]]  # the first sees nothing
    bounds = torch.tensor(rows, dtype=torch.int32).view(1, 1, 3, 2, 2)
    return (sample.q, sample.k, sample.v), Spans(bounds, 5)


def test_torch_func() -> None:
    (q, k, v), mask = _double()
    q, k, v = q.detach(), k.detach(), v.detach()

    def loss(q: Tensor, backend: str) -> Tensor:
        dtype = torch.float64 if backend == "math" else torch.float32
        return attention(*(x.to(dtype) for x in (q, k, v)), mask=mask, backend=backend).square().sum()

    ours = torch.func.grad(lambda q: loss(q, "cpu"))(q)
    torch.testing.assert_close(ours, torch.func.grad(lambda q: loss(q, "math"))(q), rtol=1e-5, atol=1e-6)
    hessian = torch.func.hessian(lambda q: loss(q, "math"))(q)
    assert hessian.abs().sum() > 0
    with pytest.raises(NotImplementedError, match='backend="math"'):
        torch.func.grad(lambda q: torch.func.grad(lambda q: loss(q, "cpu"))(q).sum())(q)
    with pytest.raises(NotImplementedError, match='backend="math"'):
        torch.func.hessian(lambda q: loss(q, "cpu"))(q)
    with pytest.raises(NotImplementedError, match='backend="math"'):
        torch.func.jvp(torch.func.grad(lambda q: loss(q, "cpu")), (q,), (q,))


KEY = 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nan_reaches_exactly_the_rows_that_may_see_it(
    backend: str, where: str, value: float, dtype: torch.dtype
) -> None:
    sample = make_sample(seed=9, q_len=70, k_len=150, runs=2, dtype=dtype)
    getattr(sample, where)[:, 0, KEY] = value
    mask = Spans(sample.bounds, 150)
    q, k, v = sample.q.requires_grad_(), sample.k.requires_grad_(), sample.v.requires_grad_()
    out = attention(q, k, v, mask=mask, backend=backend)
    dense = mask.dense().expand(2, 4, -1, -1)
    sees = dense[..., KEY].clone()
    sees[:, 2:] = False  # the other group's heads read another key head
    finite = out.isfinite().all(-1)
    assert finite[~sees].all()
    if value != value or where == "v":
        assert not finite[sees].any()
    # An incoming gradient that is NaN where the output is, as a loss would give.
    dout = torch.where(finite[..., None], 1.0, torch.nan).expand(out.shape).to(dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq.isfinite().all(-1)[~sees].all()
    # A key is touched if a row that sees the bad key sees it too.
    hit = (dense & ~finite[..., None]).any(-2).unflatten(1, (2, 2)).any(2)
    touched_by_itself = torch.zeros_like(hit)
    touched_by_itself[:, 0, KEY] = True
    for gradient in (dk, dv):
        assert gradient.isfinite().all(-1)[~(hit | touched_by_itself)].all()
        assert not gradient.isfinite().all(-1)[hit].any()
    assert not dq.isfinite().all(-1)[~finite].any()
