"""Checks of document offsets on their device. With wrong offsets, kernels would read beyond arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._on_device import on_device_of

_BLOCK = 1024
#: Programs of a kernel that mostly has no work.
_FEW = 512


@triton.jit
def check_kernel(source, to, broken, count, length, BLOCK: tl.constexpr):
    """Check that offsets ascend from 0 to at most the length. Copy them as int32, or zeros if wrong."""
    wrong = 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = tl.load(source + at, mask=at < count, other=0)
        before = tl.load(source + at - 1, mask=(at > 0) & (at < count), other=0)
        wrong = tl.maximum(wrong, tl.max(tl.where((at < count) & (here < before), 1, 0), 0))
    outside = (tl.load(source) != 0) | (tl.load(source + count - 1) > length)
    wrong = tl.where(outside, 1, wrong)
    tl.store(broken, wrong)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = tl.load(source + at, mask=at < count, other=0)
        tl.store(to + at, tl.where(wrong > 0, 0, here).to(tl.int32), mask=at < count)


@triton.jit
def clear_kernel(x, last, broken, row, total, BLOCK: tl.constexpr):
    """Write zeros from the last offset on, or NaN everywhere if offsets are wrong."""
    wrong = (tl.load(broken) > 0) | (tl.load(broken + 1) > 0)
    first = tl.where(wrong, 0, tl.load(last).to(tl.int64) * row)
    fill = tl.where(wrong, float("nan"), 0.0)
    for start in range(first + tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, tl.full([BLOCK], 0, tl.float32) + fill, mask=at < total)


@triton.jit
def lse_kernel(lse, last, broken, length, BLOCK: tl.constexpr):
    """Write -inf for queries that see nothing or are in no document, and NaN if offsets are wrong."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = lse + tl.program_id(1).to(tl.int64) * length + at
    found = tl.load(to, mask=at < length, other=0)
    nothing = (found == float("inf")) | (at >= tl.load(last))
    found = tl.where(nothing, float("-inf"), found)
    wrong = (tl.load(broken) > 0) | (tl.load(broken + 1) > 0)
    tl.store(to, tl.where(wrong, float("nan"), found), mask=at < length)


@dataclass(frozen=True)
class Offsets:
    """Offsets that kernels may follow.

    Attributes:
        cu_q, cu_k: int32 (n + 1,). Wrong offsets are replaced by zeros.
        broken: int32 (2,), whether the offsets of queries and of keys were wrong.
    """

    cu_q: Tensor
    cu_k: Tensor
    broken: Tensor

    @classmethod
    def checked(cls, cu_q: Tensor, cu_k: Tensor, q_len: int, k_len: int) -> Offsets:
        """Check the mask's offsets (n + 1,) against the numbers of queries and keys."""
        broken = torch.empty(2, dtype=torch.int32, device=cu_q.device)
        found = []
        for i, (x, length) in enumerate(((cu_q, q_len), (cu_k, k_len))):
            to = torch.empty(x.shape, dtype=torch.int32, device=x.device)
            with on_device_of(x):
                check_kernel[(1,)](x.contiguous(), to, broken[i:], x.shape[0], length, BLOCK=_BLOCK)
            found.append(to)
        return cls(found[0], found[1], broken)

    def clear_queries(self, x: Tensor) -> None:
        """Write zeros for queries in no document, into (1, H, S, D) stored as (1, S, H, D)."""
        self._clear(x, self.cu_q)

    def clear_keys(self, x: Tensor) -> None:
        """Write zeros for keys in no document, into a gradient of keys or values."""
        self._clear(x, self.cu_k)

    def _clear(self, x: Tensor, offsets: Tensor) -> None:
        _, heads, _, dim = x.shape
        programs: Any = (min(_FEW, triton.cdiv(x.numel(), _BLOCK)),)
        with on_device_of(x):
            clear_kernel[programs](x, offsets[-1:], self.broken, heads * dim, x.numel(), BLOCK=_BLOCK)

    def finish_lse(self, lse: Tensor) -> None:
        """Convert FlashAttention's lse, contiguous (1, H, S), to attnspan's convention."""
        _, heads, length = lse.shape
        blocks = triton.cdiv(length, _BLOCK)
        with on_device_of(lse):
            lse_kernel[(blocks, heads)](lse, self.cu_q[-1:], self.broken, length, BLOCK=_BLOCK)
