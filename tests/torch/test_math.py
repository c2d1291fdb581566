"""Derivatives of every order and mode, and how far a NaN reaches, with the math backend and the kernel."""

import pytest
import torch
from closeness import relative_error
from covering import everything
from samples.conformance import OPTIONS
from samples.problems import Problem
from samples.torch_calls import small
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from attnspan import Spans
from attnspan.call.options import DENSE, Options
from attnspan.kernels import math
from attnspan.torch import attention

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own

SIGNED, EVERYTHING = "alibi, signed, per batch row", "everything, indices given"


def _tiny(*options: str, dtype: torch.dtype = torch.float64) -> Problem:
    """The first row sees nothing."""
    sizes = {"heads": 2, "kv_heads": 1, "q_len": 3, "k_len": 5, "head_dim": 3, "v_dim": 2, "runs": 2}
    return small(*options, **sizes, dtype=dtype)


def _leaves(problem: Problem) -> list[Tensor]:
    options = problem.options or Options()
    given = [*problem.inputs.values(), options.bias, options.sinks]
    return [x.clone().requires_grad_() for x in given if x is not None]


def _attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    options = problem.options or Options()
    names = [name for name in ("bias", "sinks") if getattr(options, name) is not None]
    options = options._replace(**dict(zip(names, parameters, strict=True)))
    return math.forward(q, k, v, problem.bounds, scale=0.7, options=options)


# tests/conformance holds the values to the oracle.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", OPTIONS if everything() else ["none", SIGNED, "dense", "dropout", EVERYTHING]
)
def test_every_derivative(name: str) -> None:
    problem = _tiny(*OPTIONS[name])
    # Without a sink the first row has lse -inf, of which finite differences make nothing.
    first = 0 if "sinks" in OPTIONS[name] else 1
    for function in (
        lambda *inputs: _attend(problem, *inputs)[0],
        lambda *inputs: _attend(problem, *inputs)[1][:, :, first:],
    ):
        assert gradcheck(function, _leaves(problem), check_forward_ad=True, fast_mode=not everything())
        assert gradgradcheck(function, _leaves(problem), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("name", OPTIONS if everything() else [EVERYTHING])
def test_compiles_without_a_break(name: str) -> None:
    problem = _tiny(*OPTIONS[name], dtype=torch.float32)

    def loss(*inputs: Tensor) -> Tensor:
        out, lse = _attend(problem, *inputs)
        return out.square().sum() + lse[:, :, 1:].sum()

    inputs = _leaves(problem)
    want = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


def test_torch_func() -> None:
    problem = _tiny()
    q, k, v = problem.inputs.values()

    def loss(q: Tensor, backend: str) -> Tensor:
        dtype = torch.float64 if backend == "math" else torch.float32
        mask = Spans(problem.bounds, 5)
        return attention(*(x.to(dtype) for x in (q, k, v)), mask=mask, backend=backend).square().sum()

    ours = torch.func.grad(lambda q: loss(q, "cpu"))(q)
    torch.testing.assert_close(ours, torch.func.grad(lambda q: loss(q, "math"))(q), rtol=1e-5, atol=1e-6)
    assert torch.func.hessian(lambda q: loss(q, "math"))(q).abs().sum() > 0
    first = torch.func.grad(lambda q: loss(q, "cpu"))
    for second in (
        lambda: torch.func.grad(lambda q: first(q).sum())(q),
        lambda: torch.func.hessian(lambda q: loss(q, "cpu"))(q),
        lambda: torch.func.jvp(first, (q,), (q,)),
    ):
        with pytest.raises(NotImplementedError, match=r'backend\("math"'):
            second()


@pytest.mark.parametrize("where", ["a masked pair", "a visible pair"])
def test_a_nan_of_the_bias_reaches_the_rows_that_see_its_key(where: str) -> None:
    problem = _tiny()
    problem.bounds = torch.tensor([[0, 0], [0, 4], [1, 5]], dtype=torch.int32).view(1, 1, 3, 1, 2)
    bias = torch.zeros(1, 1, 3, 5, dtype=torch.float64)
    bias[0, 0, 1, 4 if where == "a masked pair" else 1] = torch.nan
    problem.options = Options(bias=bias, bias_kind=DENSE)
    q, *others = _leaves(problem)
    out, _ = _attend(problem, q, *others)
    hit = torch.tensor([False, where == "a visible pair", False]).expand(out.shape[:3])
    for x in (out, *torch.autograd.grad(out.sum(), q)):
        assert torch.equal(~x.isfinite().all(-1), hit)


KEY = 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nan_reaches_exactly_the_rows_that_may_see_it(
    backend: str, where: str, value: float, dtype: torch.dtype
) -> None:
    sample = small(seed=9, q_len=70, k_len=150, runs=2, dtype=dtype)
    getattr(sample, where)[:, 0, KEY] = value
    mask, inputs = Spans(sample.bounds, 150), tuple(sample.requires_grad().inputs.values())
    out = attention(*inputs, mask=mask, backend=backend)
    dense = mask.dense().expand(2, 4, -1, -1)
    sees = dense[..., KEY].clone()
    sees[:, 2:] = False  # the other group's heads read another key head
    finite = out.isfinite().all(-1)
    assert finite[~sees].all()
    if value != value or where == "v":
        assert not finite[sees].any()
    # An incoming gradient that is NaN where the output is, as a loss would give.
    dout = torch.where(finite[..., None], 1.0, torch.nan).expand(out.shape).to(dtype)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout)
    assert dq.isfinite().all(-1)[~sees].all()
    # A key is touched if a row that sees the bad key sees it too.
    hit = (dense & ~finite[..., None]).any(-2).unflatten(1, (2, 2)).any(2)
    touched = hit.clone()
    touched[:, 0, KEY] = True
    for gradient in (dk, dv):
        assert gradient.isfinite().all(-1)[~touched].all()
        assert not gradient.isfinite().all(-1)[hit].any()
    assert not dq.isfinite().all(-1)[~finite].any()
