"""Plans that share rows: layers of different masks, a partition of a loader, keys that lie as rows elsewhere.

Each job gives the largest norm-wise error against attention on one process.
"""

import pickle
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import mesh

import attnspan
from attnspan.parallel import ContextParallel
from attnspan.parallel.partition import partition
from attnspan.torch import attention

B, S, HEADS = 2, 192, (4, 2)


def _ids(batch: int = B) -> Tensor:
    lengths = torch.randint(5, 60, (batch, S), generator=torch.Generator().manual_seed(3))
    return torch.stack([torch.repeat_interleave(torch.arange(S), row)[:S] for row in lengths])


def _inputs(batch: int = B, keys: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((batch, HEADS[0], S, 16), (batch, HEADS[1], keys, 16), (batch, HEADS[1], keys, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _plan(**changes: Any) -> ContextParallel:
    world = torch.distributed.get_world_size()
    keywords = {"q_len": S, "heads": HEADS, "strategy": "exchange", "batch": B}
    return ContextParallel(mesh(world)["cp"], **{**keywords, **changes})


def _error(got: Tensor, wanted: Tensor) -> float:
    return float(((got - wanted).norm() / wanted.norm()).detach())


def layers(keep_rows: bool, strategy: str) -> float:
    """Two layers, of which the second has a narrower mask, on rows that were sharded once."""
    ids = _ids()
    masks = [attnspan.causal() & attnspan.segments(ids), attnspan.causal() & attnspan.window(9)]
    first = _plan(mask=masks[0], strategy=strategy)
    plans = [first, first.with_mask(masks[1], keep_rows=keep_rows)]
    assert plans[0].rows_per_rank == plans[1].rows_per_rank, "shapes tell nothing"
    x = whole = _inputs()[0]
    x = first.shard(x, dim=2)
    for plan, mask in zip(plans, masks, strict=True):
        x = attention(x, x[:, ::2], x[:, 1::2], mask=plan)
        whole = attention(whole, whole[:, ::2], whole[:, 1::2], mask=mask)
    return _error(first.unshard(x, dim=2), whole)


def loader(all_rows: bool) -> float:
    """Rows sharded in the data loader, by a partition that needs no process group."""
    ids, (q, k, v) = _ids(), _inputs()
    mask = attnspan.causal() & attnspan.segments(ids)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    part = partition(mask, world, q_len=S, batch=B, method="balanced" if all_rows else "zigzag")
    cp = _plan(mask=mask, partition=part)
    assert cp.partition is part
    out = attention(*(part.shard(x, rank, dim=2) for x in (q, k, v)), mask=cp)
    return _error(cp.unshard(out, dim=2), attention(q, k, v, mask=mask))


def encoder_and_decoder() -> float:
    """Cross attention from the decoder's rows to the encoder's, both balanced by masks of their own."""
    q, k, v = _inputs(keys=150)
    encoder = _plan(mask=attnspan.window(20, 20), q_len=150)
    decoder = _plan(mask=attnspan.causal() & attnspan.segments(_ids()))
    sees = attnspan.key_padding(torch.tensor([150, 77]))
    cross = _plan(mask=sees, k_len=150, partition=decoder.partition, keys=encoder.partition)
    keys = (encoder.shard(x, dim=2) for x in (k, v))
    out = attention(decoder.shard(q, dim=2), *keys, mask=cross)
    longer = cross.with_mask(attnspan.full(), k_len=150, keep_rows=True)
    assert longer.partition is decoder.partition
    return _error(decoder.unshard(out, dim=2), attention(q, k, v, mask=sees))


def other_batches() -> list[float]:
    """The same plan for another number of batch rows, as a last batch has it."""
    errors, cp = [], _plan(mask=attnspan.causal() & attnspan.segments(_ids()))
    for batch in (B, 3, 1):
        mask, inputs = attnspan.causal() & attnspan.segments(_ids(batch)), _inputs(batch)
        cp = cp.with_mask(mask, batch=batch)
        out = attention(*(cp.shard(x, dim=2) for x in inputs), mask=cp)
        errors.append(_error(cp.unshard(out, dim=2), attention(*inputs, mask=mask)))
    return errors


def strided(strategy: str) -> float:
    """q, k, v and dout without a unit last stride, as plain attention takes them."""
    mask = attnspan.causal()
    cp, results = _plan(mask=mask, strategy=strategy), []
    for plan, shard in ((cp, True), (mask, False)):
        made = []
        for x in (*_inputs(), _inputs()[0] + 1):
            x = cp.shard(x, dim=2) if shard else x
            made.append(x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_())
        *leaves, dout = made
        out = attention(*leaves, mask=plan)
        results.append([out, *torch.autograd.grad(out, leaves, dout.detach())])
    return max(_error(cp.unshard(got, dim=2), wanted) for got, wanted in zip(*results, strict=True))


def copies() -> dict[str, str]:
    """A model that holds its plan is copied; the plan itself is not sent."""
    cp = _plan(mask=attnspan.causal())
    module = torch.nn.Linear(2, 2)
    module.plan = cp
    assert deepcopy(module).plan is cp
    sent = pickle.loads(pickle.dumps(cp.partition))
    assert (sent.rows == cp.partition.rows).all()
    try:
        pickle.dumps(cp)
    except TypeError as error:
        return {"pickle": str(error)}
    return {}


def made_while_evaluating() -> float:
    """A plan that was made in inference mode serves training."""
    with torch.inference_mode():
        cp = _plan(mask=attnspan.causal())
    leaves = [cp.shard(x, dim=2).requires_grad_() for x in _inputs()]
    attention(*leaves, mask=cp).sum().backward()
    wanted = [x.requires_grad_() for x in _inputs()]
    attention(*wanted, mask=attnspan.causal()).sum().backward()
    return max(_error(cp.unshard(x.grad, dim=2), y.grad) for x, y in zip(leaves, wanted, strict=True))


def natural_order() -> dict[str, Any]:
    """DTensors as `distribute_tensor` makes them: refused, unless the plan keeps the order of rows."""
    here = mesh(torch.distributed.get_world_size())["cp"]
    inputs = _inputs()
    spread = [distribute_tensor(x, here, [Shard(2)]) for x in inputs]
    found: dict[str, Any] = {}
    try:
        attention(*spread, mask=_plan(mask=attnspan.causal(), method="zigzag"))
    except Exception as error:
        found["zigzag"] = str(error)
    out = attention(*spread, mask=_plan(mask=attnspan.causal(), method="contiguous"))
    found["contiguous"] = _error(out.full_tensor(), attention(*inputs, mask=attnspan.causal()))
    return found


def sinks_of_nothing(strategy: str) -> bool:
    """A sink of -inf beside rows that see nothing: gradients stay finite, as on one process."""
    cp = _plan(mask=attnspan.causal(), q_len=S - 1, strategy=strategy)
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf], requires_grad=True)
    attention(*(cp.shard(x[:, :, 1:], dim=2) for x in _inputs()), mask=cp, sinks=sinks).sum().backward()
    return bool(sinks.grad.isfinite().all())


def many_agreements() -> int:
    """Calls that one group has agreed on do not count in another, whose ranks may have others."""
    from attnspan.parallel import _agree

    before, most = len(_agree._agreed), _agree._MOST_AGREED
    _agree._MOST_AGREED = 3
    try:
        for length in range(5, 12):
            cp = _plan(mask=attnspan.causal() & attnspan.window(length))
            attention(*(cp.shard(x, dim=2) for x in _inputs()), mask=cp)
        group = cp._group
        return len(_agree._agreed[group]) if len(_agree._agreed) <= before + 1 else -1
    finally:
        _agree._MOST_AGREED = most
