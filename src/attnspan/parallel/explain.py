"""What a plan does, and why, in figures and words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .choose import Candidate, Choice
from .needs import foreign
from .plan import Plan
from .planning import Request, cost

__all__ = ["Explanation", "explain"]

_MOST_RANKS = 16  # lines of a printed table


@dataclass(frozen=True, eq=False)
class Explanation:
    """What `ContextParallel.explain` found; ``print`` it. Arrays have an element for each rank.

    Attributes:
        plan: The plan.
        candidate: Pairs, bytes and predicted time.
        needed: Key rows that the rank's group needs and others own, int64 (P,).
        ring: Key rows that a ring would bring to each group.
        least_needed: Of any partition into groups of this size, some group needs so many: the row that sees
            the most keys must have them all, and its group can own no more than its own rows.
        choice: How "auto" chose; None for a strategy that was given.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel.choose import Call
        >>> from attnspan.parallel.planning import make_plan
        >>> request = Request(2, Call(4, 2), strategy="exchange")
        >>> plan, choice = make_plan(causal().prepare(64, 64), request)
        >>> explain(plan, request, choice).least_needed
        32
    """

    plan: Plan
    candidate: Candidate
    needed: NDArray[np.int64]
    ring: int
    least_needed: int
    choice: Choice | None

    @property
    def pairs(self) -> NDArray[np.float64]:
        """Visible (query, key) pairs that each rank computes, over batch rows and its query heads."""
        return self.candidate.pairs

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 is the lower bound."""
        return self.candidate.balance

    @property
    def forward_bytes(self) -> NDArray[np.int64]:
        """Bytes that each rank receives in a forward call."""
        return self.candidate.traffic.received("forward")

    @property
    def backward_bytes(self) -> NDArray[np.int64]:
        """Bytes that each rank receives in a backward call."""
        return self.candidate.traffic.received("backward")

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._table(), *self._reasons()])

    def _head(self) -> list[str]:
        plan, rows = self.plan, self.plan.rows
        spare = rows.rows_per_rank * rows.ranks - rows.q_len
        heads = ", ".join(str(heads.heads) for heads in plan.heads[:_MOST_RANKS])
        more = ", ..." if len(plan.heads) > _MOST_RANKS else ""
        lines = [
            f"{plan.strategy.name} on {rows.ranks} ranks: {rows.q_len:,} rows, {plan.k_len:,} keys, "
            f"{plan.q_heads}/{plan.kv_heads} heads",
            f"  rows     {rows.rows_per_rank:,} per rank, in chunks of {rows.size}; "
            f"{spare:,} of all are padding",
        ]
        if plan.strategy.members > 1:
            lines.append(f"  heads    {heads}{more} while attending, by member of a group")
        return lines

    def _table(self) -> list[str]:
        mean = max(self.pairs.mean(), 1.0)
        names = ("pairs", "of mean", "rows fetched", "fwd MB", "bwd MB")
        lines = [f"  {'rank':>6}" + "".join(f"{name:>14}" for name in names)]
        for rank in range(min(self.plan.rows.ranks, _MOST_RANKS)):
            cells = (
                f"{self.pairs[rank]:,.0f}",
                f"{self.pairs[rank] / mean:.3f}",
                f"{self.needed[rank] if self.plan.strategy.kind == 'exchange' else self.ring:,}",
                f"{self.forward_bytes[rank] / 1e6:,.3f}",
                f"{self.backward_bytes[rank] / 1e6:,.3f}",
            )
            lines.append(f"  {rank:>6}" + "".join(f"{cell:>14}" for cell in cells))
        if self.plan.rows.ranks > _MOST_RANKS:
            lines.append(f"  {'...':>6}")
        return lines

    def _reasons(self) -> list[str]:
        most, seconds = int(self.needed.max()), self.candidate.prediction.seconds
        share = f", {most / self.ring:.1%} of a ring's {self.ring:,}" if self.ring else ""
        lines = [f"  balance  busiest rank {self.balance:.3f} of the mean; 1 is the lower bound"]
        if self.plan.strategy.groups > 1:
            lines.append(
                f"  bytes    the most that a group needs of others is {most:,} rows{share}; "
                f"no partition needs less than {self.least_needed:,}"
            )
        if self.choice is None:
            lines.append(
                f"  why      the strategy was given; {seconds * 1e3:.4g} ms predicted, "
                f"bound by {self.candidate.prediction.bound}"
            )
            return lines
        return [*lines, "  why      chosen by predicted time, forward and backward:"] + [
            f"    {line}" for line in str(self.choice).splitlines()
        ]


def explain(plan: Plan, request: Request, choice: Choice | None) -> Explanation:
    """Say what a plan does.

    Args:
        plan: Made for the request.
        request: For its sizes and the machine.
        choice: As `make_plan` returned it.
    """
    groups, members = plan.strategy.groups, plan.strategy.members
    needed = foreign(plan.needs, plan.holders) if groups > 1 else np.zeros(1, np.int64)
    own = plan.keys.rows_per_rank * members
    costs = np.asarray(plan.mask.lowered.cost())
    most = int(costs.max(initial=0)) if costs.size else 0
    return Explanation(
        plan,
        cost(plan, request),
        np.repeat(needed, members),
        plan.planes * (groups - 1) * own,
        max(0, most - own) if groups > 1 else 0,
        choice,
    )
