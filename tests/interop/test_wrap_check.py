"""`Wrapped.check`: a right kernel passes with figures, each kind of wrong one is found."""

from collections.abc import Callable

import pytest
import torch
from foreign_kernel import QKV, Library, eager, fresh_name, inputs, wrap_foreign
from torch import Tensor

import attnspan
from attnspan import documents
from attnspan.torch import DeclarationError, attention, wrap

TESTS = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}


@pytest.fixture(autouse=True)
def _same_inputs_at_each_run() -> None:
    """Errors of problems as small as these are a matter of luck."""
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "k_len", "options"),
    [(6, 6, {}), (3, 7, {"causal": True}), (7, 3, {"causal": True, "softmax_scale": 0.7})],
)
def test_the_foreign_library_passes(foreign: Library, q_len: int, k_len: int, options: dict) -> None:
    wrapped = wrap_foreign(foreign, varying=("softmax_scale",))
    report = wrapped.check(*inputs(q_len, k_len), **options)
    assert set(report.errors) == {"out", "dq", "dk", "dv"}
    assert max(report.ratios.values()) <= 1.5, report
    assert set(report.opcheck) == TESTS
    assert "SDPA" in str(report)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout: str) -> None:
    def own(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, layout=layout, return_lse=True)
        return out.contiguous(), lse.contiguous()

    given = inputs(6, 9) if layout == "bshd" else [x.transpose(1, 2) for x in inputs(6, 9)]
    wrap(own, name=fresh_name(), outputs=("out", "lse"), layout=layout).check(*given)


@pytest.mark.slow
def test_packed_rows() -> None:
    def varlen(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, causal=False):  # type: ignore[no-untyped-def]
        assert type(max_seqlen_q) is int
        mask = documents(cu_seqlens_q, cu_seqlens_k)
        mask = mask & attnspan.causal() if causal else mask
        out, lse = attention(q, k, v, mask=mask, layout="thd", return_lse=True)
        return out.contiguous(), lse.contiguous()

    cu = torch.tensor([0, 8, 24], dtype=torch.int32)
    given = [*torch.randn(3, 24, 2, 8), cu, cu, 16, True]
    wrapped = wrap(varlen, name=fresh_name(), backward="recompute", outputs=("out", "lse"), layout="thd")
    assert set(wrapped.check(*given).errors) == {"out", "dq", "dk", "dv"}
    assert wrapped(*given)[1].shape == (2, 24)


@pytest.mark.slow
def test_an_oracle_of_its_own() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor, softcap: float = 5.0) -> Tensor:
        x = q @ k.mT * q.shape[-1] ** -0.5
        return (softcap * (x / softcap).tanh()).softmax(-1) @ v

    wrapped = wrap(capped, name=fresh_name(), backward="recompute", varying=("softcap",))
    wrapped.check(*inputs(), softcap=0.5, oracle=capped)
    with pytest.raises(DeclarationError, match=r"out: .* times, dq"):
        wrapped.check(*inputs(), softcap=0.5)


def _writes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k.view(-1)[0] = 7.0
    return eager(q, k, v)


_buffer = torch.empty(2, 6, 3, 8)

#: Kernels with a defect that verification at each call does not see, and what the check says.
DEFECTS: dict[str, tuple[Callable[..., object], str]] = {
    "buffer": (lambda *x: _buffer.copy_(eager(*x)), "got the same memory in two calls"),
    "random": (lambda *x: eager(*x) + torch.rand(()), "got a different result in the second call"),
    "state": (
        _writes,
        "input 'k': expected an input that the kernel only reads, got an input that it changed",
    ),
    "wrong": (lambda *x: eager(*x) * 1.001, "expected errors of at most 4 times SDPA's against float64"),
    "scale": (lambda *x: eager(*x, scale=1.0), "expected errors of at most 4 times SDPA's against float64"),
    "nan": (lambda *x: eager(*x) + float("nan"), "out: nan times"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect: str) -> None:
    kernel, text = DEFECTS[defect]
    wrapped = wrap(kernel, name=fresh_name(), schema=QKV)
    wrapped(*inputs())
    with pytest.raises(DeclarationError, match=text):
        wrapped.check(*inputs())


def test_a_wrong_gradient_is_found(foreign: Library) -> None:
    def half(dout, dlse, q, k, v, softmax_scale, causal):  # type: ignore[no-untyped-def]
        dq, dk, dv = foreign.backward(dout, dlse, q, k, v, softmax_scale, causal)
        return dq, dk / 2, dv

    with pytest.raises(DeclarationError, match=r"got dk: [0-9.e+]+ times\. Check"):
        wrap_foreign(foreign, backward=half).check(*inputs())
