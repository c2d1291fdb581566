"""Which strategy: each one's partition, bytes and predicted time, and the choice in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, ShapeError
from ..spans import Spans
from .chunks import Chunks
from .machine import Floats, Machine, Prediction, flops_of, predict
from .needs import Holders, needs_of
from .partition import Method, Partition, default_rows_per_chunk, partition
from .payload import Payload
from .strategy import HeadSlice, Strategy, split_heads
from .traffic import Traffic, rows_between, traffic_of

__all__ = [
    "Call",
    "Candidate",
    "Choice",
    "candidates",
    "choose",
    "decide",
    "evaluate",
    "exchange_parts",
    "holders_of",
]

#: Times that differ by less are alike, as no prediction is so exact: then the fewest bytes decide, since each
#: costs copies too.
ALIKE = 1.05
_PARTS = 4  # an exchange's parts at most, as the engine cuts it


@dataclass(frozen=True)
class Call:
    """The sizes of a call of attention that its mask does not tell.

    Attributes:
        q_heads, kv_heads: Hq and Hkv.
        head_dim, v_dim: Elements of a row of q and k, and of v.
        itemsize: Bytes of an element.
        batch: Batch rows.

    Example:
        >>> Call(q_heads=32, kv_heads=8).head_dim
        128
    """

    q_heads: int
    kv_heads: int
    head_dim: int = 128
    v_dim: int = 128
    itemsize: int = 2
    batch: int = 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy, and what it would cost.

    Attributes:
        strategy: Members, groups, and what happens between groups.
        partition: Who owns which rows.
        pairs: Visible (query, key, head) triples that each rank computes, float64 (P,).
        foreign: Key rows that each group receives, padding of a ring included, int64 (r,).
        traffic: Bytes of a call.
        prediction: Time of a call.

    Example:
        >>> from attnspan import causal
        >>> spans = causal().spans(64, 64)
        >>> part = partition(spans, 2, rows_per_chunk=8)
        >>> found = evaluate(Call(4, 2), Chunks.of(spans, 8), part, Strategy("ring", 1, 2), Machine())
        >>> found.strategy.name, found.prediction.bound
        ('ring', 'exchange')
    """

    strategy: Strategy
    partition: Partition
    pairs: Floats
    foreign: NDArray[np.int64]
    traffic: Traffic
    prediction: Prediction

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean; 1.0 where nobody sees anything."""
        mean = self.pairs.mean()
        return float(self.pairs.max() / mean) if mean else 1.0

    @property
    def received(self) -> int:
        """Bytes that the rank with the most traffic receives, forward and backward."""
        return int(self.traffic.received().max())


def evaluate(
    call: Call,
    chunks: Chunks,
    part: Partition,
    strategy: Strategy,
    machine: Machine,
    *,
    keys: Partition | None = None,
    mask_heads: int = 1,
) -> Candidate:
    """What a strategy costs with a given partition.

    Args:
        call: Sizes.
        chunks: The mask, cut as the partition is.
        part: Who owns which rows; of as many groups and members as the strategy.
        strategy: What to cost.
        machine: The figures for the prediction.
        keys: Who owns which keys; None in self-attention, where they lie like the rows.
        mask_heads: Heads of the mask, 1 or Hq; where heads differ, each is taken to cost their mean.

    Raises:
        ShapeError: The partition is one of other chunks, or of other groups than the strategy's.

    Example:
        >>> from attnspan import causal
        >>> spans = causal().spans(64, 64)
        >>> part = partition(spans, 2, rows_per_chunk=8, method="zigzag")
        >>> evaluate(Call(4, 2), Chunks.of(spans, 8), part, Strategy("exchange", 1, 2), Machine()).balance
        1.0
    """
    _check(chunks, part, strategy)
    heads = split_heads(call.q_heads, call.kv_heads, strategy.members)
    payload = Payload.of(
        heads,
        rows=part.rows_per_rank,
        head_dim=call.head_dim,
        v_dim=call.v_dim,
        itemsize=call.itemsize,
        batch=call.batch,
        planes=chunks.planes,
        key_rows=None if keys is None else keys.rows_per_rank,
    )
    rows, foreign = None, np.full(strategy.groups, payload.kv_rows * (strategy.ranks - strategy.members))
    if strategy.groups > 1 and strategy.kind == "exchange":
        needs = needs_of(chunks, part.owner, strategy.groups)
        rows = rows_between(needs, holders_of(part if keys is None else keys, chunks.planes))
        foreign = rows.sum(1)
    traffic = traffic_of(strategy, payload, rows, node_size=machine.node_size)
    of_group = np.bincount(part.owner, weights=chunks.pairs, minlength=strategy.groups)
    of_head = of_group * (call.batch / (chunks.planes * mask_heads))
    pairs = np.outer(of_head, [each.heads for each in heads]).reshape(-1)
    forward, backward = flops_of(pairs, head_dim=call.head_dim, v_dim=call.v_dim)
    ring = strategy.kind == "ring"
    parts = strategy.groups if ring else exchange_parts(heads)
    times = predict(machine, traffic, forward, backward, parts=parts, at_hand=ring)
    return Candidate(strategy, part, pairs, foreign, traffic, times)


def exchange_parts(heads: Sequence[HeadSlice]) -> int:
    """Into how many parts, by heads, an exchange is cut: while one is computed the next ones travel.

    Example:
        >>> exchange_parts(split_heads(32, 8, members=4)), exchange_parts(split_heads(12, 3, members=2))
        (2, 1)
    """
    if any(part.kv_map != tuple(range(len(part.kv))) for part in heads):
        return 1
    return max(1, min(_PARTS, *(len(part.kv) for part in heads)))


def _check(chunks: Chunks, part: Partition, strategy: Strategy) -> None:
    wanted = (chunks.q_len, chunks.size, strategy.members, strategy.groups)
    given = (part.q_len, part.size, part.members, part.groups)
    if wanted != given:
        raise ShapeError(
            "evaluate: part",
            expected="{} rows in chunks of {}, {} members in each of {} groups".format(*wanted),
            got="{}, {}, {}, {}".format(*given),
            remedy="Make the partition of these chunks, for this strategy",
        )


def holders_of(keys: Partition, planes: int) -> Holders:
    """Which group holds which flat keys, of a partition of the keys.

    Args:
        keys: Who owns which keys.
        planes: Batch rows of the mask.

    Example:
        >>> keys = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
        >>> holders_of(keys, planes=2).lo.tolist()
        [0, 2, 3, 5]
    """
    starts = np.arange(len(keys.owner), dtype=np.int64) * keys.size
    base = np.arange(planes, dtype=np.int64)[:, None] * keys.q_len
    lo, hi = base + starts, base + np.minimum(starts + keys.size, keys.q_len)
    group = np.tile(keys.owner.astype(np.int64), planes)
    return Holders(keys.groups, lo.reshape(-1), hi.reshape(-1), group)


def candidates(ranks: int, q_heads: int) -> list[Strategy]:
    """All strategies that so many ranks and heads allow, simple ones first.

    Query heads need not be divisible by the members of a group, nor KV heads be as many; but each member must
    have a query head.

    Args:
        ranks: P.
        q_heads: Hq.

    Example:
        >>> [each.name for each in candidates(ranks=4, q_heads=3)]
        ['exchange', 'ring', 'hybrid(2, 2)', 'hybrid(2, 2, ring)']
        >>> [each.name for each in candidates(ranks=3, q_heads=4)]
        ['exchange', 'ring', 'ulysses']
    """
    found = []
    for members in range(1, min(ranks, q_heads) + 1):
        if ranks % members == 0:
            found.append(Strategy("exchange", members, ranks // members))
            if members < ranks:
                found.append(Strategy("ring", members, ranks // members))
    return found


@dataclass(frozen=True, eq=False)
class Choice:
    """The strategy with the shortest predicted time, and all that were considered.

    Of those within 5 % of the shortest, it is the one with the fewest bytes.

    Attributes:
        best: The choice.
        considered: All candidates: the choice, then the fastest first.
        machine: Whose figures were used.

    Example:
        >>> from attnspan import causal
        >>> choice = choose(causal().spans(64, 64), 2, Call(4, 2), Machine())
        >>> print(choice.reason)  # doctest: +ELLIPSIS
        exchange: ... ms predicted, bound by exchange; next ulysses: ...
    """

    best: Candidate
    considered: tuple[Candidate, ...]
    machine: Machine

    @property
    def reason(self) -> str:
        """Why the best one is the best."""
        if len(self.considered) == 1:
            return f"{_words(self.best)}; nothing else was possible"
        other = self.considered[1]
        if other.prediction.seconds < self.best.prediction.seconds:
            return f"{_words(self.best)}; as fast as {_words(other)}, with fewer bytes"
        return f"{_words(self.best)}; next {_words(other)}"

    def __str__(self) -> str:
        names = ("forward ms", "backward ms", "received MB", "max/mean")
        head = f"{'strategy':<22}{''.join(f'{name:>13}' for name in names)}  bound by"
        lines = [head, *map(_line, self.considered), self.reason, f"predicted with {self.machine}"]
        return "\n".join(lines)


def _words(found: Candidate) -> str:
    seconds = found.prediction.seconds
    return f"{found.strategy.name}: {seconds * 1e3:.4g} ms predicted, bound by {found.prediction.bound}"


def _line(found: Candidate) -> str:
    forward, backward = (
        float(x.total.max()) * 1e3 for x in (found.prediction.forward, found.prediction.backward)
    )
    cells = f"{forward:>13.4g}{backward:>13.4g}{found.received / 1e6:>13.4g}{found.balance:>13.3f}"
    return f"{found.strategy.name:<22}{cells}  {found.prediction.bound}"


def choose(
    mask: Spans,
    ranks: int,
    call: Call,
    machine: Machine,
    *,
    strategies: Sequence[Strategy] | None = None,
    method: Method = "balanced",
    rows_per_chunk: int | None = None,
    tolerance: float | None = None,
    keys: Callable[[Strategy], Partition] | None = None,
) -> Choice:
    """Predict the time of each strategy, and take the shortest; of those within 5 %, the one of fewest bytes.

    The same arguments give the same choice on every rank. Each number of groups needs a partition of its own:
    this is for the start of a run, not for each step.

    Args:
        mask: The whole problem, bounds in NumPy.
        ranks: P.
        call: Sizes.
        machine: Figures for the predictions.
        strategies: Which to consider; None: `candidates`.
        method, rows_per_chunk, tolerance: As of `partition`; None for its default.
        keys: Who owns which keys, for a strategy; None in self-attention.

    Raises:
        OptionError: There is no strategy to choose from.

    Example:
        >>> from attnspan import causal, segments
        >>> mask = causal() & segments(np.repeat(np.arange(64), 64))  # short documents: keys are at home
        >>> choose(mask.spans(4096, 4096), 8, Call(32, 8), Machine()).best.strategy.name
        'exchange'
    """
    strategies = candidates(ranks, call.q_heads) if strategies is None else strategies
    if not strategies:
        raise OptionError(
            "choose: strategies", expected="at least one", got="none", remedy="Leave the argument out"
        )
    options: dict[str, Any] = {"method": method}
    if tolerance is not None:
        options["tolerance"] = tolerance
    cut: dict[int, Chunks] = {}
    parts: dict[int, Partition] = {}
    found = []
    for strategy in strategies:
        size = rows_per_chunk
        if size is None:
            size = default_rows_per_chunk(mask.q_len, strategy.groups)
        if size not in cut:
            cut[size] = Chunks.of(mask, size)
        if strategy.members not in parts:
            parts[strategy.members] = partition(cut[size], ranks, members=strategy.members, **options)
        found.append(
            evaluate(
                call,
                cut[size],
                parts[strategy.members],
                strategy,
                machine,
                keys=None if keys is None else keys(strategy),
                mask_heads=mask.bounds.shape[1],
            )
        )
    return decide(found, machine)


def decide(found: Sequence[Candidate], machine: Machine) -> Choice:
    """The choice among candidates that are costed already, at least one.

    Args:
        found: What to choose from.
        machine: Whose figures were used.

    Example:
        >>> from attnspan import causal
        >>> choice = choose(causal().spans(64, 64), 2, Call(4, 2), Machine())
        >>> decide(choice.considered, choice.machine).best is choice.best
        True
    """
    ordered = sorted(found, key=lambda each: each.prediction.seconds)
    alike = [each for each in ordered if each.prediction.seconds <= ALIKE * ordered[0].prediction.seconds]
    best = min(alike, key=lambda each: each.received)
    return Choice(best, (best, *(each for each in ordered if each is not best)), machine)
