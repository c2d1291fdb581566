"""Softcap, biases, sinks and dropout through the public call: values, gradients, positions, messages."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from closeness import relative_error
from samples.torch_calls import OPTIONS, qkv
from torch import Tensor
from watching import Watching

import attnspan
from attnspan import alibi, cache, causal, documents, full, reference, relative
from attnspan.call.options import ALIBI, Options
from attnspan.torch import Attention, attention

B, H, S = 2, 4, 24
BACKENDS = ["cpu", "math"]
EPS = torch.finfo(torch.float32).eps
SEED = torch.tensor(11)


def _made(operator: Any, _: Any, result: Any) -> tuple[bool, ...] | None:
    """Which gradients of options a backward call has made: of the bias, of the sinks."""
    is_ours = operator is torch.ops.attnspan.attention_backward.default
    return tuple(x.numel() > 0 for x in result[3:5]) if is_ours else None


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = qkv()
    with Watching(_made) as gradients:
        for bias, sinks in [(True, False), (False, True), (False, False)]:
            slopes, logits = torch.rand(H).requires_grad_(bias), torch.rand(H).requires_grad_(sinks)
            out = attention(q.requires_grad_(), k, v, bias=alibi(slopes), sinks=logits)
            out.square().sum().backward()
            assert (slopes.grad is not None, logits.grad is not None) == (bias, sinks)
    # Sinks cost nothing: their gradient comes with the others.
    assert gradients.seen == [(True, True), (False, True), (False, True)]
    assert q.grad is not None


def _copied(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> list[int]:
    """The sizes of all copies that a call makes."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        attention(q, k, v, bias=bias)
    events = profile.events()
    assert [event.name for event in events].count("attnspan::attention") == 1
    return [prod(event.input_shapes[0]) for event in events if event.name == "aten::copy_"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_bias_is_read_in_place(dtype: torch.dtype) -> None:
    q, k, v = (x.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16) for x in qkv())
    bias = torch.randn(H, S, S).to(dtype)
    other = dtype not in (q.dtype, torch.float32)
    assert _copied(q, k, v, bias) == [bias.numel()] * other
    assert _copied(q, k, v, bias[:1, :1].expand(H, S, S)) == [S] * other
    # Rows that no kernel reads as they lie are copied.
    assert sum(_copied(q, k, v, bias.mT)) == bias.numel()
    assert max(_copied(q, k, v, bias[:1, :, :1].expand(H, S, S))) <= bias.numel()


def test_float64_stays_float64() -> None:
    q, k, v = (x.double() for x in qkv())
    sinks, slopes = torch.randn(H, dtype=torch.float64), torch.rand(H, dtype=torch.float64)
    options = Options(sinks=sinks.numpy(), bias=slopes[None].numpy(), bias_kind=ALIBI)
    bounds = full().spans(S, S).bounds
    exact, _ = reference.forward(q.numpy(), k.numpy(), v.numpy(), bounds, 0.25, options)
    got = attention(q, k, v, sinks=sinks, bias=alibi(slopes), backend="math")
    assert relative_error(got, torch.from_numpy(exact)) <= 1e-14


# Positions -------------------------------------------------------------------------------------------------

