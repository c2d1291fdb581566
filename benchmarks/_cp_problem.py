"""Problems, contestants and tallies of benchmarks/context_parallel.py.

Shapes: batch B = 1, Hq query and Hkv key heads, S rows in total, n rows per rank, head dim D.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan import Mask, causal, documents, window
from attnspan_lab.bench.workloads import corpus_offsets

WINDOW = 2048
FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True, eq=False)
class Problem:
    """A mask and complete inputs, the same on every rank.

    q and dout are (1, S, Hq, D), and k and v are (1, S, Hkv, D), like the outputs of a model's projections.
    """

    case: str
    mask: Mask
    offsets: np.ndarray | None  # offsets of documents, (count + 1,)
    left: int | None  # number of earlier keys that a query sees; None for all
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def make(
        cls, case: str, q_len: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, of: int
    ) -> Problem:
        """Draw the inputs of a case. It is made for ``of`` rows and scaled down to q_len."""
        kind, _, seed = case.partition(":")
        mask, offsets, left = causal(), None, None
        if kind == "documents":
            whole = corpus_offsets(of, int(seed or 0))
            offsets = np.unique(np.rint(whole * (q_len / of))).astype(np.int32)
            mask = causal() & documents(offsets)
        elif kind == "window":
            left = max(1, WINDOW * q_len // of)
            mask = window(left)
        elif kind != "causal":
            raise SystemExit(f"expected a case of causal, documents, documents:SEED and window, got {case!r}")
        random = torch.Generator().manual_seed(1)
        q, k, v, dout = (
            torch.randn(1, q_len, h, head_dim, generator=random).to(dtype)
            for h in (heads[0], heads[1], heads[1], heads[0])
        )
        return cls(case, mask, offsets, left, q, k, v, dout)

    @property
    def q_len(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[2], self.k.shape[2]

    @property
    def bounds(self) -> np.ndarray:
        """Return the spans of all rows, (1, 1, S, R, 2)."""
        return np.asarray(self.mask.spans(self.q_len, self.q_len).bounds)

    @property
    def pairs(self) -> int:
        """Count the visible pairs of all query heads."""
        bounds = self.bounds.astype(np.int64)
        return int((bounds[..., 1] - bounds[..., 0]).sum()) * self.heads[0]

    def take(self, rows: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Select q, k, v and dout of some rows, as (1, H, n, D) views of (1, n, H, D) tensors."""
        q, k, v, dout = (x[:, rows].transpose(1, 2) for x in (self.q, self.k, self.v, self.dout))
        return q, k, v, dout


@dataclass(frozen=True, eq=False)
class Ready:
    """A contestant that can be timed.

    Args:
        call: Computes this rank's rows: (out,) or (out, dq, dk, dv), each (1, H, n, D). None if this rank
            does not take part.
        rows: Global row of each local row, int64 (n,); -1 for padding.
        about: Additional data for the results.
    """

    call: Callable[[], tuple[Tensor, ...]] | None
    rows: Tensor
    about: dict[str, Any]


class Contestant:
    """One way to compute a problem on all ranks.

    Attributes:
        name: Name for tables.
        threads: Threads per rank.
        may_fail: Whether it belongs to another library, whose failure is a result. attnspan must not fail.
        chunks: Number of equal parts per rank that the rows must be divisible into. 0 allows any number of
            rows.
        only_causal: Reason why it computes only causal attention, or "".
    """

    name: str
    threads: int = 1
    may_fail: bool = False
    chunks: int = 0
    only_causal: str | None = None

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        """Select this rank's rows of the problem, and plan."""
        raise NotImplementedError

    def refuses(self, problem: Problem, ranks: int) -> str | None:
        """Return the reason why it does not take part, or None."""
        if self.only_causal is not None and problem.case != "causal":
            return self.only_causal
        if self.chunks and problem.q_len % (self.chunks * ranks):
            return f"{problem.q_len} rows are not divisible by {self.chunks * ranks}"
        return None


@dataclass
class Tally:
    """Costs of this rank since `restart`: seconds of waiting for others, and received bytes."""

    waiting: float = 0.0
    received: int = 0

    def restart(self) -> None:
        self.waiting, self.received = 0.0, 0

    @contextmanager
    def wait(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waiting += time.perf_counter() - start


TALLY = Tally()


def differentiated(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...], mode: str
) -> Callable[[], tuple[Tensor, ...]]:
    """Make a call of a differentiable function of q, k and v. It returns (out,) or (out, dq, dk, dv)."""
    *qkv, dout = inputs
    if mode == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attend(*qkv),)

        return forward
    leaves = [x.detach().requires_grad_() for x in qkv]

    def both() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return both


def head_tail(q_len: int, rank: int, ranks: int) -> Tensor:
    """Choose a rank's rows: out of 2 P chunks, chunk number `rank` from each end. Causal work is equal."""
    chunks = torch.arange(q_len).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
