"""The choice of a strategy: by predicted time where rates were measured, else by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import expect
from .cost import Cost, Sizes
from .machine import Machine
from .strategy import Strategy, members_of_node

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Choice", "candidates", "choose"]

#: Predicted times that differ by less are alike, as no prediction is so exact: then the fewest bytes decide.
_ALIKE = 1.05


@dataclass(frozen=True, eq=False)
class Choice:
    """The strategy that "auto" takes, and all that were considered.

    Attributes:
        best: The choice.
        considered: All candidates, the best first.
        machine: Whose rates predicted times; None where bytes decided.
        memory: The bytes that buffers of one call may take; None for no limit.
        sizes: Of the call.
        members: Ranks of a node that share heads; None where any ranks may.
    """

    best: Cost
    considered: tuple[Cost, ...]
    machine: Machine | None
    memory: int | None
    sizes: Sizes
    members: int | None = None

    def __str__(self) -> str:
        lines = [f"{'strategy':<20}{'received MB':>12}{'memory MB':>11}{'max/mean':>10}{'ms':>9}  bound by"]
        for cost in self.considered:
            cells = (
                f"{cost.received().max() / 1e6:>12.4g}{cost.memory.max() / 1e6:>11.4g}{cost.balance:>10.3f}"
            )
            time = f"{'-':>9}"
            if self.machine is not None:
                predicted = self.machine.predict(cost, self.sizes)
                time = f"{predicted.seconds * 1e3:>9.4g}  {predicted.bound}"
            beyond = "" if self.memory is None or cost.memory.max() <= self.memory else "  too large"
            lines.append(f"{cost.strategy.name:<20}{cells}{time}{beyond}")
        rule = "The busiest rank receives the fewest bytes, forward and backward; no rates were measured."
        if self.machine is not None:
            rule = "Shortest predicted time; within 5 % the fewest bytes."
        if self.memory is not None:
            rule += f" Buffers may take {self.memory / 1e6:.4g} MB."
        if self.members is not None:
            rule += f" Only ranks of a node share heads: {self.members}."
        lines.append(rule)
        return "\n".join(lines if self.machine is None else [*lines, f"Rates: {self.machine}."])


def candidates(ranks: int, q_heads: int) -> list[Strategy]:
    """All strategies that so many ranks and heads allow, simple ones first; each member has a query head.

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


def choose(plan: Plan, *, node_size: int | None, machine: Machine | None, memory: int | None) -> Choice:
    """Choose a strategy for a plan; the same arguments give the same choice in every process.

    Without rates it takes the strategy whose busiest rank receives the fewest bytes. With them it takes the
    shortest predicted time, and of those within 5 % the fewest bytes. Strategies whose buffers exceed
    `memory` are left out. With `node_size`, and more ranks than those, groups that share heads are as large
    as a node allows: no group lies in two nodes, and each rank has a query head.

    Args:
        plan: The problem.
        node_size: Ranks of a node; None for one level.
        machine: Measured rates; None for those that ATTNSPAN_MACHINE names, if any.
        memory: Bytes that the buffers of one call may take; None for no limit.

    Raises:
        OptionError: No strategy fits into `memory`.
    """
    machine = Machine.default() if machine is None else machine
    ranks, sizes = plan.layout.ranks, plan.sizes
    strategies = candidates(ranks, sizes.q_heads)
    members = None
    if node_size is not None and node_size < ranks:
        members = members_of_node(node_size, ranks, sizes.q_heads)
        strategies = [x for x in strategies if x.members == members]
    node_size = machine.node_size if node_size is None and machine is not None else node_size
    costs = [plan.cost(strategy, node_size) for strategy in strategies]
    order = sorted(costs, key=lambda cost: _merit(cost, costs, machine, sizes))
    fitting = [cost for cost in order if memory is None or cost.memory.max() <= memory]
    least = min(int(cost.memory.max()) for cost in costs)
    remedy = "Use more ranks, or allow more memory"
    expect(fitting, "memory", f"at least {least} bytes, which the smallest strategy takes", memory, remedy)
    rest = [cost for cost in order if cost is not fitting[0]]
    return Choice(fitting[0], (fitting[0], *rest), machine, memory, sizes, members)


def _merit(cost: Cost, costs: Sequence[Cost], machine: Machine | None, sizes: Sizes) -> tuple[float, float]:
    received = float(cost.received().max())
    if machine is None:
        return 0.0, received
    shortest = min(machine.predict(each, sizes).seconds for each in costs)
    seconds = machine.predict(cost, sizes).seconds
    return (0.0 if seconds <= _ALIKE * shortest else seconds), received
