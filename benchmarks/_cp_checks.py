"""Checks of the contestants in benchmarks/context_parallel.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _cp_problem import BOTH, Problem
from torch import Tensor

from attnspan import reference

#: A result may have this many times the error of torch's own attention in the same dtype.
SLACK = 4.0
NAMES = ("out", "dq", "dk", "dv")


def reference_of(problem: Problem) -> tuple[Tensor, ...]:
    """Compute out, dq, dk and dv of all rows in float64, (1, H, S, D)."""
    q, k, v, dout = (x.double().numpy() for x in problem.take(slice(None)))
    scale = problem.q.shape[3] ** -0.5
    out, _ = reference.forward(q, k, v, problem.bounds, scale)
    grads = reference.backward(dout, None, q, k, v, problem.bounds, scale)
    return tuple(torch.from_numpy(np.asarray(x)) for x in (out, *grads))


def sdpa_errors(problem: Problem, want: tuple[Tensor, ...]) -> dict[str, float]:
    """Compute the errors of torch's own attention on the same inputs, as a reference for other errors."""
    q, k, v, dout = problem.take(slice(None))
    lo, hi = torch.tensor(problem.bounds[0, 0]).unbind(-1)
    at = torch.arange(problem.q_len)
    visible = ((at >= lo[..., None]) & (at < hi[..., None])).any(1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=visible, enable_gqa=grouped)
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    return {
        name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(NAMES, got, want, strict=True)
    }


def errors_of(got: tuple[Tensor, ...], want: tuple[Tensor, ...], rows: Tensor, mode: str) -> dict[str, float]:
    """Compute relative errors in norm over all ranks. Together, the ranks must have all rows."""
    valid = rows >= 0
    count = len(NAMES) if mode == BOTH else 1
    sums = np.zeros((count, 3))
    for i, (x, y) in enumerate(zip(got, want[:count], strict=True) if got else ()):
        mine, wanted = x[:, :, valid].double(), y[:, :, rows[valid]].double()
        sums[i] = float((mine - wanted).square().sum()), float(wanted.square().sum()), int(valid.sum())
    total = torch.from_numpy(sums)
    dist.all_reduce(total)
    if any(int(x) != want[0].shape[2] for x in total[:, 2]):
        raise AssertionError(f"the ranks' rows are {total[:, 2].tolist()}, not {want[0].shape[2]}")
    return {
        name: math.sqrt(diff / norm) for name, (diff, norm, _) in zip(NAMES, total.tolist(), strict=False)
    }


def why_wrong(errors: dict[str, float], bounds: dict[str, float]) -> str | None:
    """Return a description of an error that is too large for this dtype, or None."""
    for what, error in errors.items():
        # "error > bound" would be false for NaN.
        if not error <= SLACK * bounds[what]:
            return f"{what} has the error {error:.2g}, torch's own attention {bounds[what]:.2g}"
    return None


def from_first(got: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Send the results of rank 0 to all ranks."""
    held: list[Any] = [[(tuple(x.shape), x.dtype) for x in got]]
    dist.broadcast_object_list(held, src=0)
    whole = got or tuple(torch.empty(shape, dtype=dtype) for shape, dtype in held[0])
    whole = tuple(x.contiguous() for x in whole)
    for x in whole:
        dist.broadcast(x, src=0)
    return whole
