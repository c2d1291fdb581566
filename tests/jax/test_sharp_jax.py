"""Gradients where a bias is large, next to `jax.nn.dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import error

from attnspan.jax import attention


def _exact(inputs: list[Any], dout: Any) -> list[np.ndarray]:
    q, k, v, bias = leaves = [torch.tensor(np.asarray(x)).double().requires_grad_() for x in inputs]
    out = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, -1) @ v
    grads = torch.autograd.grad(out, leaves, torch.tensor(np.asarray(dout)).double())
    return [x.detach().numpy() for x in (out, *grads)]


def _results(attend: Callable[..., Any], inputs: list[Any], dout: Any) -> list[np.ndarray]:
    out, pull = jax.vjp(attend, *inputs)
    return [np.asarray(x, np.float64) for x in (out, *pull(dout))]


def _peer(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, bias=bias).swapaxes(1, 2)


def _pooled(results: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate([x.ravel() for x in column]) for column in zip(*results, strict=True)]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_no_less_accurate_than_jaxs_own(backend: str, scale: float) -> None:
    def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias, backend=backend)

    exact, peer, found = [], [], []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        q, k, v, dout = (jnp.asarray(rng.standard_normal((1, 2, 96, 32)), jnp.float32) for _ in range(4))
        inputs = [q, k, v, jnp.asarray(rng.standard_normal((1, 2, 96, 96)) * scale, jnp.float32)]
        exact.append(_exact(inputs, dout))
        peer.append(_results(_peer, inputs, dout))
        found.append(_results(ours, inputs, dout))
    for got, theirs, wanted in zip(*map(_pooled, (found, peer, exact)), strict=True):
        # The tiles of "xla" sum their weights one after the other.
        factor = 1.5 if backend == "cpu" else 1.75
        assert error(got, wanted) <= factor * max(error(theirs, wanted), float(jnp.finfo("float32").eps))
