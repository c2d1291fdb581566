"""DTensors: batch and heads shard without communication, the sequence is refused by name."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from samples import make_sample
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnspan import Mask, causal, segments
from attnspan.torch import attention

IDS = torch.tensor([[0] * 9 + [1] * 15, [0] * 4 + [1] * 20])


@pytest.fixture
def mesh() -> Iterator[object]:
    """Two ranks of which only the first is real: enough where nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mask", [causal(), causal() & segments(IDS)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_batch_and_heads(mesh: object, placement: object, mask: Mask) -> None:
    sample = make_sample(q_len=24, k_len=24, transposed=False)
    plain = [x.clone().requires_grad_() for x in (sample.q, sample.k, sample.v)]
    wanted = attention(*plain, mask=mask)
    wanted.square().sum().backward()
    sharded = [
        distribute_tensor(x, mesh, [placement], src_data_rank=None).requires_grad_()
        for x in (sample.q, sample.k, sample.v)
    ]
    out = attention(*sharded, mask=mask)
    assert isinstance(out, DTensor)
    assert out.placements == (placement,)
    torch.testing.assert_close(out.to_local(), _first_part(wanted, placement))
    # By hand, as summing over the mesh needs a real second rank.
    out.backward(DTensor.from_local(2 * out.to_local().detach(), mesh, [placement], run_check=False))
    for x, whole in zip(sharded, plain, strict=True):
        assert x.grad.placements == (placement,)
        torch.testing.assert_close(x.grad.to_local(), _first_part(whole.grad, placement))


def _first_part(x: torch.Tensor, placement: object) -> torch.Tensor:
    return x.chunk(2, placement.dim)[0] if isinstance(placement, Shard) else x


def test_a_sharded_sequence_is_refused(mesh: object) -> None:
    sample = make_sample(q_len=24, k_len=24, transposed=False)
    q, k, v = (
        distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None) for x in (sample.q, sample.k, sample.v)
    )
    with pytest.raises((ValueError, RuntimeError), match=r"Shard\(dim=2\), which splits q_len or k_len"):
        attention(q, k, v)
