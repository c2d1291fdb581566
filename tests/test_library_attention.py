"""Attention under each mask of the library: the kernel against plain float64 code, forward and backward."""

import pytest
import torch
from library_samples import BATCH, HEADS, LIBRARY

from attnspan.torch import attention


def _run(sample, inputs, dout, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    q_index = torch.arange(inputs[0].shape[2])
    out = attention(*inputs, mask=sample.mask(torch.from_numpy), q_index=q_index, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("sample", LIBRARY, ids=lambda sample: sample.name)
def test_kernel_and_plain_code_agree(sample):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (BATCH, HEADS, sample.q_len, 16),
        *[(BATCH, HEADS, sample.keys, 16)] * 2,
        (BATCH, HEADS, sample.q_len, 16),
    )
    *inputs, dout = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    exact = _run(sample, inputs, dout, backend="math")
    plain = _run(sample, [x.float() for x in inputs], dout.float(), backend="math")
    kernel = _run(sample, [x.float() for x in inputs], dout.float())
    for name, got, peer, want in zip(("out", "dq", "dk", "dv"), kernel, plain, exact, strict=True):
        assert got.dtype == torch.float32
        error, usual = ((x.double() - want).norm() for x in (got, peer))
        assert error <= 4 * usual + 1e-7 * want.norm(), f"{name}: {error} against {usual}"
