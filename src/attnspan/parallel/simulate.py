"""Many ranks on one machine: partition, needs, bytes and predicted time of a step, without any of the ranks.

The partition, the needs, the counts of bytes and the cost model are those of a real run; only the time is
predicted, from the figures of a `Machine`, and no rank is there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..masks import causal, segments
from ..spans import Spans
from .choose import Call, Candidate, evaluate
from .chunks import Chunks
from .machine import Machine, flops_of
from .partition import Method, Partition, default_rows_per_chunk, partition
from .strategy import Strategy

__all__ = ["Outcome", "Setup", "pack", "sample_lengths", "setups", "simulate"]

Ints = NDArray[np.int64]

_SHORTEST = 16  # tokens of a document that is drawn


@dataclass(frozen=True)
class Setup:
    """A strategy with a way of dealing rows.

    Attributes:
        strategy: Members, groups, and what happens between groups.
        method: Who owns which rows, as in `partition`.

    Example:
        >>> Setup(Strategy("ring", 1, 8), "zigzag").name
        'ring, zigzag'
    """

    strategy: Strategy
    method: Method

    @property
    def name(self) -> str:
        """For tables and plots, the number of ranks aside."""
        strategy = self.strategy
        if strategy.groups == 1:
            return "ulysses"
        if strategy.members == 1:
            return f"{strategy.kind}, {self.method}"
        kind = ", ring" if strategy.kind == "ring" else ""
        return f"hybrid({strategy.members}, r{kind}), {self.method}"


def setups(ranks: int, q_heads: int, node_size: int) -> list[Setup]:
    """What is compared: the balanced exchange, hybrids of it, rings over rows in order and zigzag, Ulysses.

    Members of a hybrid are the ranks of a node, or as many as there are query heads. Ulysses needs a query
    head per rank: beyond, it is not among them.

    Args:
        ranks: P.
        q_heads: Hq.
        node_size: Ranks of a node.

    Example:
        >>> for each in setups(ranks=16, q_heads=32, node_size=8):
        ...     print(each.name)
        exchange, balanced
        hybrid(8, r), balanced
        exchange, zigzag
        ring, contiguous
        ring, zigzag
        ulysses
    """
    found = [Setup(Strategy("exchange", 1, ranks), "balanced")]
    members = min(node_size, q_heads)
    if ranks > members > 1 and ranks % members == 0:
        found.append(Setup(Strategy("exchange", members, ranks // members), "balanced"))
    found.append(Setup(Strategy("exchange", 1, ranks), "zigzag"))
    found.append(Setup(Strategy("ring", 1, ranks), "contiguous"))
    found.append(Setup(Strategy("ring", 1, ranks), "zigzag"))
    if 1 < ranks <= q_heads:
        found.append(Setup(Strategy("exchange", ranks, 1), "contiguous"))
    return found


@dataclass(frozen=True)
class Outcome:
    """What a setup costs.

    Attributes:
        setup: Name of the setup.
        ranks, tokens: P and S.
        balance: Visible pairs of the busiest rank over the mean.
        rows: Key rows that come to the group with the most, from other groups.
        rows_of_ring: Those that a full ring over as many groups would bring: the unit of `rows`.
        received: Bytes that the busiest rank receives, forward and backward.
        received_across: Of them those from other nodes, of the rank where they are most.
        received_mean: Bytes that a rank receives on average.
        seconds: Predicted, forward and backward.
        compute_seconds: Lower bound: the mean of all ranks' pairs at the machine's full rate.
        network_seconds: Lower bound of this setup's communication: the bytes of the busiest rank at full
            bandwidth. For an exchange these are the needed rows and their gradients, nothing else.
        bound: What the busiest rank spends most of its time on.
        planning_seconds: Measured here: chunks, partition, needs and counts, for all ranks together.

    Example:
        >>> from attnspan import causal
        >>> setup = Setup(Strategy("ring", 1, 4), "zigzag")
        >>> [ring] = simulate(causal().spans(64, 64), Call(2, 1), Machine(), [setup])
        >>> ring.balance, ring.rows, ring.rows_of_ring
        (1.0, 48, 48)
    """

    setup: str
    ranks: int
    tokens: int
    balance: float
    rows: int
    rows_of_ring: int
    received: int
    received_across: int
    received_mean: float
    seconds: float
    compute_seconds: float
    network_seconds: float
    bound: str
    planning_seconds: float

    @property
    def over_bound(self) -> float:
        """Predicted time over the lower bound: the larger one of compute and this setup's communication."""
        least = max(self.compute_seconds, self.network_seconds)
        return self.seconds / least if least else 1.0

    @property
    def efficiency(self) -> float:
        """Share of the predicted time in which the average rank computes; 1.0 is perfect.

        Example:
            >>> from attnspan import full
            >>> setup = Setup(Strategy("exchange", 1, 1), "contiguous")
            >>> simulate(full().spans(64, 64), Call(2, 1), Machine(), [setup])[0].efficiency
            1.0
        """
        return self.compute_seconds / self.seconds if self.seconds else 1.0


