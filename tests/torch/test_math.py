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
@pytest.mark.parametrize("name", OPTIONS if everything() else [SIGNED, "dense", EVERYTHING])
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
    inputs, results = _leaves(problem), []
    for attend in (_attend, torch.compile(_attend, fullgraph=True, backend="eager")):
        out, lse = attend(problem, *inputs)
        results.append(torch.autograd.grad(out.square().sum() + lse[:, :, 1:].sum(), inputs))
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


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


# tests/kernels/test_cpu.py has the same of the kernel.
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_nan_reaches_exactly_the_rows_that_may_see_it(where: str, value: float) -> None:
    sample = small(seed=9, q_len=30, k_len=50, runs=2)
    getattr(sample, where)[:, 0, 4] = value
    inputs = tuple(sample.requires_grad().inputs.values())
    out = attention(*inputs, mask=sample.mask, backend="math")
    dense = sample.mask.lowered.dense().expand(2, 4, -1, -1)
    sees = dense[..., 4].clone()
    sees[:, 2:] = False  # the other group's heads read another key head
    finite = out.isfinite().all(-1)
    assert finite[~sees].all()
    assert (value == value and where == "k") or not finite[sees].any()
    # An incoming gradient that is NaN where the output is, as a loss would give.
    dout = torch.where(finite[..., None], 1.0, torch.nan).expand(out.shape)
    dq, *of_keys = (x.isfinite().all(-1) for x in torch.autograd.grad(out, inputs, dout))
    assert dq[~sees].all()
    assert not dq[~finite].any()
    # A key is touched if a row that sees the bad key sees it too.
    hit = (dense & ~finite[..., None]).any(-2).unflatten(1, (2, 2)).any(2)
    touched = hit.clone()
    touched[:, 0, 4] = True
    for gradient in of_keys:
        assert gradient[~touched].all()
        assert not gradient[hit].any()
