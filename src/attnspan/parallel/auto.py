"""Choice of a strategy, by predicted time if rates were measured, else by bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from attnspan.errors import expect

from .cost import Cost, Sizes
from .strategy import Strategy, members_of_node

if TYPE_CHECKING:
    from .plan import Plan


#: Times within this ratio count as equal, because predictions are no more exact. Then bytes decide.
_ALIKE = 1.05


class Prediction(NamedTuple):
    """Predicted time of a call, forward and backward.

    Attributes:
        seconds: Time of the call. In each direction, all ranks wait for the slowest rank.
        compute_seconds: Lower bound: the mean pairs per rank at the machine's full rate.
        network_seconds: Lower bound for the strategy's communication, for the rank with the most bytes.
        bound: Longest phase of the slowest rank: "compute", "exchange" or "scatter and gather".
    """

    seconds: float
    compute_seconds: float
    network_seconds: float
    bound: str


@runtime_checkable
class Rates(Protocol):
    """Measured rates of a machine. ``str`` names the machine."""

    node_size: int  # ranks of a node

    def predict(self, cost: Cost, sizes: Sizes) -> Prediction:
        """Predict the time of a call with this cost and these sizes."""


@dataclass(frozen=True, eq=False)
class StrategyChoice:
    """Strategy that "auto" chose, and all strategies that it compared.

    Attributes:
        considered: All candidates, the choice first.
        predicted: Predicted time of each candidate. Empty if no rates were measured.
        machine: Measured rates. None if bytes decided.
        memory: Limit for the buffers of one call, in bytes. None for no limit.
        members: Ranks of a node that share heads. None if any ranks may.
    """

    considered: tuple[Cost, ...]
    predicted: tuple[Prediction, ...]
    machine: Rates | None
    memory: int | None
    members: int | None

    @property
    def best(self) -> Cost:
        """Cost of the chosen strategy."""
        return self.considered[0]

    def __str__(self) -> str:
        lines = [f"{'strategy':<20}{'received MB':>12}{'memory MB':>11}{'max/mean':>10}{'ms':>11}  bound by"]
        for cost, time in zip_longest(self.considered, self.predicted):
            received, memory = cost.received().max(), cost.memory.max()
            cells = f"{received / 1e6:>12.4g}{memory / 1e6:>11.4g}{cost.balance:>10.3f}"
            cells += f"{'-':>11}" if time is None else f"{time.seconds * 1e3:>11.4g}  {time.bound}"
            beyond = "" if self.memory is None or memory <= self.memory else "  too large"
            lines.append(f"{cost.strategy.name:<20}{cells}{beyond}")
        rule = "The busiest rank receives the fewest bytes, forward and backward. No rates were measured."
        if self.machine is not None:
            rule = "Shortest predicted time. Of times within 5 %, the fewest bytes."
        if self.memory is not None:
            rule += f" Buffers may take {self.memory / 1e6:.4g} MB."
        if self.members is not None:
            rule += f" Only ranks of a node share heads: {self.members}."
        return "\n".join([*lines, rule, *([] if self.machine is None else [f"Rates: {self.machine}."])])


def candidates(ranks: int, q_heads: int) -> list[Strategy]:
    """List all strategies for these ranks and heads, simple ones first. Each member has a query head.

    Example:
        >>> [each.name for each in candidates(ranks=4, q_heads=3)]
        ['exchange', 'ring', 'hybrid(2, 2)', 'hybrid(2, 2, ring)']
    """
    found = []
    for members in range(1, min(ranks, q_heads) + 1):
        if ranks % members == 0:
            found.append(Strategy("exchange", members, ranks // members))
            if members < ranks:
                found.append(Strategy("ring", members, ranks // members))
    return found


def choose(plan: Plan, *, node_size: int | None, machine: Rates | None, memory: int | None) -> StrategyChoice:
    """Choose a strategy for a plan. The same arguments give the same choice in every process.

    Without rates, the choice is the strategy whose busiest rank receives the fewest bytes. With rates, it is
    the shortest predicted time. Among the strategies within 5 % of this time, the one with the fewest bytes
    is chosen. Strategies whose buffers exceed `memory` are left out. If there are more ranks than
    `node_size`, groups that share heads are as large as a node allows. No group then lies in two nodes, and
    each rank has a query head.

    Args:
        plan: The problem.
        node_size, machine, memory: See `attnspan.parallel.plan.make_plan`.

    Raises:
        OptionError: No strategy fits into `memory`.
    """
    ranks, sizes, members = plan.layout.ranks, plan.sizes, None
    strategies = candidates(ranks, sizes.q_heads)
    if node_size is not None and node_size < ranks:
        members = members_of_node(node_size, ranks, sizes.q_heads)
        strategies = [x for x in strategies if x.members == members]
    node_size = machine.node_size if node_size is None and machine is not None else node_size
    costs = [plan.cost(strategy, node_size) for strategy in strategies]
    predicted = [] if machine is None else [machine.predict(cost, sizes) for cost in costs]
    fits = [memory is None or bool(cost.memory.max() <= memory) for cost in costs]
    least = min(int(cost.memory.max()) for cost in costs)
    remedy = "Use more ranks, or allow more memory"
    expect(any(fits), "memory", f"at least {least} bytes, which the smallest strategy needs", memory, remedy)
    shortest = min((time.seconds for time, fit in zip(predicted, fits, strict=False) if fit), default=0.0)

    def rank(number: int) -> tuple[bool, float, int]:
        seconds = predicted[number].seconds if predicted else 0.0
        time = 0.0 if seconds <= _ALIKE * shortest else seconds
        return not fits[number], time, int(costs[number].received().max())

    order = sorted(range(len(costs)), key=rank)
    times = tuple(predicted[x] for x in order) if predicted else ()
    return StrategyChoice(tuple(costs[x] for x in order), times, machine, memory, members)
