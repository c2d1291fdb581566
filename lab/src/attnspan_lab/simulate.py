"""The command ``attnspan simulate``: layouts, needs and bytes of many ranks on one machine.

They are those of a real run. Time is predicted, where rates were measured. No rank is started.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from typer import Argument, Option

from attnspan.errors import expect
from attnspan.library.text import parse
from attnspan.masks import Mask, causal, segments
from attnspan.parallel import Layout, Strategy
from attnspan.parallel.partition import Method
from attnspan.parallel.strategy import members_of_node
from attnspan_lab.bench.workloads import corpus_offsets
from attnspan_lab.console import Column, bytes_text, numbers, print_table, progress, seconds_text, stdout
from attnspan_lab.files import write_json
from attnspan_lab.machine import Machine

__all__ = [
    "Outcome",
    "Setup",
    "command",
    "corpus_lengths",
    "pack",
    "sample_lengths",
    "setups",
    "simulate",
    "tokens_of",
]

_SHORTEST = 16  # tokens of a document that is drawn
_COLUMNS = (
    Column("ranks"),
    Column("strategy, rows", words=True),
    Column("max/mean"),
    Column("of ring"),
    Column("received", drop=1),
    Column("across", drop=4),
    Column("memory", drop=2),
)
_TIMES = (Column("predicted"), Column("least", drop=3), Column("bound by", words=True, drop=5))
_LEGEND = (
    "max/mean: visible pairs of the busiest rank over the mean. Of ring: key rows that the busiest group "
    "fetches, as a share of a ring's. Received, across (from other nodes), memory of buffers: bytes of the "
    "busiest rank, forward and backward of one layer."
)
_TIMES_LEGEND = (
    "Predicted: time of the slowest rank. Least: the mean of all ranks' pairs at the full rate, or the "
    "busiest rank's own bytes at the full bandwidth."
)


@dataclass(frozen=True)
class Setup:
    """A strategy with a way of partitioning rows.

    Example:
        >>> Setup(Strategy("ring", 1, 8), "zigzag").name
        'ring, zigzag'
    """

    strategy: Strategy
    method: Method

    @property
    def name(self) -> str:
        """For tables and plots, the number of ranks aside."""
        members, ring = self.strategy.members, ", ring" * (self.strategy.kind == "ring")
        if self.strategy.groups == 1:
            return "ulysses"
        return f"{self.strategy.kind if members == 1 else f'hybrid({members}, r{ring})'}, {self.method}"


def setups(ranks: int, q_heads: int, node_size: int) -> list[Setup]:
    """Setups to compare: the balanced exchange, hybrids of it, rings over rows in order and zigzag, Ulysses.

    Example:
        >>> [each.name for each in setups(ranks=16, q_heads=32, node_size=8)][:3]
        ['exchange, balanced', 'hybrid(8, r), balanced', 'exchange, zigzag']
    """
    found = [Setup(Strategy("exchange", 1, ranks), "balanced")]
    members = members_of_node(node_size, ranks, q_heads)
    if ranks > members > 1:
        found.append(Setup(Strategy("exchange", members, ranks // members), "balanced"))
    found.append(Setup(Strategy("exchange", 1, ranks), "zigzag"))
    found += [Setup(Strategy("ring", 1, ranks), method) for method in ("contiguous", "zigzag")]  # type: ignore[arg-type]
    if 1 < ranks <= q_heads:
        found.append(Setup(Strategy("exchange", ranks, 1), "contiguous"))
    return found


@dataclass(frozen=True)
class Outcome:
    """Cost of a setup.

    Attributes:
        setup: Its name.
        ranks, tokens: P and S.
        balance: Visible pairs of the busiest rank over the mean.
        rows, rows_of_ring: Key rows that the group with the most fetches, and that a ring would bring.
        received, received_across: Bytes of the busiest rank, forward and backward, and those from other
            nodes.
        received_mean: Bytes of the average rank.
        memory: Bytes of buffers, of the rank with the most.
        seconds: Predicted; None without measured rates.
        compute_seconds, network_seconds: Lower bounds; see `attnspan.parallel.auto.Prediction`.
        bound: What the busiest rank spends most of its time on.
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
    memory: int
    seconds: float | None = None
    compute_seconds: float | None = None
    network_seconds: float | None = None
    bound: str | None = None


