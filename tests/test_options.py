"""Descriptions of biases: what they lower to, in every framework, and what is refused."""

import math

import numpy as np
import pytest
import torch
from samples.mistaken_objects import BIASES
from samples.mistakes import check, error_of, rows

import attnspan as a
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI

SIZES = {"batch": 2, "heads": 4, "q_len": 3, "k_len": 5}


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20, 64])
def test_slopes_are_those_of_the_papers_code(heads):
    def power_of_two(n):
        return [2 ** (-8 / n * (i + 1)) for i in range(n)]

    closest = 2 ** math.floor(math.log2(heads))
    want = power_of_two(closest) + power_of_two(2 * closest)[0::2][: heads - closest]
    slopes = a.alibi_slopes(heads)
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, want, rtol=1e-6)


def _t5(relative_position, bidirectional, num_buckets, max_distance):
    """Buckets as T5's own code computes them, in float32."""
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets += (relative_position > 0).long() * num_buckets
        relative_position = relative_position.abs()
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    exact = num_buckets // 2
    large = exact + (
        torch.log(relative_position.float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    ).long().clamp(min=0)
    large = large.clamp(max=num_buckets - 1)
    return buckets + torch.where(relative_position < exact, relative_position, large)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (64, 256), (8, 20), (32, 1000), (6, 7)])
def test_buckets_are_t5s(num_buckets, max_distance, bidirectional):
    buckets = a.t5_buckets(num_buckets, max_distance, bidirectional)
    assert buckets.shape == (2 * max_distance + 1,)
    far = 3 * max_distance
    distance = torch.arange(-far, far + 1)
    got = buckets[distance.clamp(-max_distance, max_distance) + max_distance]
    np.testing.assert_array_equal(got, _t5(distance, bidirectional, num_buckets, max_distance).numpy())


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_lowering(convert):
    slopes, rows = np.arange(4, dtype=np.float32), np.ones((2, 4), np.float16)
    table, buckets = np.arange(12, dtype=np.float64).reshape(4, 3), np.array([2, 0, 0, 1, 1])
    cases = [
        (a.alibi(convert(slopes)), slopes[None], ALIBI),
        (a.alibi(convert(rows), signed=True), rows, SIGNED_ALIBI),
        (a.relative(convert(table)), table, DISTANCE),
        (a.relative(convert(table), convert(buckets)), table[:, buckets], DISTANCE),
        (a.relative(convert(table), buckets), table[:, buckets], DISTANCE),
    ]
    for bias, want, kind in cases:
        lowered, got_kind = bias.lower(**SIZES)
        assert type(lowered) is type(convert(want))
        assert (str(lowered.dtype).removeprefix("torch."), got_kind) == ("float32", kind)
        np.testing.assert_array_equal(np.asarray(lowered), want.astype(np.float32))
        assert str(bias.lower(**SIZES, wide=True)[0].dtype).endswith("float64")


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (4, 1, 5), (2, 1, 3, 5), (1, 4, 1, 5), (2, 4, 3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dense_keeps_its_dtype_unless_that_is_double(shape, dtype):
    values = torch.zeros(shape, dtype=getattr(torch, dtype))
    lowered, kind = a.dense_bias(values).lower(**SIZES)
    assert (kind, lowered.shape) == (DENSE, (1,) * (4 - len(shape)) + shape)
    assert lowered.dtype == (torch.float32 if dtype == "float64" else values.dtype)
    assert a.dense_bias(values).lower(**SIZES, wide=True)[0].dtype == torch.float64


def test_parameters_get_gradients():
    table = torch.zeros(4, 3, requires_grad=True)
    a.relative(table, np.array([2, 0, 0, 1, 1])).lower(**SIZES)[0].sum().backward()
    assert table.grad.tolist() == [[2.0, 2.0, 1.0]] * 4
    slopes = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    a.alibi(slopes).lower(**SIZES)[0].sum().backward()
    assert slopes.grad.tolist() == [[1.0] * 4] * 2


@pytest.mark.slow
def test_lowering_traces_without_a_break():
    def lower(table, slopes, values, buckets):
        biases = a.relative(table, a.t5_buckets(8, 4)), a.alibi(slopes), a.alibi(a.alibi_slopes(4))
        biases += a.dense_bias(values), a.relative(values[:, :4].T, buckets)
        return [bias.lower(**SIZES, like=table)[0] for bias in biases]

    inputs = torch.randn(4, 8), torch.randn(4), torch.randn(3, 5)
    compiled = torch.compile(lower, fullgraph=True, backend="aot_eager")
    buckets = torch.tensor([0, 1, 2])
    for got, want in zip(compiled(*inputs, buckets), lower(*inputs, buckets), strict=True):
        assert isinstance(want, torch.Tensor)
        assert torch.equal(got, want)
    # Under a compiler values cannot be read; the gather itself refuses, also what would count from the end.
    for outside in (3, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            compiled(*inputs, torch.tensor([0, outside, 2]))
    torch._dynamo.reset()


@pytest.mark.slow
def test_jax():
    jax = pytest.importorskip("jax")
    table, buckets = jax.numpy.arange(12.0).reshape(4, 3), np.array([2, 0, 0, 1, 1])

    def lower(table, buckets=buckets):
        return a.relative(table, buckets).lower(**SIZES)[0]

    assert isinstance(lower(table), jax.Array)
    np.testing.assert_array_equal(lower(table), np.arange(12.0).reshape(4, 3)[:, buckets])
    # What cannot be read is never a plausible wrong value.
    outside = np.isnan(jax.jit(lower)(table, jax.numpy.array([3, 0, -1])))
    np.testing.assert_array_equal(outside, [[True, False, True]] * 4)
    assert jax.grad(lambda t: lower(t).sum())(table).tolist() == [[2.0, 2.0, 1.0]] * 4
    assert isinstance(a.alibi(a.alibi_slopes(4)).lower(**SIZES, like=table)[0], jax.Array)


@pytest.mark.parametrize("mistake", rows(BIASES), ids=repr)
def test_what_is_refused(mistake):
    check(error_of(eval(f"lambda: {mistake.code}", globals())), mistake)