def simulate(spans: Spans, call: Call, machine: Machine, chosen: Sequence[Setup]) -> list[Outcome]:
    """Run the host's part of a step for each setup. O(S * R), and for an exchange O(r * r) for r groups.

    Args:
        spans: The whole problem, bounds in NumPy.
        call: Sizes.
        machine: Figures for the predictions.
        chosen: What to compare.

    Returns:
        One outcome per setup, in their order.

    Example:
        >>> from attnspan import causal
        >>> chosen = setups(ranks=4, q_heads=4, node_size=8)
        >>> found = simulate(causal().spans(512, 512), Call(4, 2), Machine(), chosen)
        >>> [round(each.balance, 2) for each in found]
        [1.0, 1.0, 1.75, 1.0, 1.0]
    """
    cut: dict[int, Chunks] = {}
    parts: dict[tuple[Method, int], Partition] = {}
    outcomes = []
    for setup in chosen:
        strategy = setup.strategy
        start = time.perf_counter()
        size = default_rows_per_chunk(spans.q_len, strategy.groups)
        if size not in cut:
            cut[size] = Chunks.of(spans, size)
        key = (setup.method, strategy.members)
        if key not in parts:
            parts[key] = partition(cut[size], strategy.ranks, members=strategy.members, method=setup.method)
        heads = spans.bounds.shape[1]
        found = evaluate(call, cut[size], parts[key], strategy, machine, mask_heads=heads)
        outcomes.append(_outcome(setup, spans, call, machine, found, time.perf_counter() - start))
    return outcomes


def _outcome(
    setup: Setup, spans: Spans, call: Call, machine: Machine, found: Candidate, planning_seconds: float
) -> Outcome:
    total = found.traffic.total()
    forward, backward = flops_of(found.pairs.mean(), head_dim=call.head_dim, v_dim=call.v_dim)
    within = np.maximum(total.received_within, total.sent_within) / machine.bandwidth_within
    across = np.maximum(total.received_across, total.sent_across) / machine.bandwidth_across
    each = found.partition.rows_per_rank * setup.strategy.members
    return Outcome(
        setup=setup.name,
        ranks=setup.strategy.ranks,
        tokens=spans.q_len,
        balance=found.balance,
        rows=int(found.foreign.max()),
        rows_of_ring=(setup.strategy.groups - 1) * each,
        received=int(total.received.max()),
        received_across=int(total.received_across.max()),
        received_mean=float(total.received.mean()),
        seconds=found.prediction.seconds,
        compute_seconds=float(forward / machine.forward_flops + backward / machine.backward_flops),
        network_seconds=float(np.maximum(within, across).max()),
        bound=found.prediction.bound,
        planning_seconds=planning_seconds,
    )


def sample_lengths(kind: str, tokens: int, *, mean: int = 4096, seed: int = 0) -> Ints:
    """Draw lengths of documents with a heavy tail, until they fill a row; the last one is cut.

    "lognormal" has a standard deviation of 1.5 in the logarithm (the mean is three times the median),
    "pareto" a tail of index 1.2 (one document in sixteen is ten times as long as the shortest). Documents
    have 16 tokens at least, and the row at most.

    Args:
        kind: "lognormal" or "pareto".
        tokens: Of the row, at least 1.
        mean: Of the distribution before it is cut, tokens, more than 16.
        seed: Of the draw.

    Returns:
        int64 (documents,), which add up to `tokens`.

    Raises:
        OptionError: For another kind, or sizes that make no row.

    Example:
        >>> lengths = sample_lengths("pareto", 100_000, seed=1)
        >>> int(lengths.sum()), bool(lengths.min() > 0)
        (100000, True)
    """
    if tokens < 1 or mean <= _SHORTEST:
        raise OptionError(
            "sample_lengths",
            expected=f"tokens of at least 1 and a mean of more than {_SHORTEST}",
            got=f"{tokens} and {mean}",
            remedy="Pass larger ones",
        )
    rng = np.random.default_rng(seed)
    count = 2 * tokens // mean + 64
    parts: list[Ints] = []
    while sum(int(part.sum()) for part in parts) < tokens:
        if kind == "lognormal":
            sigma = 1.5
            drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        elif kind == "pareto":
            index = 1.2
            drawn = (rng.pareto(index, count) + 1) * mean * (index - 1) / index
        else:
            raise OptionError(
                "sample_lengths: kind",
                expected="lognormal or pareto",
                got=repr(kind),
                remedy="Pass one of them, or lengths of your own to pack()",
            )
        parts.append(np.clip(drawn, _SHORTEST, tokens).astype(np.int64))
    ends = np.minimum(np.cumsum(np.concatenate(parts)), tokens)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


def pack(lengths: NDArray[np.integer]) -> Spans:
    """The mask of documents packed into one row, causal within each.

    Args:
        lengths: Tokens of each document, (documents,).

    Example:
        >>> pack(np.array([2, 1])).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3]]
    """
    tokens = int(lengths.sum())
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return (causal() & segments(ids)).spans(tokens, tokens).lowered
