"""ALiBi where all keys are far from a query: a bias of millions, whose differences decide the weights."""

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from attnspan import alibi, full
from attnspan.torch import attention

LENGTH, HEADS, WIDTH = 300, 2, 16  # more than a tile of any backend
SLOPES = {"down": [0.5, 0.1], "up": [-0.5, -0.1]}


def _arrays() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, LENGTH, WIDTH) for _ in range(4)]


def _exact(slopes: list[float], queries: Tensor, keys: Tensor, *, signed: bool) -> list[Tensor]:
    *qkv, dout = (x.double() for x in _arrays())
    q, k, v = (x.requires_grad_() for x in qkv)
    distance = (keys - queries[:, None]).double()
    bias = torch.tensor(slopes).double()[:, None, None] * (distance if signed else -distance.abs())
    out = torch.softmax(q @ k.mT / WIDTH**0.5 + bias, -1) @ v
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def _by_torch(backend: str, slopes: list[float], signed: bool, **index: Tensor) -> list[Tensor]:
    *qkv, dout = _arrays()
    qkv = [x.requires_grad_() for x in qkv]
    bias = alibi(torch.tensor(slopes), signed=signed)
    out = attention(*qkv, mask=full(), bias=bias, backend=backend, **index)
    return [out, *torch.autograd.grad(out, qkv, dout)]


def _by_jax(backend: str, slopes: list[float], signed: bool, **index: Tensor) -> list[Tensor]:
    jax = pytest.importorskip("jax")
    ours = pytest.importorskip("attnspan.jax")
    *qkv, dout = (jax.numpy.asarray(x.numpy()) for x in _arrays())
    given = {name: jax.numpy.asarray(x.numpy()) for name, x in index.items()}
    bias = alibi(jax.numpy.asarray(slopes, "float32"), signed=signed)
    out, back = jax.vjp(lambda *x: ours.attention(*x, mask=full(), bias=bias, backend=backend, **given), *qkv)
    return [torch.from_dlpack(x) for x in (out, *back(dout))]


@pytest.mark.covering(2)
@pytest.mark.parametrize("offset", [0, 10**3, 10**5, 10**7, 10**8])
@pytest.mark.parametrize("keys", ["all", "chosen"])
@pytest.mark.parametrize("signed", [False, True], ids=["distance", "signed"])
@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize(
    ("call", "backend"), [(_by_torch, "cpu"), (_by_torch, "math"), (_by_jax, "xla"), (_by_jax, "math")]
)
def test_weights_far_from_their_keys(call, backend, slopes, signed, keys, offset):
    index = {"q_index": torch.arange(LENGTH, dtype=torch.int32) + offset}
    places = torch.arange(LENGTH, dtype=torch.int32)
    if keys == "chosen":  # with a gap, in which queries may lie
        places = places * 3 + 200 * (places > 100)
        index["k_index"] = places
    if backend == "cpu" and offset > 2**24:
        with pytest.raises(ValueError, match=r"distances .* at most 2\^24 .* got 100"):
            call(backend, slopes, signed, **index)
        return
    found = call(backend, slopes, signed, **index)
    for got, exact in zip(found, _exact(slopes, index["q_index"], places, signed=signed), strict=True):
        assert relative_error(got, exact) < 1.5e-6
