"""DTensors: batch and heads shard without communication, the sequence is refused by name."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from samples.parts import leaves
from samples.torch_calls import OPERATOR_ERROR, OPTIONS, small
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnspan import Mask, alibi, causal, from_predicate, full, library, segments
from attnspan.errors import OptionError
from attnspan.torch import attention

SIZES = {"q_len": 24, "k_len": 24, "stored": "bhsd"}
IDS = torch.tensor([[0] * 9 + [1] * 15, [0] * 4 + [1] * 20])


@pytest.fixture
def mesh() -> Iterator[object]:
    """Two ranks of which only the first is real: enough where nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _placed(mesh: object, placement: object, *tensors: torch.Tensor) -> list[DTensor]:
    return [distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in tensors]


@pytest.mark.parametrize("mask", [causal(), causal() & segments(IDS)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_batch_and_heads(mesh: object, placement: object, mask: Mask) -> None:
    sample = small(**SIZES)
    plain = [x.clone().requires_grad_() for x in sample.inputs.values()]
    wanted = attention(*plain, mask=mask)
    wanted.square().sum().backward()
    sharded = [x.requires_grad_() for x in _placed(mesh, placement, *sample.inputs.values())]
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


#: What shards with a mesh axis, by placement of q, k and v: one that each rank has whole sums its gradient.
PARAMETERS = {
    "sinks": {0: Replicate(), 1: Shard(0)},
    "alibi": {0: Replicate(), 1: Shard(0)},
    "alibi, per batch row": {0: Shard(0), 1: Shard(1)},
    "distance table": {0: Replicate(), 1: Shard(0)},
    "dense": {0: Shard(0), 1: Shard(1)},
    "dense, per key and head, float32": {0: Replicate(), 1: Shard(0)},
}


@pytest.mark.parametrize("name", [*PARAMETERS, "dropout", "dropout by seeds", "all"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_options_shard_with_what_they_belong_to(mesh: object, placement: object, name: str) -> None:
    sample = small(**SIZES)
    options = OPTIONS[name](2, 4, 24, 24)
    inputs = tuple(sample.inputs.values())
    wanted = attention(*inputs, mask=causal(), **options)
    own = PARAMETERS.get(name, {}).get(getattr(placement, "dim", None), Replicate())
    parts, spec = torch.utils._pytree.tree_flatten(options)
    # Parameters as DTensors that lie where the operator wants them: nothing is communicated.
    placed = [
        distribute_tensor(x.detach(), mesh, [own], src_data_rank=None).requires_grad_()
        if name in PARAMETERS and isinstance(x, torch.Tensor)
        else x
        for x in parts
    ]
    sharded = _placed(mesh, placement, *inputs)
    out = attention(*sharded, mask=causal(), **torch.utils._pytree.tree_unflatten(placed, spec))
    assert out.placements == (placement,)
    torch.testing.assert_close(out.to_local(), _first_part(wanted, placement))
    if name not in PARAMETERS:
        return
    (parameter,) = (x for x in placed if isinstance(x, DTensor))
    (leaf,) = leaves(options)
    dout = _first_part(2 * wanted.detach(), placement)
    out.backward(DTensor.from_local(dout, mesh, [placement], run_check=False))
    first = torch.zeros_like(wanted)  # What the first rank knows of: its part of the output.
    _first_part(first, placement).copy_(dout)
    (whole,) = torch.autograd.grad(wanted, leaf, first)
    partial = isinstance(placement, Shard) and not isinstance(own, Shard)
    assert parameter.grad.placements == ((Partial() if partial else own),)
    torch.testing.assert_close(parameter.grad.to_local(), _first_part(whole, own))


@pytest.mark.parametrize("name", ["dropout by seeds", "alibi, per batch row"])
@pytest.mark.parametrize("own", [Shard(0), Replicate()], ids=str)
def test_one_rank_of_an_axis_may_hold_a_split_dim(mesh: object, own: object, name: str) -> None:
    inputs = tuple(small(**SIZES, batch=1).inputs.values())
    options = OPTIONS[name](1, 4, 24, 24)
    wanted = attention(*inputs, mask=causal(), **options).detach()
    grid, placements = init_device_mesh("cpu", (1, 2)), [Shard(0), Shard(1)]
    place = lambda x, where: distribute_tensor(x.detach(), grid, where, src_data_rank=None)  # noqa: E731
    sharded = [place(x, placements) for x in inputs]
    placed = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: place(x, [own, Shard(1)]), options)
    out = attention(*sharded, mask=causal(), **placed)
    assert out.placements == tuple(placements)
    torch.testing.assert_close(out.to_local(), wanted.chunk(2, 1)[0])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_indices_shard_by_batch_only(mesh: object, placement: object) -> None:
    sample = small(**SIZES)
    inputs = tuple(sample.inputs.values())
    options = {
        "mask": full().prepare(24, 24, like=sample.q),
        "bias": alibi(torch.rand(4)),
        "q_index": torch.randint(0, 99, (2, 24)),
        "k_index": torch.randperm(24),
    }
    sharded = _placed(mesh, placement, *inputs)
    wanted = _first_part(attention(*inputs, **options), placement)
    torch.testing.assert_close(attention(*sharded, **options).to_local(), wanted)


@pytest.mark.slow
def test_a_mask_for_other_keys_is_refused_in_compiled_code(mesh: object) -> None:
    placed = _placed(mesh, Shard(0), *small(**SIZES).inputs.values())
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    mask = full().prepare(24, 24, like=torch.zeros(0))
    assert torch.isfinite(compiled(*placed, mask=mask).to_local()).all()
    with pytest.raises(OPERATOR_ERROR, match=r"spans over k_len=24 keys .* got spans over 23"):
        compiled(*placed, mask=full().prepare(24, 23, like=torch.zeros(0)))


def test_a_sharded_sequence_is_refused(mesh: object) -> None:
    q, k, v = _placed(mesh, Shard(2), *small(**SIZES).inputs.values())
    with pytest.raises(OptionError, match=r"q as a DTensor: .* got Shard\(dim=2\), which shards q_len"):
        attention(q, k, v)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: library.batchify(x, 24)], ids=["itself", "nested"])
def test_a_function_of_batch_rows_is_refused_next_to_split_arrays(mesh: object, wrap: object) -> None:
    q, k, v = _placed(mesh, Shard(0), *small(**SIZES).inputs.values())
    (ids,) = _placed(mesh, Shard(0), IDS)
    mask = wrap(from_predicate(lambda b, h, i, j: (i >= j) & (b + h >= 0))) & segments(ids)
    with pytest.raises(OptionError, match="number this rank"):
        attention(q, k, v, mask=mask)
