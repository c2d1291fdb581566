"""Biases of millions and more: what all keys of a row share changes nothing but the lse, the rest decides."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from closeness import relative_error
from torch import Tensor

from attnspan import Spans, alibi, causal, dense_bias, full, relative, t5_buckets
from attnspan.torch import attention

LENGTH, HEADS, WIDTH = 300, 2, 16  # more than a tile of any backend
Results = list[Tensor]  # out, lse, and the gradients of q, k, v and of the bias's own values
DLSE = torch.linspace(-1, 1, HEADS)[:, None]


def _arrays(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH) for _ in range(4)]


def _by_torch(
    backend: str, bias_of: Callable[..., Any], values: np.ndarray, dout: Tensor | None = None, **call: Any
) -> Results:
    *qkv, own = _arrays(call.pop("length", LENGTH))
    leaves = [x.requires_grad_() for x in (*qkv, torch.from_numpy(values))]
    attend = attention
    if call.pop("compiled", False):
        attend = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = attend(*leaves[:3], bias=bias_of(leaves[3]), backend=backend, return_lse=True, **call)
    gradients = own if dout is None else dout, DLSE.expand_as(found[1])
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, gradients)]


def _by_jax(
    backend: str, bias_of: Callable[..., Any], values: np.ndarray, dout: Tensor | None = None, **call: Any
) -> Results:
    jax = pytest.importorskip("jax")
    ours = pytest.importorskip("attnspan.jax")
    *qkv, own = _arrays(call.pop("length", LENGTH))
    call = {name: jax.numpy.asarray(x.numpy()) if isinstance(x, Tensor) else x for name, x in call.items()}
    leaves = [jax.numpy.asarray(x) for x in (*qkv, values)]
    call |= {"backend": backend, "return_lse": True}
    found, back = jax.vjp(lambda *x: ours.attention(*x[:3], bias=bias_of(x[3]), **call), *leaves)
    gradients = own if dout is None else dout, DLSE.expand(found[1].shape)
    return [torch.from_dlpack(x) for x in (*found, *back(tuple(map(jax.numpy.asarray, gradients))))]


SLOPES = {"down": np.array([0.5, 0.1], np.float32), "up": np.array([-0.5, -0.1], np.float32)}


def _exact(slopes: np.ndarray, queries: Tensor, keys: Tensor, *, signed: bool) -> list[Tensor]:
    *qkv, dout = (x.double() for x in _arrays(LENGTH))
    q, k, v = (x.requires_grad_() for x in qkv)
    distance = (keys - queries[:, None]).double()
    bias = torch.tensor(slopes).double()[:, None, None] * (distance if signed else -distance.abs())
    scores = q @ k.mT / WIDTH**0.5 + bias
    found = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return [*found, *torch.autograd.grad(found, (q, k, v), (dout, DLSE.expand_as(found[1]).double()))]


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 10**5, 10**8])
@pytest.mark.parametrize("keys", ["all", "chosen"])
@pytest.mark.parametrize("signed", [False, True], ids=["distance", "signed"])
@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize(
    ("call", "backend"), [(_by_torch, "cpu"), (_by_torch, "math"), (_by_jax, "xla"), (_by_jax, "math")]
)
def test_slopes_far_from_their_keys(call, backend, slopes, signed, keys, offset):
    index = {"q_index": torch.arange(LENGTH, dtype=torch.int32) + offset}
    places = torch.arange(LENGTH, dtype=torch.int32)
    if keys == "chosen":  # with a gap, in which queries may lie
        places = places * 3 + 200 * (places > 100)
        index["k_index"] = places
    run = partial(call, backend, partial(alibi, signed=signed), slopes, mask=full(), **index)
    if backend == "cpu" and offset > 2**24:
        with pytest.raises(ValueError, match=r"distances .* at most 2\^24 .* got 100"):
            run()
        return
    exact = _exact(slopes, index["q_index"], places, signed=signed)
    for got, wanted in zip(run()[:5], exact, strict=True):
        assert relative_error(got, wanted) < 1.5e-6


@pytest.mark.parametrize("signed", [False, True], ids=["distance", "signed"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1]], ids=["ascending", "shuffled"])
def test_only_distances_of_keys_that_are_seen_are_limited(order: list[int], signed: bool) -> None:
    """A window over a long sequence hides the far keys, whose distances are then no obstacle."""
    last = 2**25
    places = torch.tensor([0, last - 2, last - 1, last])[order]
    seen = Spans(torch.tensor([[[[[1, 4], [4, 4]]]]] if order[0] == 0 else [[[[[0, 1], [2, 4]]]]]).int(), 4)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    call = {"q_index": torch.tensor([last]), "k_index": places}
    call["bias"] = alibi(torch.tensor([0.5, 0.25]), signed=signed)
    found = attention(q, k, v, mask=seen, backend="cpu", **call)
    wanted = attention(q.double(), k.double(), v.double(), mask=seen, backend="math", **call)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    everything = Spans(torch.tensor([[[[[0, 4]]]]]).int(), 4)
    with pytest.raises(ValueError, match=r"distances .* at most 2\^24 .* got 33554432"):
        attention(q, k, v, mask=everything, backend="cpu", **call)


#: The shape of the values, and the bias that has the same one for all keys if they are all alike.
SHARED = {
    "T5": ((HEADS, 8), lambda x: relative(x, t5_buckets(8, 16))),
    "table": ((HEADS, 41), relative),
    "dense": ((1, HEADS, 40, 40), dense_bias),
}


#: By backend. The last ones are compiled, and code without a kernel, whose weights sum to 1 all the same.
CALLS: dict[str, Callable[..., Results]] = {
    **{f"torch {name}": partial(_by_torch, name) for name in ("cpu", "math")},
    **{f"jax {name}": partial(_by_jax, name) for name in ("cpu", "math")},
    "compiled": partial(_by_torch, "cpu", compiled=True),
    "jax xla": partial(_by_jax, "xla"),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("depth", [-1e6, -1e9])
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("call", CALLS)
def test_what_all_keys_share_changes_no_result(call: str, kind: str, depth: float) -> None:
    torch._dynamo.reset()
    shape, bias_of = SHARED[kind]
    ones = torch.ones(1, HEADS, 40, WIDTH) if call == "jax xla" else None
    found, plain = (
        CALLS[call](bias_of, np.full(shape, x, np.float32), ones, mask=causal(), length=40)
        for x in (depth, 0.0)
    )
    if call == "jax xla":  # It adds the bias to float32 scores, as plain code does.
        torch.testing.assert_close(found[4].sum(2), torch.full((1, HEADS, WIDTH), 40.0), rtol=1e-5, atol=0)
        return
    torch.testing.assert_close(found.pop(1).mean(), torch.tensor(depth), rtol=1e-3, atol=10)
    for got, wanted in zip(found, (plain[0], *plain[2:]), strict=True):
        assert relative_error(got, wanted) <= 4e-6
