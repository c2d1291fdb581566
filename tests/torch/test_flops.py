"""Torch's FLOP counter sees attention, and only its visible pairs."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnspan import causal, documents
from attnspan.torch import attention


def _count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, *, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, mask=mask)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


def test_visible_pairs_are_counted() -> None:
    q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 24)
    q.requires_grad_()
    pairs = 2 * 4 * (6 * 7 // 2 + 4 * 5 // 2)
    mask = causal() & documents(torch.tensor([0, 6, 10]))
    forward = 2 * pairs * (16 + 24)
    assert _count(q, k, v, mask, backward=False) == forward
    assert _count(q, k, v, mask, backward=True) == forward + forward * 5 // 2


def test_fake_tensors_give_the_dense_bound() -> None:
    with FakeTensorMode():
        q = torch.randn(2, 4, 10, 16)
        assert _count(q, q, q, causal(), backward=False) == 2 * 2 * 4 * 10 * 10 * 32
