"""What is computed in benchmarks/context_parallel.py, by whom it is computed, and what a call took.

Shapes: B = 1 batch row, Hq query and Hkv key heads, S rows in all, n of them on a rank, D head dim.
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
    """A mask and whole inputs, the same on every rank.

    q and dout are (1, S, Hq, D), k and v (1, S, Hkv, D), as a model's projections leave them.
    """

    case: str
    mask: Mask
    offsets: np.ndarray | None  # of documents, (count + 1,)
    left: int | None  # keys before its own that a query sees; None for all
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def make(
        cls, case: str, q_len: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, of: int
    ) -> Problem:
        """Draw the inputs of a case, which is made for ``of`` rows and scaled down where q_len is less."""
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
            raise SystemExit(f"cases are causal, documents, documents:SEED and window, not {case!r}")
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
        """Spans of all rows, (1, 1, S, R, 2)."""
        return np.asarray(self.mask.spans(self.q_len, self.q_len).bounds)

    @property
    def pairs(self) -> int:
        """Visible pairs of all query heads."""
        bounds = self.bounds.astype(np.int64)
        return int((bounds[..., 1] - bounds[..., 0]).sum()) * self.heads[0]

    def take(self, rows: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout of some rows, as (1, H, n, D) views of (1, n, H, D) tensors."""
        q, k, v, dout = (x[:, rows].transpose(1, 2) for x in (self.q, self.k, self.v, self.dout))
        return q, k, v, dout


@dataclass(frozen=True, eq=False)
class Ready:
    """A contestant that can be timed.

    Args:
        call: Computes this rank's rows: (out,) or (out, dq, dk, dv), each (1, H, n, D). None: this rank has
            no part in it.
        rows: Global row of each local row, int64 (n,); -1 for padding.
        about: What the results say of it besides.
    """

    call: Callable[[], tuple[Tensor, ...]] | None
    rows: Tensor
    about: dict[str, Any]


class Contestant:
    """One way to compute a problem on all ranks.

    Attributes:
        name: In tables.
        threads: Of each rank.
        may_fail: Whether it is another library's, whose failure is an outcome; ours may not fail.
        chunks: Equal parts of each rank, into which rows must be divisible; 0: any number of rows.
        only_causal: Why it computes nothing but causal attention, if so.
    """

    name: str
    threads: int = 1
    may_fail: bool = False
    chunks: int = 0
    only_causal: str | None = None

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        """Take this rank's rows of the problem, and plan."""
        raise NotImplementedError

    def refuses(self, problem: Problem, ranks: int) -> str | None:
        """None, or why it does not take part."""
        if self.only_causal is not None and problem.case != "causal":
            return self.only_causal
        if self.chunks and problem.q_len % (self.chunks * ranks):
            return f"{problem.q_len} rows are no multiple of {self.chunks * ranks}"
        return None


@dataclass
class Tally:
    """What this rank has spent since `restart`: seconds of waiting for others, bytes received from them."""

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
    """A call of a function of q, k and v that autograd knows: (out,), or (out, dq, dk, dv)."""
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
    """Rows of a rank, of 2 P chunks the one numbered `rank` from each end: equal work under `causal()`."""
    chunks = torch.arange(q_len).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