def simulate(
    mask: Mask,
    tokens: int,
    chosen: Iterable[Setup],
    *,
    machine: Machine | None = None,
    node_size: int | None = None,
    **sizes: object,
) -> list[Outcome]:
    """Run the host's part of a step for each setup.

    Args:
        mask: Of a row of so many tokens.
        tokens: S.
        chosen: What to compare.
        machine: Measured rates; None: no time is predicted.
        node_size: Ranks of a node; None: the machine's, or all.
        **sizes: ``heads`` and other arguments of `Layout.plan`.

    Example:
        >>> chosen = setups(ranks=4, q_heads=4, node_size=8)
        >>> [round(x.balance, 2) for x in simulate(causal(), 512, chosen, heads=(4, 2))]
        [1.0, 1.0, 1.75, 1.0, 1.0]
    """
    mask = mask.prepare(tokens, tokens)
    node_size = machine.node_size if node_size is None and machine is not None else node_size
    layouts: dict[tuple[Method, int, int], Layout] = {}
    outcomes = []
    for setup in chosen:
        strategy = setup.strategy
        key = (setup.method, strategy.ranks, strategy.members)
        if key not in layouts:
            options = {"ranks": strategy.ranks, "members": strategy.members, "method": setup.method}
            layouts[key] = Layout.of(mask, q_len=tokens, **options)  # type: ignore[arg-type]
        plan = layouts[key].plan(strategy=strategy, **sizes)  # type: ignore[arg-type]
        cost = plan.cost(node_size=node_size)
        predicted = {} if machine is None else machine.predict(cost, plan.sizes)._asdict()
        received = cost.received()
        phases = (*cost.forward.values(), *cost.backward.values())
        across = np.sum([phase.received_across for phase in phases] or [0 * received], axis=0)
        outcomes.append(
            Outcome(
                setup=setup.name,
                ranks=strategy.ranks,
                tokens=tokens,
                balance=cost.balance,
                rows=int(cost.fetched.max()),
                rows_of_ring=(strategy.groups - 1) * plan.keys.rows_per_rank * strategy.members,
                received=int(received.max()),
                received_across=int(across.max()),
                received_mean=float(received.mean()),
                memory=int(cost.memory.max()),
                **predicted,
            )
        )
    return outcomes


def sample_lengths(kind: str, tokens: int, *, mean: int = 4096, seed: int = 0) -> NDArray[np.int64]:
    """Draw lengths of documents with a heavy tail, until they fill a row; the last one is cut.

    "lognormal" has a standard deviation of 1.5 in the logarithm (the mean is three times the median),
    "pareto" a tail of index 1.2 (one document in sixteen is ten times as long as the shortest). Documents
    have 16 tokens at least, and the row at most.

    Raises:
        OptionError: Another kind, or sizes that make no row.

    Example:
        >>> int(sample_lengths("pareto", 100_000, seed=1).sum())
        100000
    """
    fits, wanted = tokens >= 1 and mean > _SHORTEST, f"tokens of at least 1 and a mean above {_SHORTEST}"
    expect(fits, "sample_lengths", wanted, f"{tokens} and {mean}", "Make the row or its documents longer")
    known = kind in ("lognormal", "pareto")
    expect(known, "sample_lengths", "'lognormal' or 'pareto'", repr(kind), "Name one")
    generator, found = np.random.default_rng(seed), np.zeros(0, np.int64)
    while found.sum() < tokens:
        if kind == "lognormal":
            drawn = generator.lognormal(np.log(mean) - 1.5**2 / 2, 1.5, 1024)
        else:
            drawn = (generator.pareto(1.2, 1024) + 1) * mean * 0.2 / 1.2
        found = np.append(found, np.clip(drawn, _SHORTEST, tokens).astype(np.int64))
    ends = np.minimum(np.cumsum(found), tokens)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


def corpus_lengths(tokens: int, seed: int) -> NDArray[np.integer]:
    """Lengths of documents of Python's standard library that fill a row of so many tokens."""
    return np.diff(corpus_offsets(tokens, seed))


