"""The oracle itself: against finite differences and against torch's attention in float64."""

import numpy as np
import pytest
import torch

from attnspan import causal, from_dense, full, segments, window
from attnspan.reference import backward, forward


def _problem(seed=0, batch=2, heads=4, kv_heads=2, q_len=5, k_len=7, head_dim=3, v_dim=4):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, q_len, head_dim))
    k = rng.standard_normal((batch, kv_heads, k_len, head_dim))
    v = rng.standard_normal((batch, kv_heads, k_len, v_dim))
    return q, k, v


def _random_bounds(rng, q_len, k_len, batch=1, heads=1):
    visible = rng.random((batch, heads, q_len, k_len)) < 0.5
    visible[:, :, 1] = False
    return from_dense(visible).spans(q_len, k_len, batch=batch, heads=heads)


def _norm_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [full(), causal(), window(2, 1)])
def test_equals_torch_in_float64(mask, kv_heads):
    q, k, v = _problem(kv_heads=kv_heads)
    spans = mask.spans(5, 7)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.from_numpy(spans.dense()), scale=0.7, enable_gqa=True
    )
    dout = np.random.default_rng(1).standard_normal(want.shape)
    want.backward(torch.from_numpy(dout))
    out, _ = forward(q, k, v, spans.bounds, scale=0.7)
    grads = backward(dout, None, q, k, v, spans.bounds, scale=0.7)
    # Two float64 computations of a few hundred operations each.
    tolerance = 1000 * np.finfo(np.float64).eps
    assert _norm_error(out, want.detach().numpy()) < tolerance
    for got, tensor in zip(grads, tensors, strict=True):
        assert _norm_error(got, tensor.grad.numpy()) < tolerance


def test_lse_is_the_logarithm_of_the_sum():
    q, k, v = _problem(heads=1, kv_heads=1, batch=1)
    spans = causal().spans(5, 7)
    scores = np.where(spans.dense(), 0.5 * q @ k.swapaxes(-1, -2), -np.inf)
    _, lse = forward(q, k, v, spans.bounds, scale=0.5)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_finite_differences(seed):
    rng = np.random.default_rng(seed)
    inputs = _problem(seed)
    bounds = _random_bounds(rng, 5, 7, batch=2, heads=4).bounds
    dout, dlse = rng.standard_normal((2, 4, 5, 4)), rng.standard_normal((2, 4, 5))

    def loss(*qkv):
        out, lse = forward(*qkv, bounds, scale=0.9)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    grads = backward(dout, dlse, *inputs, bounds, scale=0.9)
    step = 1e-5
    for which, grad in enumerate(grads):
        direction = rng.standard_normal(grad.shape)
        ahead, behind = list(inputs), list(inputs)
        ahead[which] = inputs[which] + step * direction
        behind[which] = inputs[which] - step * direction
        slope = (loss(*ahead) - loss(*behind)) / (2 * step)
        # Exact to O(step**2) times third derivatives of order one, and to eps / step of rounding.
        assert abs(slope - (grad * direction).sum()) < 100 * step**2 * np.linalg.norm(direction) ** 2


def test_a_row_that_sees_nothing_is_zero_and_contributes_nothing():
    rng = np.random.default_rng(0)
    q, k, v = _problem()
    spans = _random_bounds(rng, 5, 7)
    out, lse = forward(q, k, v, spans.bounds, scale=1.0)
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == -np.inf).all()
    assert np.isfinite(lse[:, :, [0, 2, 3, 4]]).all()
    dout, dlse = np.zeros_like(out), np.zeros_like(lse)
    dout[:, :, 1], dlse[:, :, 1] = 1.0, 1.0
    for grad in backward(dout, dlse, q, k, v, spans.bounds, scale=1.0):
        assert (grad == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_reaches_exactly_the_rows_that_may_see_it(poison):
    q, k, v = _problem(heads=1, kv_heads=1, batch=1)
    spans = window(1, 0).spans(5, 7)
    sees = spans.dense()[0, 0, :, 4]
    k[0, 0, 4, 0] = poison
    v[0, 0, 4] = np.nan
    out, _ = forward(q, k, v, spans.bounds, scale=1.0)
    np.testing.assert_array_equal(~np.isfinite(out[0, 0]).all(-1), sees)
    dq, _, _ = backward(np.ones_like(out), None, q, k, v, spans.bounds, scale=1.0)
    np.testing.assert_array_equal(~np.isfinite(dq[0, 0]).all(-1), sees)


def test_large_logits_do_not_overflow():
    q, k, v = _problem()
    bounds = causal().spans(5, 7).bounds
    out, lse = forward(1e4 * q, k, v, bounds, scale=1.0)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_bad_input_is_named():
    q, k, v = _problem()
    bounds = causal().spans(5, 7).bounds
    with pytest.raises(ValueError, match=r"reference: expected q .* got \(2, 4, 5, 3\), \(2, 3"):
        forward(q, np.zeros((2, 3, 7, 3)), v, bounds, scale=1.0)
    illegal = bounds.copy()
    illegal[0, 0, 3] = (0, 8)
    with pytest.raises(ValueError, match=r"row 3: expected .* in \[0, 7\], got \(0, 8\)"):
        forward(q, k, v, illegal, scale=1.0)
    # An id in two runs writes the marker of broken promises.
    marked = segments(torch.tensor([1, 0, 1, 1, 0, 2, 2])).spans(5, 7).bounds.numpy()
    with pytest.raises(ValueError, match=r"\(0, -1\) marks a row"):
        forward(q, k, v, marked, scale=1.0)
