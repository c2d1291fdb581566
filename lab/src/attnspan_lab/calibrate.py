"""Measure attention and the network on all ranks of a group at once."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnspan.errors import expect
from attnspan.masks import causal
from attnspan.torch import attention

__all__ = ["calibrate"]

_BLOCK, _LARGEST = 1 << 22, 1 << 28  # minimum and maximum bytes that a rank receives in a timed transfer
_SMALL = 8  # bytes of a message whose time is its latency
_HEADS, _ROWS = 8, {"cpu": 1024, "cuda": 8192}
_MOST, _LEAST = 200, 3  # maximum and minimum number of repetitions


def calibrate(
    group: Any = None,
    *,
    dtype: str = "float32",
    head_dim: int = 128,
    seconds: float = 2.0,
    node_size: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Measure the fields of a `Machine`. Attention is in visible pairs per second instead of FLOP/s."""
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 0
    got, remedy = f"one of {ranks}" if ranks else "none", "Run it under torchrun, after "
    remedy += "torch.distributed.init_process_group()"
    expect(ranks > 1, "Machine.calibrate", "a process group of two ranks or more", got, remedy)
    engine = str(dist.get_backend(group))
    device = device or ("cuda" if "nccl" in engine else "cpu")
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    node_size = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    timer = _Timer(group, where, seconds / 6)
    forward, backward = _rates(timer, dtype, head_dim)
    within, across = (_bandwidth(timer, node_size, near=near) for near in (True, False))
    latency = timer.median(_exchange(timer, range(ranks), _SMALL))
    cuda, processor = where.type == "cuda", f"{platform.machine()} x {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(where) if cuda else processor
    # A level without ranks gets the bandwidth of the other level.
    return {
        "name": f"measured on {ranks} ranks of {name} over {engine}",
        "dtype": dtype,
        "pairs": (forward, backward),
        "bandwidth_within": within or across or 1.0,
        "bandwidth_across": across or within or 1.0,
        "latency": latency,
        "node_size": node_size,
    }


class _Timer:
    """Timer that returns the slowest rank's median time, so all ranks get the same measurement."""

    def __init__(self, group: Any, where: torch.device, seconds: float) -> None:
        self.group, self.where, self.seconds = group, where, seconds
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.where)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return float(value)

    def once(self, call: Callable[[], object]) -> float:
        wait: Any = torch.cuda.synchronize if self.where.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    def median(self, call: Callable[[], object]) -> float:
        """Measure the seconds of a call, with the same number of repetitions on all ranks."""
        call()
        # All ranks need the same number: if one rank stopped early, the others would wait forever.
        one = self.slowest(self.once(call))
        count = max(_LEAST, min(_MOST, int(self.seconds / one)))
        return self.slowest(statistics.median(self.once(call) for _ in range(count)))


def _rates(timer: _Timer, dtype: str, head_dim: int) -> tuple[float, float]:
    """Measure visible pairs per second of attention, forward and backward, while all ranks compute."""
    rows = _ROWS.get(timer.where.type, _ROWS["cpu"])
    kind = getattr(torch, dtype)
    q, k, v = (
        torch.randn(1, _HEADS, rows, head_dim, device=timer.where, dtype=kind, requires_grad=True)
        for _ in range(3)
    )
    dout = torch.randn_like(q)
    mask = causal()
    pairs = _HEADS * rows * (rows + 1) / 2

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, mask=mask)

    out = attention(q, k, v, mask=mask)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return pairs / timer.median(forward), pairs / timer.median(backward)


def _bandwidth(timer: _Timer, node_size: int, *, near: bool) -> float | None:
    """Measure bytes/s of exchanges within a node or across nodes. None if there are no such ranks."""
    node = timer.rank // node_size
    peers = [r for r in range(timer.ranks) if r != timer.rank and (r // node_size == node) == near]
    most = int(timer.slowest(float(len(peers))))
    if most == 0:
        return None
    small = timer.median(_exchange(timer, peers, _SMALL))
    block = -(-_BLOCK // most)
    # On a busy machine, a small message may take as long as a large one. The difference would be noise.
    while (large := timer.median(_exchange(timer, peers, block))) < 2 * small and block * most < _LARGEST:
        block *= 4
    return block * most / (large - small if large > 2 * small else large)


def _exchange(timer: _Timer, peers: Sequence[int], size: int) -> Callable[[], object]:
    """Build an all-to-all in which each rank sends only to the given peers."""
    counts = [size if rank in peers else 0 for rank in range(timer.ranks)]
    send = torch.zeros(sum(counts), dtype=torch.uint8, device=timer.where)
    received = torch.empty_like(send)
    return lambda: dist.all_to_all_single(received, send, counts, counts, group=timer.group)
