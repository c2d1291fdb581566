"""Masks that kernels of other libraries know, and calls of 12 tokens under them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan import causal, documents, full, window
from attnspan.torch import attention

OFFSETS = torch.tensor([0, 3, 3, 7, 10])  # an empty document, and two rows behind the last
BANDS = {
    "full": full(),
    "causal": causal(),
    "window": window(3),
    "window both ways": window(2, 1),
    "window ahead": window(None, 2),
    "causal and window": causal() & window(4, 4),
    "documents": documents(OFFSETS),
    "documents int32": documents(OFFSETS.int()) & causal(),
    "documents and window": documents(OFFSETS) & window(1, 1),
    "documents from the host": causal() & documents(OFFSETS.tolist()),
    "documents of queries and keys": documents([0, 2, 5, 12], [0, 4, 4, 12]),
    "causal documents of queries and keys": documents(np.array([0, 5, 9]), np.array([0, 3, 12])) & causal(),
}


def qkv(batch: int = 1, q_len: int = 12, k_len: int = 12, dtype: Any = torch.bfloat16) -> list[Tensor]:
    sizes = (4, q_len), (2, k_len), (2, k_len)
    return [torch.randn(batch, h, s, 16).to(dtype).requires_grad_() for h, s in sizes]


def results(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> list[Tensor]:
    """Output, lse and gradients; those of lse stay out of it."""
    with torch.no_grad():
        _, lse = attention(q, k, v, return_lse=True, **call)
    out = attention(q, k, v, **call)
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out)
    return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]
