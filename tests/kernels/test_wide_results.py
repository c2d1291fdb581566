"""Results in float32 beside 16-bit inputs, for sums over several calls: 16-bit ones are their rounding."""

import pytest
import torch

from attnspan import causal, segments
from attnspan.kernels import cpu
from attnspan.options import Options


def _results(like: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Filled with NaN, and strided: stored as (B, S, H, D)."""
    return [
        torch.full((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), torch.nan, dtype=dtype).transpose(1, 2)
        for x in like
    ]


@pytest.mark.compiled_module("the runner writes results in the dtype of the inputs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 150])
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "exact rows"])
def test_16_bit_results_are_the_rounding_of_wide_ones(dtype: torch.dtype, q_len: int, nan: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, heads, length, dim, generator=generator).to(dtype)
        for heads, length, dim in ((4, q_len, 40), (2, 200, 40), (2, 200, 24), (4, q_len, 24))
    )
    if nan:
        v[:, :, 199] = torch.inf  # hidden from all rows, yet it sends its head the way of exact rows
    ids = torch.arange(200) // 70
    mask = (causal() & segments(ids)).prepare(q_len, 200).lowered.bounds
    bounds = torch.as_tensor(mask).clone()
    bounds[..., 1].clamp_(max=199)
    bounds[..., 0].clamp_(max=199)
    options = Options(softcap=3.0) if q_len == 3 else None
    found = {}
    for result in (dtype, torch.float32):
        (out,) = _results([dout], result)
        lse = torch.empty(2, 4, q_len)
        cpu.forward(q, k, v, bounds, out, lse, scale=0.2, num_threads=2, options=options)
        rounded = out.to(dtype)
        gradients = _results([q, k, v], result)
        cpu.backward(
            dout, None, q, k, v, rounded, lse, bounds, *gradients, scale=0.2, num_threads=2, options=options
        )
        found[result] = [out, *gradients]
    for narrow, wide in zip(found[dtype], found[torch.float32], strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(narrow, wide.to(dtype))
        assert not torch.equal(wide, wide.to(dtype).float())
