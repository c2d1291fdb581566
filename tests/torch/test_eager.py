"""The short way of eager calls: the same results, taken only where nothing would miss the operator."""

import warnings
from typing import Any

import pytest
import torch
from closeness import relative_error
from samples.parts import leaves
from samples.torch_calls import OPTIONS
from torch import Tensor
from watching import Watching

from attnspan import causal, full, global_keys, segments, window
from attnspan.kernels import cpu
from attnspan.torch import _eager, attention

MASKS = {
    "full": full,
    "causal": causal,
    "window": lambda: causal() & window(5),
    "or": lambda: causal() & window(3) | global_keys(2) & causal(),
    "segments": lambda: segments(torch.arange(24) // 7).prepare(24, 24, batch=2, heads=4),
}
#: A mask and the name of an option in `samples.OPTIONS`.
CALLS = {name: (make, "") for name, make in MASKS.items()} | {name: (causal, name) for name in OPTIONS}


def _qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 24, dim) for heads, dim in ((4, 16), (2, 16), (2, 8))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_both_ways_give_the_same_bits_and_strides(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, layout: Any, return_lse: bool
) -> None:
    make, option = CALLS[name]
    short, taken = _eager.attend, []

    def attend(*call: Any) -> Any:
        found = short(*call)
        taken.append(found is not None)
        return found

    def run() -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in _qkv()]
        q, k, v = (x if layout == "bhsd" else x.transpose(1, 2).contiguous() for x in inputs)
        torch.manual_seed(1)
        options = {"mask": make(), "layout": layout, **(OPTIONS[option](2, 4, 24, 24) if option else {})}
        found = attention(q, k, v, return_lse=return_lse, **options)
        outs = list(found) if return_lse else [found]
        with torch.no_grad():
            apart = attention(q, k, v, **options)
        loss = sum(x.float().square().sum() for x in outs)
        return [*outs, apart, *torch.autograd.grad(loss, [*inputs, *leaves(options)])]

    results = []
    for way in (attend, lambda *_: None):
        monkeypatch.setattr(_eager, "attend", way)
        results.append(run())
    assert taken == [True, True]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype


def test_whoever_watches_sees_the_operator() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    loss = attention(q, k, v).square().sum()
    with Watching() as mode:
        attention(q, k, v)
        loss.backward()
    assert {"attnspan.attention.default", "attnspan.attention_backward.default"} <= {*mode.seen}
    q, k, v = (x.detach() for x in (q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        attention(q, k, v)
    assert "attnspan::attention" in {event.key for event in profile.key_averages()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and warns of each value that it fixes
        traced = torch.jit.trace(lambda q: attention(q, k, v), (q,), check_trace=False)
    assert "attnspan::attention" in str(traced.graph)
    assert torch.func.grad(lambda q: attention(q, k, v).square().sum())(q).any()


@pytest.mark.parametrize("gradient", [False, True])
def test_lazily_negated_tensors_are_read_with_their_sign(gradient: bool) -> None:
    q, k, v = (x.requires_grad_(gradient) for x in _qkv())
    negated = torch._neg_view(v)  # as the imaginary part of a conjugate is, but with a unit last stride
    assert relative_error(attention(q, k, negated), -attention(q, k, v)) == 0
    sinks, bias = torch.randn(4), torch.randn(2, 4, 24, 24)
    wanted = attention(q, k, v, sinks=-sinks, bias=-bias)
    assert torch.equal(attention(q, k, v, sinks=torch._neg_view(sinks), bias=-bias), wanted)
    assert torch.equal(attention(q, k, v, sinks=-sinks, bias=torch._neg_view(bias)), wanted)


def test_strided_inputs_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            pointers.extend(x.data_ptr() for x in (q, k, v))
            return core.attend(q, k, v, *rest)

    core, pointers = cpu.core, list[int]()
    q, k, v = torch.randn(2, 9, 3, 4, 16).transpose(1, 3).unbind(2)
    wanted = attention(q.contiguous(), k.contiguous(), v.contiguous())
    turned = k.mT.contiguous().mT  # whose last stride is not 1
    assert torch.equal(attention(q, turned, v), wanted)
    monkeypatch.setattr(cpu, "core", Core())
    assert torch.equal(attention(q, k, v), wanted)
    assert pointers == [x.data_ptr() for x in (q, k, v)]


def test_batched_gradients_take_the_operator() -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = attention(x, x, x)
    incoming = torch.eye(out.numel()).view(-1, *out.shape)
    (together,) = torch.autograd.grad(out, x, incoming, is_grads_batched=True, retain_graph=True)
    apart = torch.stack([torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in incoming])
    assert torch.allclose(together, apart, atol=1e-6)


def test_saved_tensors_may_come_back_with_other_strides() -> None:
    def run() -> list[Tensor]:
        inputs = [x.requires_grad_() for x in _qkv()]
        out = attention(*inputs)
        out.square().sum().backward()
        return [x.grad for x in inputs]

    wanted = run()
    turn = lambda x: x.mT.contiguous().mT if x.dim() == 4 else x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turn):
        got = run()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
