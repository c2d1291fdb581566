"""Softcap, biases, sinks and dropout through the public call: values, gradients, positions, messages."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from closeness import relative_error
from samples.parts import leaves
from samples.torch_calls import OPTIONS, qkv
from torch import Tensor
from watching import Watching

import attnspan
from attnspan import alibi, causal, documents, full, reference, relative
from attnspan.call.options import ALIBI, Options
from attnspan.torch import Attention, attention, explain

B, H, S = 2, 4, 24
BACKENDS = ["cpu", "math"]
EPS = torch.finfo(torch.float32).eps
SEED = torch.tensor(11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sinks, bf16", "dense, all heads, float16"])
def test_parameters_of_16_bits_have_gradients_of_16_bits(name: str, backend: str) -> None:
    q, k, v = qkv()
    options = OPTIONS[name](B, H, S, S)
    (parameter,) = leaves(options)
    wide = parameter.detach().float().requires_grad_()
    (keyword,) = options
    found = []
    for x in (parameter, wide):
        out = attention(q, k, v, mask=causal(), backend=backend, **{keyword: x})
        found.append(torch.autograd.grad(out.square().sum(), x)[0])
    assert found[0].dtype == parameter.dtype
    assert torch.equal(found[0], found[1].to(parameter.dtype))


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
PLACES: dict[str, tuple[int, Callable[[], attnspan.Mask], dict[str, Tensor]]] = {
    "default": (8, causal, {}),
    "more rows than keys": (30, causal, {}),
    "cache": (3, lambda: causal() & attnspan.cache(torch.tensor([24, 13])), {}),
    "documents": (8, lambda: causal() & documents(CU_Q, CU_K), {}),
    "q_index": (4, causal, {"q_index": torch.tensor([3, 17, 5, 20])}),
    "q_index per row": (2, causal, {"q_index": torch.tensor([[3, 17], [0, 23]])}),
    "k_index": (5, causal, {"k_index": torch.arange(0, 48, 2)}),
    "both": (5, full, {"q_index": torch.arange(40, 45), "k_index": torch.arange(0, 48, 2)}),
}
#: The rows' indices that each case means.
ROWS = {
    "default": torch.arange(16, 24)[None],
    "more rows than keys": torch.arange(-6, 24)[None],
    "cache": torch.tensor([[21, 22, 23], [10, 11, 12]]),
    "documents": torch.tensor([[7, 8, 18, 19, 20, 21, 22, 23]]),
    "q_index": torch.tensor([[3, 17, 5, 20]]),
    "q_index per row": torch.tensor([[3, 17], [0, 23]]),
    "k_index": torch.arange(38, 48, 2)[None],
    "both": torch.arange(40, 45)[None],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", POSITIONAL)
@pytest.mark.parametrize("place", PLACES)
def test_positions_come_from_the_mask(place: str, option: str, backend: str) -> None:
    q_len, make_mask, indices = PLACES[place]
    q, k, v = qkv(q_len=q_len)
    options = {**OPTIONS[option](B, H, q_len, S), "backend": backend}
    mask = make_mask()
    prepared = mask.prepare(q_len, S, batch=B, like=q, **indices)
    # Bare spans know nothing of where they came from: the call says it.
    told = {"q_index": ROWS[place], "k_index": indices.get("k_index", torch.arange(S))}

    def run(mask: Any, **indices: Tensor) -> Tensor:
        out, lse = attention(q, k, v, mask=mask, return_lse=True, **indices, **options)
        return torch.cat([out, torch.where(lse.isfinite(), lse, 0)[..., None]], -1)

    within = run(mask, **indices)
    assert torch.equal(run(prepared), within)
    assert relative_error(run(prepared.lowered, **told), within) <= 24 * EPS
    assert relative_error(run(prepared, **told), within) <= 24 * EPS
    told["q_index"] = torch.full_like(told["q_index"], 3)
    assert relative_error(run(prepared, **told), within) > 1e-3


def test_a_prepared_mask_is_placed_once() -> None:
    mask = causal() & attnspan.cache(torch.tensor([24, 13]))
    assert causal().prepare(S, S).q_index is None
    assert causal().prepare(30, S).q_index is None
    assert causal().prepare(S, S).k_index is None
    prepared = mask.prepare(3, S, batch=2, like=torch.empty(0))
    assert torch.equal(prepared.q_index, ROWS["cache"].int())
    again = prepared.prepare(3, S, batch=2)
    assert torch.equal(again.q_index, prepared.q_index)
    leaves, spec = torch.utils._pytree.tree_flatten(prepared)
    assert any(leaf is prepared.q_index for leaf in leaves)
    assert torch.equal(torch.utils._pytree.tree_unflatten(leaves, spec).q_index, prepared.q_index)
    # Restricted to some keys, the rows are still those of the whole.
    some = causal().prepare(4, S, like=torch.empty(0)).spans(4, 12, k_index=torch.arange(0, S, 2))
    assert some.q_index.tolist() == [[20, 21, 22, 23]]
    assert some.k_index.tolist() == [list(range(0, S, 2))]
    fewer = some.spans(4, 3, k_index=torch.tensor([1, 5, 11]))
    assert fewer.k_index.tolist() == [[2, 10, 22]]
    assert fewer.q_index.tolist() == [[20, 21, 22, 23]]
    in_numpy = causal().prepare(4, S, q_index=np.arange(4))
    q, k, v = qkv(q_len=4)
    rows = torch.arange(4)
    options = {"bias": alibi(torch.rand(H)), "backend": "math"}
    assert torch.equal(
        attention(q, k, v, mask=in_numpy, **options),
        attention(q, k, v, mask=causal(), q_index=rows, **options),
    )


# Dropout and the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_dropout_is_no_dropout(backend: str) -> None:
    q, k, v = qkv()
    plain = attention(q, k, v, backend=backend)
    assert torch.equal(attention(q, k, v, backend=backend, dropout_p=0.0, dropout_seed=SEED), plain)
    assert torch.equal(attention(q, k, v, backend=backend, dropout_p=0), plain)


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


def test_explain_names_the_options() -> None:
    q, k, v = qkv()
    text = str(explain(q, k, v, **OPTIONS["all"](B, H, S, S)))
    assert "options  softcap 1.5, bias relative(float32[4, 15]), sinks, dropout 0.3" in text
    assert "options" not in str(explain(q, k, v))
    assert "bias dense_bias(float32[24, 24])" in str(explain(q, k, v, bias=torch.zeros(S, S)))
    with pytest.raises(ValueError, match="softcap"):
        explain(q, k, v, softcap=-1.0)


@pytest.mark.parametrize("q_index", [None, torch.zeros(0, 3, dtype=torch.int64)], ids=["none", "per row"])
def test_no_batch(q_index: Tensor | None) -> None:
    q, k = torch.randn(0, H, 3, 8, requires_grad=True), torch.randn(0, H, S, 8)
    out = attention(q, k, k, mask=causal(), q_index=q_index)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