POSITIONAL = ["alibi", "alibi, signed", "distance table", "dropout", "all"]
CU_Q, CU_K = torch.tensor([0, 2, 8]), torch.tensor([0, 9, 24])
EVEN = torch.arange(0, 48, 2)
#: Queries, a mask, the indices of the call, and the queries' indices that they mean.
PLACES: dict[str, tuple[int, Callable[[], attnspan.Mask], dict[str, Tensor], Any]] = {
    "default": (8, causal, {}, [[*range(16, 24)]]),
    "more rows than keys": (30, causal, {}, [[*range(-6, 24)]]),
    "cache": (3, lambda: causal() & cache(torch.tensor([24, 13])), {}, [[21, 22, 23], [10, 11, 12]]),
    "documents": (8, lambda: causal() & documents(CU_Q, CU_K), {}, [[7, 8, *range(18, 24)]]),
    "q_index": (4, causal, {"q_index": torch.tensor([3, 17, 5, 20])}, [[3, 17, 5, 20]]),
    "q_index per row": (2, causal, {"q_index": torch.tensor([[3, 17], [0, 23]])}, [[3, 17], [0, 23]]),
    "k_index": (5, causal, {"k_index": EVEN}, [[*range(38, 48, 2)]]),
    "both": (5, full, {"q_index": torch.arange(40, 45), "k_index": EVEN}, [[*range(40, 45)]]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", POSITIONAL)
@pytest.mark.parametrize("place", PLACES)
def test_positions_come_from_the_mask(place: str, option: str, backend: str) -> None:
    q_len, make_mask, indices, rows = PLACES[place]
    q, k, v = qkv(q_len=q_len)
    options = {**OPTIONS[option](B, H, q_len, S), "backend": backend}
    mask = make_mask()
    prepared = mask.prepare(q_len, S, batch=B, like=q, **indices)
    # Bare spans know nothing of where they came from: the call says it.
    told = {"q_index": torch.tensor(rows), "k_index": indices.get("k_index", torch.arange(S))}

    def run(mask: Any, **indices: Tensor) -> Tensor:
        out, lse = attention(q, k, v, mask=mask, return_lse=True, **indices, **options)
        return torch.cat([out, torch.where(lse.isfinite(), lse, 0)[..., None]], -1)

    within = run(mask, **indices)
    assert torch.equal(run(prepared), within)
    assert relative_error(run(prepared.lowered, **told), within) <= 24 * EPS
    assert relative_error(run(prepared, **told), within) <= 24 * EPS
    told["q_index"] = torch.full_like(told["q_index"], 3)
    assert relative_error(run(prepared, **told), within) > 1e-3


# Dropout and the rest --------------------------------------------------------------------------------------


def test_hidden_by_minus_infinity() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.zeros(S, S).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -torch.inf)
    bias[4] = -torch.inf
    bias.requires_grad_()
    mask = causal().prepare(S, S, like=q).lowered
    mask.bounds[:, :, 4] = 0
    for backend in BACKENDS:
        out, lse = attention(q, k, v, bias=bias, backend=backend, return_lse=True)
        wanted = attention(q, k, v, mask=mask, backend=backend)
        assert relative_error(out, wanted) <= 24 * EPS
        assert (out[:, :, 4] == 0).all()
        assert (lse[:, :, 4] == -torch.inf).all()
        got = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
        for a, b in zip(got, torch.autograd.grad(wanted.square().sum(), (q, k, v)), strict=False):
            assert relative_error(a, b) <= 24 * EPS
        assert (got[3][bias == -torch.inf] == 0).all()


def test_the_module_keeps_the_tensors_of_its_options() -> None:
    q, k, v = qkv()
    slopes, sinks = torch.nn.Parameter(torch.rand(H)), torch.randn(H)
    layer = Attention(bias=alibi(slopes), sinks=sinks, dropout_p=0.5)
    assert [name for name, _ in layer.named_parameters()] == ["bias_slopes"]
    assert [name for name, _ in layer.named_buffers()] == ["sinks"]
    assert list(layer.state_dict()) == ["bias_slopes"]
    dropped = layer(q, k, v, dropout_seed=SEED)
    options = {"bias": alibi(slopes), "sinks": sinks}
    assert torch.equal(dropped, attention(q, k, v, dropout_p=0.5, dropout_seed=SEED, **options))
    layer.eval()
    assert torch.equal(layer(q, k, v), attention(q, k, v, **options))
    with torch.no_grad():
        slopes.mul_(2)
    layer.double()
    assert layer.bias_slopes.dtype == layer.sinks.dtype == torch.float64
    doubled = {"bias": alibi(slopes.detach()), "sinks": sinks}
    assert torch.equal(layer(q, k, v), attention(q, k, v, **doubled))
    table = torch.nn.Parameter(torch.randn(H, 5))
    assert "bias_table" in dict(Attention(bias=relative(table)).named_parameters())
    assert "bias=float32[4, 24]" in repr(Attention(bias=torch.zeros(H, S), mask=causal()))
