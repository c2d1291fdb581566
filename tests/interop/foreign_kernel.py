"""Foreign kernels for the tests of `wrap`: a library that takes addresses, and an eager function."""

import ctypes
import itertools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan.torch import Wrapped, wrap

#: The schema of kernels whose Python signature does not tell it.
QKV = "Tensor q, Tensor k, Tensor v"
_numbers = itertools.count()


def _memory(*tensors: Tensor) -> Iterable[np.ndarray]:
    """What stands at the addresses of tensors, in float64 (B, H, S, ...): no operator of torch takes part."""
    for x in tensors:
        assert x.is_contiguous(), "the library would read other memory"
        assert x.dtype == torch.float32
        numbers = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        yield np.frombuffer(numbers, np.float32).reshape(x.shape).swapaxes(1, 2).astype(float)


def _made(*arrays: np.ndarray) -> tuple[Tensor, ...]:
    """Memory of its own, float32 (B, S, H, D)."""
    return tuple(torch.from_numpy(x.swapaxes(1, 2).astype(np.float32, order="C")) for x in arrays)


class Library:
    """The library's two functions, with the signature of flash-attn's. It sums in float64."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention of contiguous float32 (B, S, H, D); returns out and lse."""
        self.calls += 1
        weights, lse, (_, _, values) = self._weights(q, k, v, softmax_scale, causal)
        return *_made(weights @ values), torch.from_numpy(lse.astype(np.float32))

    def out(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
    ) -> Tensor:
        """The output alone."""
        return self.forward(q, k, v, softmax_scale, causal)[0]

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k and v."""
        weights, _, (queries, keys, values) = self._weights(q, k, v, softmax_scale, causal)
        (found,) = _memory(dout)
        dweights = found @ values.swapaxes(2, 3)
        mean = (weights * dweights).sum(-1) - dlse.double().numpy()
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        dscores = scale * weights * (dweights - mean[..., None])
        return _made(dscores @ keys, dscores.swapaxes(2, 3) @ queries, weights.swapaxes(2, 3) @ found)

    @staticmethod
    def _weights(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Softmax weights, the logarithms of their sums, and the inputs."""
        queries, keys, values = _memory(q, k, v)
        scores = queries @ keys.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        visible = np.tri(*scores.shape[2:], k.shape[1] - q.shape[1]) if causal else np.ones(scores.shape[2:])
        most = np.where(visible, scores, -1e300).max(-1, keepdims=True)
        weights = np.where(visible, np.exp(np.minimum(scores - most, 0)), 0)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, most + np.log(total), -np.inf)[..., 0]
        return weights / np.maximum(total, 1e-300), lse, [queries, keys, values]


def fresh_name(base: str = "kernel") -> str:
    """A name that no operator of this process has."""
    return f"{base}_{next(_numbers)}"


def inputs(q_len: int = 6, k_len: int = 6, batch: int = 2, grad: bool = False) -> list[Tensor]:
    """q, k, v of shape (batch, length, 3, 8)."""
    return [torch.randn(batch, n, 3, 8, requires_grad=grad) for n in (q_len, k_len, k_len)]


def wrap_foreign(foreign: Library, base: str = "foreign", **options: object) -> Wrapped:
    """The library's attention with its backward, as its user would wrap it."""
    given = {"outputs": ("out", "lse"), "backward": foreign.backward, "layout": "bshd", **options}
    return wrap(foreign.forward, name=fresh_name(base), strides="contiguous", **given)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None) -> Tensor:
    """A user's own function, in (B, H, S, D)."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
