"""Options in the math backend: derivatives of every order and mode, and compilation."""

import pytest
import torch
from closeness import relative_error
from covering import everything
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from attnspan.kernels import math
from attnspan.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own

BATCH, HEADS, Q_LEN, K_LEN = 2, 2, 3, 5
BOUNDS = torch.tensor([[[0, 0], [5, 5]], [[0, 2], [2, 4]], [[1, 1], [3, 5]]], dtype=torch.int32)
BOUNDS = BOUNDS.view(1, 1, Q_LEN, 2, 2)  # the first row sees nothing
PLACES = {
    "q_index": torch.tensor([[9, 2, 4], [0, 8, 3]], dtype=torch.int32),
    "k_index": torch.tensor([[4, 1, 9, 6, 2]], dtype=torch.int32),
}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OPTIONS = {
    "none": Options(),
    "softcap": Options(softcap=1.5),
    "sinks": Options(sinks=_normal(HEADS)),
    "alibi": Options(bias=_normal(1, HEADS), bias_kind=ALIBI),
    "signed alibi": Options(bias=_normal(BATCH, HEADS), bias_kind=SIGNED_ALIBI, **PLACES),
    "distance": Options(bias=_normal(HEADS, 5), bias_kind=DISTANCE, **PLACES),
    "dense": Options(bias=_normal(BATCH, HEADS, Q_LEN, K_LEN), bias_kind=DENSE),
    "dense, one row": Options(bias=_normal(1, 1, 1, K_LEN), bias_kind=DENSE),
    "dropout": Options(dropout_p=0.4, dropout_seed=torch.tensor(11)),
    "all": Options(
        softcap=2.0,
        bias=_normal(HEADS, 7),
        bias_kind=DISTANCE,
        sinks=_normal(HEADS),
        dropout_p=0.3,
        dropout_seed=torch.arange(4).view(BATCH, HEADS),
        **PLACES,
    ),
}


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((BATCH, HEADS, Q_LEN, 3), (BATCH, 1, K_LEN, 3), (BATCH, 1, K_LEN, 2))
    return [_normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def _parameters(options: Options) -> dict[str, Tensor]:
    return {n: getattr(options, n) for n in ("bias", "sinks") if getattr(options, n) is not None}


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    options = options._replace(**dict(zip(_parameters(options), parameters, strict=True)))
    return math.forward(q, k, v, BOUNDS, scale=0.7, options=options)


# tests/conformance holds the values to the oracle.
@pytest.mark.parametrize(
    "name", OPTIONS if everything() else ["none", "signed alibi", "dense", "dropout", "all"]
)
def test_every_derivative(name: str) -> None:
    options = OPTIONS[name]
    inputs = [x.requires_grad_() for x in (*_inputs(), *(x.clone() for x in _parameters(options).values()))]

    def out(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return _attend(q, k, v, options, *parameters)[0]

    def lse(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        # Without a sink the first row has lse -inf, of which finite differences make nothing.
        return _attend(q, k, v, options, *parameters)[1][:, :, 0 if options.sinks is not None else 1 :]

    for function in (out, lse):
        assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=not everything())
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("name", OPTIONS if everything() else ["signed alibi", "all"])
def test_compiles_without_a_break(name: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        out, lse = _attend(q, k, v, options, *parameters)
        return out.square().sum() + lse[:, :, 1:].sum()

    options = OPTIONS[name]
    single = {n: x.float() for n, x in _parameters(options).items()}
    options = options._replace(**single)
    inputs = [x.requires_grad_() for x in (*_inputs(torch.float32), *(x.clone() for x in single.values()))]
    want = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("where", ["a masked pair", "a visible pair"])
def test_a_nan_of_the_bias_reaches_the_rows_that_see_its_key(where: str) -> None:
    q, k, v = (x.requires_grad_() for x in _inputs())
    bias = torch.zeros(1, 1, Q_LEN, K_LEN, dtype=torch.float64)
    bias[0, 0, 1, 4 if where == "a masked pair" else 1] = torch.nan  # row 1 sees keys 0 to 3
    options = Options(bias=bias.requires_grad_(), bias_kind=DENSE)
    out, _ = math.forward(q, k, v, BOUNDS, scale=1.0, options=options)
    hit = torch.tensor([False, where == "a visible pair", False])
    assert torch.equal(~out.isfinite().all(-1), hit.expand(BATCH, HEADS, Q_LEN))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(~dq.isfinite().all(-1), hit.expand(BATCH, HEADS, Q_LEN))
