"""Errors against the float64 oracle, next to those of ATen's own CPU kernels on the same inputs.

At most 1.5 times ATen's error is allowed. Rounding the exact result to the dtype is the least error that
any kernel has, so where ATen is luckier than that on a small problem the rounding error stands in.
"""

import pytest
import torch
from closeness import relative_error
from covering import cells
from samples import Sample, make_sample, oracle
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as aten

from attnspan import Spans
from attnspan.torch import attention

FACTOR = 1.5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("out", "dq", "dk", "dv")

SHAPES = {
    "square": {"q_len": 96, "k_len": 96, "head_dim": 64, "v_dim": 64},
    "odd": {"q_len": 61, "k_len": 173, "head_dim": 40, "v_dim": 40, "runs": 2},
    "decode": {"q_len": 1, "k_len": 259, "head_dim": 64, "v_dim": 64, "q_heads": 8, "kv_heads": 1},
    "long queries": {"q_len": 150, "k_len": 33, "head_dim": 72, "v_dim": 72},
    "D8": {"q_len": 45, "k_len": 70, "head_dim": 8, "v_dim": 8, "runs": 4},
    "D128": {"q_len": 70, "k_len": 131, "head_dim": 128, "v_dim": 128, "runs": 3},
    "D256": {"q_len": 35, "k_len": 67, "head_dim": 256, "v_dim": 256, "q_heads": 2},
    "odd D": {"q_len": 37, "k_len": 53, "head_dim": 37, "v_dim": 37},
    "v_dim": {"q_len": 50, "k_len": 90, "head_dim": 48, "v_dim": 80},
    "gqa8": {"q_len": 40, "k_len": 60, "head_dim": 32, "v_dim": 32, "q_heads": 8, "kv_heads": 1},
    "mask per head": {"q_len": 40, "k_len": 60, "mask_batch": 2, "mask_heads": 4, "runs": 2},
    "large logits": {"q_len": 64, "k_len": 80, "head_dim": 64, "v_dim": 64, "logits": 2500.0},
}


def _results(out: Tensor, sample: Sample, dout: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, (sample.q, sample.k, sample.v), dout)]


def _ours(sample: Sample, dout: Tensor) -> list[Tensor]:
    sample = sample.requires_grad()
    mask = Spans(sample.bounds, sample.k.shape[2])
    out = attention(sample.q, sample.k, sample.v, mask=mask, scale=sample.scale, backend="cpu")
    return _results(out, sample, dout)


def _atens(sample: Sample, dout: Tensor) -> list[Tensor]:
    """The same by ATen's flash kernel, which wants a dense mask and D == Dv (zero columns change nothing)."""
    sample = sample.requires_grad()
    dense = Spans(sample.bounds, sample.k.shape[2]).dense()
    dense = None if bool(dense.all()) else dense.expand(sample.q.shape[0], sample.q.shape[1], -1, -1)
    v_dim = sample.v.shape[3]
    dim = max(sample.q.shape[3], v_dim)
    q, k, v = (pad(x, (0, dim - x.shape[3])) for x in (sample.q, sample.k, sample.v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = aten(q, k, v, attn_mask=dense, scale=sample.scale, enable_gqa=q.shape[1] != k.shape[1])
    return _results(out[..., :v_dim], sample, dout)


def _assert_no_worse(samples: list[Sample]) -> None:
    """Pool the errors of several samples: on a single small one, who rounds better is luck."""
    ours, atens, exact = [], [], []
    for seed, sample in enumerate(samples):
        shape = (*sample.q.shape[:3], sample.v.shape[3])
        dout = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(sample.q.dtype)
        out, _, *gradients = oracle(sample, dout)
        exact.append([out, *gradients])
        ours.append(_ours(sample, dout))
        atens.append(_atens(sample, dout))
    for name, our, their, true in zip(NAMES, _pooled(ours), _pooled(atens), _pooled(exact), strict=True):
        least = relative_error(true.to(our.dtype), true)
        allowed = FACTOR * max(relative_error(their, true), least)
        error = relative_error(our, true)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _pooled(results: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat([x.flatten() for x in column]) for column in zip(*results, strict=True)]


# The kernel has another way for few rows in each dtype.
CELLS = cells(SHAPES, DTYPES, strength=1, named=[("decode", dtype) for dtype in DTYPES])


@pytest.mark.parametrize(("shape", "dtype"), CELLS, ids=str)
def test_no_less_accurate_than_aten(shape: str, dtype: torch.dtype) -> None:
    samples = 24 if shape == "decode" else 6
    _assert_no_worse(
        [make_sample(seed=10 + i, dtype=dtype, empty=False, **SHAPES[shape]) for i in range(samples)]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [64, 257])
def test_no_less_accurate_than_aten_where_all_is_visible(length: int, dtype: torch.dtype) -> None:
    samples = [
        make_sample(i, dtype=dtype, q_len=length, k_len=length, head_dim=64, v_dim=64, batch=1)
        for i in range(3)
    ]
    for sample in samples:
        sample.bounds = torch.tensor([0, length], dtype=torch.int32).expand(1, 1, length, 1, 2)
    _assert_no_worse(samples)
