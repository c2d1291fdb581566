"""The short way of eager calls: the same results, taken only where nothing would miss the operator."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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

SHAPE = (2, 4, 24, 16)
MASKS = {
    "full": full,
    "causal": causal,
    "window": lambda: causal() & window(5),
    "or": lambda: causal() & window(3) | global_keys(2) & causal(),
    "segments": lambda: segments(torch.arange(24) // 7).prepare(24, 24, batch=2, heads=4),
}


def _qkv(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(SHAPE, **options),
        torch.randn(2, 2, 24, 16, **options),
        torch.randn(2, 2, 24, 8, **options),
    )
    return q, k, v


@contextmanager
def _ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(_eager, "attend", lambda *_: None)
        yield


#: A mask and the name of an option in `samples.OPTIONS`.
CALLS = {name: (make, "") for name, make in MASKS.items()} | {name: (causal, name) for name in OPTIONS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_both_ways_give_the_same_bits_and_strides(
    monkeypatch: pytest.MonkeyPatch,
    taken: list[bool],
    dtype: torch.dtype,
    name: str,
    layout: Any,
    return_lse: bool,
) -> None:
    make, option = CALLS[name]

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

    short = run()
    assert taken == [True, True]
    with _ordinary(monkeypatch):
        ordinary = run()
    for a, b in zip(short, ordinary, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype


def test_plain_calls_go_the_short_way(taken: list[bool]) -> None:
    q, k, v = _qkv()
    attention(q, k, v)
    attention(q, k, v, mask=causal(), scale=0.5, backend="cpu")
    attention(q, k, v, mask=MASKS["segments"]())
    attention(torch.nn.Parameter(q), k, v, mask=causal(), return_lse=True)
    with torch.no_grad():
        attention(q.requires_grad_(), k, v, mask=window(3))
    with torch.inference_mode():
        attention(q, k, v, mask=window(4))
    assert taken == [True] * 6


def test_whoever_watches_sees_the_operator(taken: list[bool]) -> None:
    q, k, v = _qkv()
    with Watching() as mode:
        attention(q, k, v)
    assert "attnspan.attention.default" in mode.seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        attention(q, k, v)
    assert "attnspan::attention" in {event.key for event in profile.key_averages()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and warns of each value that it fixes
        traced = torch.jit.trace(lambda q: attention(q, k, v), (q,), check_trace=False)
    assert "attnspan::attention" in str(traced.graph)
    torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    assert taken == [False] * 4


def test_a_watcher_of_the_backward_pass_sees_the_operator() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    loss = attention(q, k, v).square().sum()
    with Watching() as mode:
        loss.backward()
    assert "attnspan.attention_backward.default" in mode.seen


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
    monkeypatch.setattr(cpu, "core", Core())
    assert torch.equal(attention(q, k, v), wanted)
    assert pointers == [x.data_ptr() for x in (q, k, v)]


def test_a_last_stride_other_than_one_is_still_right(taken: list[bool]) -> None:
    q, k, v = _qkv()
    turned = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attention(q, turned, v), attention(q, k, v))
    assert taken == [False, True]


def test_without_the_exchange_table_the_ordinary_way_is_left(
    monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    wanted = attention(*_qkv())
    monkeypatch.setattr(_eager, "_READABLE", False)
    assert torch.equal(attention(*_qkv()), wanted)
    assert taken == [True, False]


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
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() == 4 else x
    ):
        got = run()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
