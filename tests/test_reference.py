"""The oracle itself: against finite differences and against torch's attention in float64."""

import numpy as np
import pytest
import torch
from closeness import error
from samples.conformance import OPTIONS
from samples.problems import Case, as_numpy, make

from attnspan import causal, from_dense, full, segments, window
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.reference import backward, forward


def _problem(seed=0, batch=2, heads=4, kv_heads=2, q_len=5, k_len=7, head_dim=3, v_dim=4):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, q_len, head_dim))
    k = rng.standard_normal((batch, kv_heads, k_len, head_dim))
    v = rng.standard_normal((batch, kv_heads, k_len, v_dim))
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [full(), causal(), window(2, 1)], ids=repr)
def test_equals_torch_in_float64(mask, kv_heads):
    arrays, spans = _problem(kv_heads=kv_heads), mask.spans(5, 7)
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    want = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.from_numpy(spans.dense()), scale=0.7, enable_gqa=True
    )
    dout = np.random.default_rng(1).standard_normal(want.shape)
    want.backward(torch.from_numpy(dout))
    out, _ = forward(*arrays, spans.bounds, scale=0.7)
    found = out, *backward(dout, None, *arrays, spans.bounds, scale=0.7)
    for got, tensor in zip(found, (want.detach(), *(x.grad for x in tensors)), strict=True):
        # Two float64 computations of a few hundred operations each.
        assert error(got, tensor.numpy()) < 1000 * np.finfo(np.float64).eps


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


def test_bad_input_is_named():
    q, k, v = _problem()
    bounds = causal().spans(5, 7).bounds
    with pytest.raises(ValueError, match=r"reference: expected q .* got \(2, 4, 5, 3\), \(2, 3"):
        forward(q, np.zeros((2, 3, 7, 3)), v, bounds, scale=1.0)
    illegal = bounds.copy()
    illegal[0, 0, 3] = (0, 8)
    with pytest.raises(ValueError, match=r"query 3: expected .* in \[0, 7\], got \(0, 8\)"):
        forward(q, k, v, illegal, scale=1.0)
    # An id in two runs writes the marker of broken promises.
    marked = segments(torch.tensor([1, 0, 1, 1, 0, 2, 2])).spans(5, 7).bounds.numpy()
    with pytest.raises(ValueError, match=r"\(0, -1\) marks a query"):
        forward(q, k, v, marked, scale=1.0)


HEADS, Q_LEN, K_LEN = 4, 5, 7
SIZES = {"batch": 2, "heads": HEADS, "q_len": Q_LEN, "k_len": K_LEN, "head_dim": 3, "v_dim": 4, "runs": 2}


def _normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_finite_differences(name):
    problem = make(Case(OPTIONS[name], dtype=torch.float64, **SIZES))
    q, k, v, dout, dlse = (x.double().numpy() for x in (*problem.inputs.values(), problem.dout, problem.dlse))
    options, bounds = Options(*map(as_numpy, problem.options or Options())), problem.bounds.numpy()
    inputs = {"q": q, "k": k, "v": v, "bias": options.bias, "sinks": options.sinks}
    rng = np.random.default_rng(3)

    def loss(q, k, v, bias, sinks):
        out, lse = forward(q, k, v, bounds, 0.9, options._replace(bias=bias, sinks=sinks))
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    grads = dict(zip(inputs, backward(dout, dlse, q, k, v, bounds, 0.9, options), strict=True))
    step = 1e-5
    for which, given in inputs.items():
        if given is None:
            assert grads[which].shape == (0,)
            continue
        assert grads[which].shape == given.shape
        direction = rng.standard_normal(given.shape)
        # Slopes and tables act through distances of up to 100, whatever their own size.
        far = which == "bias" and options.k_index is not None
        direction /= np.linalg.norm(direction) * (100 if far else 1)
        ahead = loss(**{**inputs, which: given + step * direction})
        behind = loss(**{**inputs, which: given - step * direction})
        slope = (ahead - behind) / (2 * step)
        exact = (grads[which] * direction).sum()
        assert abs(exact) > 1e-4, "a direction without a slope shows nothing"
        # Exact to O(step**2) times third derivatives of order ten, and to eps / step of rounding.
        assert abs(slope - exact) < 100 * step**2, which


def test_options_mean_what_they_say():
    """Each option against its definition as whole matrices."""
    q, k, v = _problem(heads=4, kv_heads=4)
    bounds = full().spans(Q_LEN, K_LEN).bounds
    scores = 0.7 * q @ k.swapaxes(-1, -2)
    rows, keys = np.arange(2, 7)[:, None], np.arange(7)
    slopes, table, sinks = _normal(1, HEADS), _normal(HEADS, 5), _normal(HEADS)
    dense = _normal(2, 1, 1, K_LEN)
    capped = 3 * np.tanh(scores / 3)
    by_slope = slopes[..., None, None] * (keys - rows)
    cases = [
        (Options(softcap=3.0), capped),
        (Options(bias=slopes, bias_kind=ALIBI), scores - by_slope * np.sign(keys - rows)),
        (Options(bias=slopes, bias_kind=SIGNED_ALIBI), scores + by_slope),
        (Options(bias=table, bias_kind=DISTANCE), scores + table[:, np.clip(keys - rows, -2, 2) + 2]),
        (Options(bias=dense, bias_kind=DENSE), scores + dense),
        (Options(softcap=3.0, bias=dense, bias_kind=DENSE), capped + dense),
        (Options(sinks=sinks), scores),
    ]
    for options, logits in cases:
        total = np.exp(logits).sum(-1, keepdims=True)
        if options.sinks is not None:
            total = total + np.exp(sinks)[:, None, None]
        out, lse = forward(q, k, v, bounds, 0.7, options)
        np.testing.assert_allclose(out, np.exp(logits) / total @ v, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, np.log(total)[..., 0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("hidden", ["by spans", "by its bias"])
@pytest.mark.parametrize("sinks", [None, _normal(HEADS)], ids=["plain", "sinks"])
def test_a_row_that_sees_nothing_is_zero_or_falls_into_its_sink(sinks, hidden):
    q, k, v = _problem()
    visible, options = np.ones((5, 7), bool), Options(sinks=sinks)
    visible[1] = False
    spans = from_dense(visible).spans(5, 7)
    if hidden == "by its bias":
        bias = np.where(visible, 0, -np.inf)[None, None]
        spans, options = full().spans(5, 7), options._replace(bias=bias, bias_kind=DENSE)
    out, lse = forward(q, k, v, spans.bounds, 1.0, options)
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == (-np.inf if sinks is None else sinks)).all()
    assert np.isfinite(lse[:, :, [0, 2, 3, 4]]).all()
    dout, dlse = np.zeros_like(out), np.zeros_like(lse)
    dout[:, :, 1], dlse[:, :, 1] = 1.0, 1.0
    *others, dsinks = (*backward(dout, dlse, q, k, v, spans.bounds, 1.0, options), None, None)[:5]
    assert all(grad is None or (grad == 0).all() for grad in others)
    if sinks is not None:
        np.testing.assert_array_equal(dsinks, np.full(HEADS, 2.0))  # lse is the sink, in two batch rows
