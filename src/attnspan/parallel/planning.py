"""From a mask and ranks to a plan: the strategy, who owns what, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .._mistakes import not_a_mask
from ..errors import OptionError, ShapeError
from ..masks import Mask, Prepared
from ..spans import Spans
from .choose import Call, Candidate, Choice, choose, decide, evaluate
from .chunks import Chunks
from .machine import Machine
from .partition import Method, Partition, default_rows_per_chunk, partition
from .plan import Plan
from .strategy import Strategy

__all__ = ["Request", "cost", "lower", "make_plan"]


@dataclass(frozen=True)
class Request:
    """What a plan is to be made for, beside the mask.

    Attributes:
        ranks: P.
        call: Sizes of a call.
        strategy: A strategy, its name, or "auto".
        node_size: Ranks of a node, which share out heads where `strategy` is "auto"; None where there is one.
        self_attention: Keys lie like the rows; else they are dealt out in order.
        method, rows_per_chunk: As of `partition`.
        tolerance: Largest over mean visible pairs that a balanced partition aims at; None for a good one.
        machine: Figures for predictions; None for the default ones.
        rows: Who owns which rows, where that is decided already.
        keys: Who owns which keys, in cross attention; None to deal them out in order.

    Example:
        >>> Request(ranks=2, call=Call(4, 2)).strategy
        'auto'
    """

    ranks: int
    call: Call
    strategy: str | Strategy = "auto"
    node_size: int | None = None
    self_attention: bool = True
    method: Method = "balanced"
    rows_per_chunk: int | None = None
    tolerance: float | None = None
    machine: Machine | None = None
    rows: Partition | None = None
    keys: Partition | None = None

    def keys_for(self, strategy: Strategy, k_len: int) -> Partition:
        """Who owns which keys in cross attention: unless it is said, they are dealt out in order.

        Args:
            strategy: Its members and groups.
            k_len: Number of keys.

        Example:
            >>> Request(2, Call(4, 2)).keys_for(Strategy("ring", 1, 2), k_len=5).rows.tolist()
            [[0, 1, 2], [3, 4, -1]]
        """
        if self.keys is not None:
            return _fitting("keys", self.keys, k_len, strategy)
        size = max(1, -(-k_len // strategy.groups))
        owner = np.arange(-(-k_len // size)) if k_len else np.zeros(0, np.int64)
        sizes = {"groups": strategy.groups, "members": strategy.members, "size": size}
        return Partition.of_owner(owner, q_len=k_len, **sizes)


def make_plan(mask: Prepared, request: Request) -> tuple[Plan, Choice | None]:
    """Plan an attention; the same arguments give the same plan on every rank.

    Args:
        mask: Lowered for the whole problem, with bounds in NumPy.
        request: For which ranks, and how.

    Returns:
        The plan, and the choice that led to its strategy if that was "auto".

    Raises:
        OptionError: There is no such strategy.

    Example:
        >>> from attnspan import causal
        >>> plan, choice = make_plan(causal().prepare(64, 64), Request(4, Call(4, 2), strategy="ring"))
        >>> plan.strategy.name, choice
        ('ring', None)
    """
    spans, choice, cut = mask.lowered, None, None
    strategy = request.strategy
    if request.rows is not None:
        strategy, rows, choice = _with_rows(spans, request.rows, request)
    elif strategy == "auto":
        choice = _choose(spans, request)
        strategy, rows = choice.best.strategy, choice.best.partition
    else:
        strategy = _checked(strategy, request.ranks)
        size = request.rows_per_chunk
        cut = Chunks.of(spans, default_rows_per_chunk(spans.q_len, strategy.groups) if size is None else size)
        options: dict[str, Any] = {"members": strategy.members, "method": request.method}
        if request.tolerance is not None:
            options["tolerance"] = request.tolerance
        rows = partition(cut, request.ranks, **options)
    keys = rows if request.self_attention else request.keys_for(strategy, spans.k_len)
    return Plan(mask, strategy, rows, keys, request.call.q_heads, request.call.kv_heads, cut), choice


def cost(plan: Plan, request: Request) -> Candidate:
    """What a plan costs: pairs, bytes, predicted time.

    Args:
        plan: Made for the request.
        request: For its sizes and the machine.

    Example:
        >>> from attnspan import causal
        >>> request = Request(2, Call(4, 2), strategy="exchange")
        >>> cost(make_plan(causal().prepare(64, 64), request)[0], request).balance
        1.0
    """
    keys = None if plan.keys is plan.rows else plan.keys
    machine, heads = _machine(request), plan.bounds.shape[1]
    return evaluate(request.call, plan.chunks, plan.rows, plan.strategy, machine, keys=keys, mask_heads=heads)


def _with_rows(spans: Spans, rows: Partition, request: Request) -> tuple[Strategy, Partition, Choice | None]:
    """The strategy for rows that are dealt out already."""
    if request.strategy != "auto":
        strategy = _checked(request.strategy, request.ranks)
        return strategy, _fitting("partition", rows, spans.q_len, strategy), None
    if rows.ranks != request.ranks:
        _fitting("partition", rows, spans.q_len, Strategy("exchange", 1, request.ranks))
    kinds: list[Literal["exchange", "ring"]] = ["exchange", "ring"] if rows.groups > 1 else ["exchange"]
    strategies = [Strategy(kind, rows.members, rows.groups) for kind in kinds]
    _fitting("partition", rows, spans.q_len, strategies[0])
    chunks, machine = Chunks.of(spans, rows.size), _machine(request)
    found = []
    for strategy in strategies:
        keys = None if request.self_attention else request.keys_for(strategy, spans.k_len)
        heads = spans.bounds.shape[1]
        found.append(evaluate(request.call, chunks, rows, strategy, machine, keys=keys, mask_heads=heads))
    choice = decide(found, machine)
    return choice.best.strategy, rows, choice


def _fitting(what: str, given: Partition, length: int, strategy: Strategy) -> Partition:
    """A partition that was given, if it is one of this problem for this strategy."""
    wanted, got = (
        f"{n} rows over {groups} groups of {members}"
        for n, groups, members in (
            (length, strategy.groups, strategy.members),
            (given.q_len, given.groups, given.members),
        )
    )
    if wanted != got:
        raise ShapeError(
            what,
            expected=f"{wanted}, as {strategy.name} needs",
            got=got,
            remedy="Take the partition of a plan of the same length and strategy",
        )
    return given


def _choose(spans: Spans, request: Request) -> Choice:
    strategies = None
    if request.node_size is not None and request.ranks % request.node_size == 0:
        # On two levels only the ranks of a node share out heads, so that keys cross between nodes once.
        groups = request.ranks // request.node_size
        strategies = [
            Strategy("exchange", request.node_size, groups),
            Strategy("ring", request.node_size, groups),
        ]
    keys = None if request.self_attention else (lambda chosen: request.keys_for(chosen, spans.k_len))
    return choose(
        spans,
        request.ranks,
        request.call,
        _machine(request),
        strategies=strategies,
        method=request.method,
        rows_per_chunk=request.rows_per_chunk,
        tolerance=request.tolerance,
        keys=keys,
    )


def _machine(request: Request) -> Machine:
    machine = Machine.default() if request.machine is None else request.machine
    return machine if request.node_size is None else machine.with_nodes(request.node_size)


def _checked(strategy: str | Strategy, ranks: int) -> Strategy:
    if not isinstance(strategy, Strategy):
        return Strategy.parse(strategy, ranks)
    if strategy.ranks != ranks:
        raise OptionError(
            "strategy",
            expected=f"one for {ranks} ranks",
            got=f"{strategy.name} for {strategy.ranks}",
            remedy="Its members times its groups are the ranks of the mesh",
        )
    return strategy


def lower(mask: Mask | Spans, q_len: int, k_len: int, batch: int, heads: int) -> Prepared:
    """The mask of a whole problem, with bounds and indices in NumPy.

    Args:
        mask: An expression, or what was lowered before.
        q_len: Rows of the whole problem.
        k_len: Its keys.
        batch: Batch rows.
        heads: Query heads.

    Raises:
        DtypeError: It is no mask.
        ShapeError: It was lowered for another problem.
        OptionError: Its data break a promise.

    Example:
        >>> from attnspan import causal
        >>> lower(causal(), 4, 4, batch=1, heads=1).lowered.bounds.shape
        (1, 1, 4, 1, 2)
    """
    if isinstance(mask, Spans):
        mask = Prepared(mask.validate())
    if not isinstance(mask, Mask):
        raise not_a_mask(mask)
    found = mask if isinstance(mask, Prepared) else mask.prepare(q_len, k_len, batch=batch, heads=heads)
    if found.k_index is not None:
        raise OptionError(
            "mask",
            expected="one whose keys are 0..k_len-1",
            got="one prepared for keys of its own",
            remedy="Describe the whole problem: the plan shards it",
        )
    spans = found.lowered
    _check_sizes(spans, q_len, k_len, batch, heads)
    return Prepared(Spans(_numpy(spans.bounds), k_len), _numpy(found.q_index))


def _check_sizes(spans: Spans, q_len: int, k_len: int, batch: int, heads: int) -> None:
    if spans.q_len != q_len or spans.k_len != k_len:
        raise ShapeError(
            "mask",
            expected=f"{q_len} rows and {k_len} keys, the whole problem",
            got=repr(spans),
            remedy="Lower it for the whole problem: the plan shards it",
        )
    planes, mask_heads = spans.bounds.shape[:2]
    # What was lowered before may be for others: of too many heads the first ones would be taken.
    for name, got, whole in (("batch rows", planes, batch), ("heads", mask_heads, heads)):
        if got not in (1, whole):
            raise ShapeError(
                "mask",
                expected=f"{whole} {name}, or 1 that all share",
                got=repr(spans),
                remedy="Plan with batch=... and heads=... of the whole problem, and lower it for these",
            )


def _numpy(x: object) -> object:
    if x is None or isinstance(x, np.ndarray):
        return x
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)