def pack(lengths: NDArray[np.integer]) -> Mask:
    """The mask of documents of these lengths packed into one row, causal within each."""
    return causal() & segments(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))


def tokens_of(text: str) -> int:
    """A number of tokens, in units of 1,024 or 1,048,576 where it ends in K or M.

    Example:
        >>> tokens_of("4M"), tokens_of("100")
        (4194304, 100)
    """
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text.strip()[-1:].upper(), 1)
    found = numbers("--tokens", text.strip()[:-1] if unit > 1 else text)
    wanted = "positive numbers with commas between"
    expect(len(found) == 1, "--tokens", wanted, repr(text), "Write it like 4M,16M")
    return unit * found[0]


def command(
    mask: Annotated[
        str, Argument(help='corpus, lognormal or pareto documents, or a mask like "causal"')
    ] = "lognormal",
    tokens: Annotated[str, Option(help="of the row, like 4M; several with commas between")] = "1M",
    ranks: Annotated[str, Option(help="numbers of ranks, with commas between")] = "8,64,512",
    q_heads: Annotated[int, Option(help="query heads")] = 32,
    kv_heads: Annotated[int, Option(help="key heads")] = 8,
    head_dim: Annotated[int, Option(help="elements of a row of q, k and v")] = 128,
    itemsize: Annotated[int, Option(help="bytes of an element")] = 2,
    mean: Annotated[int, Option(help="mean length of documents that are drawn")] = 4096,
    seed: Annotated[int, Option(help="of the documents")] = 0,
    node_size: Annotated[int, Option(help="ranks of a node")] = 8,
    machine: Annotated[Path | None, Option(help="rates of Machine.calibrate(): predicts times")] = None,
    json: Annotated[Path | None, Option(help="write the outcomes to this file")] = None,
) -> None:
    """Predict how strategies compare over many ranks: balance, bytes, memory; times where rates are known."""
    rates = Machine.default() if machine is None else Machine.load(machine)
    console, outcomes = stdout(), []
    sizes = {"heads": (q_heads, kv_heads), "head_dim": head_dim, "itemsize": itemsize}
    for size in (tokens_of(text) for text in tokens.split(",")):
        given = _mask_of(mask, size, mean, seed)
        chosen = [x for count in numbers("--ranks", ranks) for x in setups(count, q_heads, node_size)]
        with progress(console, len(chosen)) as tell:
            told = _told(chosen, tell)
            found = simulate(given, size, told, machine=rates, node_size=node_size, **sizes)
        columns = _COLUMNS if rates is None else (*_COLUMNS, *_TIMES)
        print_table(console, f"{mask}, {size:,} tokens", columns, map(_cells, found))
        outcomes += found
    console.print(_LEGEND, highlight=False)
    said = "No times: no rates were measured (Machine.calibrate())."
    if rates is not None:
        said = f"{_TIMES_LEGEND} Rates: {rates}."
    console.print(said, highlight=False)
    if json is not None:
        write_json(json, {"mask": mask, "machine": rates, "outcomes": outcomes}, indent=1)


def _told(chosen: Iterable[Setup], tell: Callable[..., None]) -> Iterator[Setup]:
    for each in chosen:
        tell(description=f"{each.strategy.ranks} ranks, {each.name}")
        yield each
        tell(advance=1)


def _mask_of(mask: str, tokens: int, mean: int, seed: int) -> Mask:
    if mask == "corpus":
        return pack(corpus_lengths(tokens, seed))
    if mask in ("lognormal", "pareto"):
        return pack(sample_lengths(mask, tokens, mean=mean, seed=seed))
    return parse(mask)


def _cells(found: Outcome) -> list[str]:
    cells = [
        str(found.ranks),
        found.setup,
        f"{found.balance:.3f}",
        f"{found.rows / found.rows_of_ring:.3f}" if found.rows_of_ring else "-",
        bytes_text(found.received),
        bytes_text(found.received_across),
        bytes_text(found.memory),
    ]
    if found.seconds is None:
        return cells
    least = max(found.compute_seconds or 0.0, found.network_seconds or 0.0)
    return [*cells, seconds_text(found.seconds), seconds_text(least), found.bound or "-"]
