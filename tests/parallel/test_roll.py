"""A roll over ranks gives each rank its rows of `torch.roll` of the gathered tensor, forward and backward."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from worlds import mesh, named, raising, ranks

from attnspan import causal, segments
from attnspan.errors import DeviceError, DtypeError, OptionError, ShapeError
from attnspan.parallel import Layout, roll
from attnspan.parallel.torch import comm
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention, checkpoint_policy

LENGTH, BATCH = 37, 2
SHIFTS: list[int | tuple[int, ...]] = [-1, 0, 5, LENGTH, -3 * LENGTH - 2, (-1, -2, 7)]


def ids_of(batch: int = BATCH, salt: int = 0) -> np.ndarray:
    random = np.random.default_rng(salt)
    ids = [np.repeat(np.arange(LENGTH), random.integers(1, 12, LENGTH))[:LENGTH] for _ in range(batch)]
    return np.where(np.arange(LENGTH) < LENGTH - 3, np.stack(ids), -1)


def layouts(count: int) -> dict[str, Layout]:
    """Rows in order, with an uneven last part; from both ends; of batch elements with documents."""
    sizes: dict[str, Any] = {"q_len": LENGTH, "ranks": count, "rows_per_chunk": 2}
    packed = causal() & segments(ids_of())
    return {
        "contiguous": Layout.contiguous(LENGTH, count),
        "zigzag": Layout.of(causal(), method="zigzag", **sizes),
        "documents": Layout.of(packed, batch=BATCH, **sizes),
    }


def wanted_of(x: Tensor, shift: int, ids: np.ndarray | None, fill: float) -> Tensor:
    """The definition, for whole x (B, S, ...)."""
    if ids is None:
        return torch.roll(x, shift, 1)
    rows, own = np.arange(LENGTH), np.broadcast_to(ids, (len(x), LENGTH))
    source = np.clip(rows - shift, 0, LENGTH - 1)
    seen = (source == rows - shift) & (own[:, source] == own) & (own >= 0)
    mask = torch.from_numpy(seen).reshape(*seen.shape, *[1] * (x.dim() - 2))
    return torch.where(mask, x[:, source], torch.tensor(fill, dtype=x.dtype))


def cases(count: int) -> Iterator[tuple[Any, ...]]:
    whole_ids = ids_of()
    for name, layout in layouts(count).items():
        for shifts in SHIFTS:
            for ids in (None, whole_ids[0], whole_ids):
                yield name, layout, shifts, ids


@pytest.mark.parametrize("count", [2, 3, 4])
@ranks(lambda count: count)
def test_a_roll_is_that_of_the_gathered_tensor(count: int) -> None:
    where, rank = mesh(count), dist.get_rank()
    make = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, 3, generator=make, dtype=torch.float64)
    for name, layout, shifts, ids in cases(count):
        several = shifts if isinstance(shifts, tuple) else (shifts,)
        whole, mine = x.clone().requires_grad_(), layout.shard(x, rank).requires_grad_()
        table = None if ids is None else np.atleast_2d(ids)
        wanted = torch.stack([wanted_of(whole, shift, table, -7) for shift in several])
        plan = layout.plan_roll(shifts, within=ids).on(where, rows=layout.shard({}, rank))
        found = roll(mine, shifts, plan, fill=-7)
        got = torch.stack(found) if isinstance(shifts, tuple) else found[None]
        dout = torch.randn(wanted.shape, generator=make, dtype=torch.float64)
        with named((name, shifts, ids)):
            for y, z in zip(got, wanted, strict=True):
                assert torch.equal(y, layout.shard(z.detach(), rank, fill=-7))
            (want,) = torch.autograd.grad(wanted, whole, dout)
            local = torch.stack([layout.shard(d, rank) for d in dout])
            (grad,) = torch.autograd.grad(got, mine, local)
            torch.testing.assert_close(grad, layout.shard(want, rank), rtol=1e-15, atol=1e-15)
