"""Explanation of a plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan


_MOST_RANKS = 16  # lines of a printed table


def explain(plan: Plan) -> str:
    """Explain pairs, fetched keys and bytes of each rank, the lower bounds, and the comparison by "auto".

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> plan = Layout.of(causal(), q_len=64, ranks=2).plan(heads=(4, 2), strategy="exchange")
        >>> print(explain(plan))  # doctest: +ELLIPSIS
        exchange on 2 ranks: 64 rows, 64 keys, 4/2 heads
        ...
    """
    cost, layout, strategy = plan.cost(), plan.layout, plan.strategy
    spare = layout.rows_per_rank * layout.ranks - layout.q_len
    heads = "/".join(map(str, plan.sizes.heads))
    lines = [
        f"{strategy.name} on {layout.ranks} ranks: {layout.q_len:,} rows, {plan.k_len:,} keys, {heads} heads",
        f"  rows     {layout.rows_per_rank:,} per rank, with {spare:,} rows of padding in all",
        "".join(f"{name:>14}" for name in ("rank", "pairs", "of mean", "fetched", "fwd MB", "bwd MB")),
    ]
    moved = [cost.received(direction) / 1e6 for direction in ("forward", "backward")]
    of_mean = cost.pairs / max(cost.pairs.mean(), 1.0)
    for rank in range(min(layout.ranks, _MOST_RANKS)):
        cells = f"{rank:>14}{cost.pairs[rank]:>14,.0f}{of_mean[rank]:>14.3f}{cost.fetched[rank]:>14,}"
        lines.append(cells + "".join(f"{received[rank]:>14,.3f}" for received in moved))
    if layout.ranks > _MOST_RANKS:
        lines.append(f"{'...':>14}")
    lines.append(f"  balance  busiest rank {cost.balance:.3f} of the mean (lower bound: 1)")
    if strategy.groups > 1:
        ring = (strategy.groups - 1) * strategy.members * plan.keys.rows_per_rank * plan.planes
        most = int(cost.fetched.max())
        lines.append(
            f"  fetched  at most {most:,} keys, {most / max(ring, 1):.1%} of a ring's {ring:,} "
            f"(no layout needs fewer than {cost.least_fetched:,})"
        )
    lines.append(f"  memory   at most {cost.memory.max() / 1e6:,.3f} MB of buffers in one call")
    if plan.choice is None:
        return "\n".join([*lines, "  why      the strategy was given"])
    why = [f"    {line}" for line in str(plan.choice).splitlines()]
    return "\n".join([*lines, "  why      chosen by auto:", *why])
