"""The command ``attnspan simulate``: context parallelism of many ranks, computed on one machine.

Layouts, fetched keys and bytes are the same as in a real run. Times are predicted if rates were measured. No
rank is started.
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

_SHORTEST = 16  # minimum tokens of a drawn document
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
    "max/mean: visible pairs of the busiest rank over the mean of all ranks. of ring: key rows that the "
    "busiest group fetches, over the key rows of a ring. received, across, memory: bytes that the busiest "
    "rank receives in total, receives from other nodes, and keeps in buffers, for the forward and backward "
    "pass of one layer."
)
_TIMES_LEGEND = (
    "predicted: time of the slowest rank. least: lower bound, the larger of the mean work of a rank at the "
    "full rate and the bytes of the busiest rank at the full bandwidth."
)


@dataclass(frozen=True)
class Setup:
    """A strategy with a method to partition the rows.

    Example:
        >>> Setup(Strategy("ring", 1, 8), "zigzag").name
        'ring, zigzag'
    """

    strategy: Strategy
    method: Method

    @property
    def name(self) -> str:
        """Name for tables and plots, without the number of ranks."""
        members, ring = self.strategy.members, ", ring" * (self.strategy.kind == "ring")
        if self.strategy.groups == 1:
            return "ulysses"
        return f"{self.strategy.kind if members == 1 else f'hybrid({members}, r{ring})'}, {self.method}"


def setups(ranks: int, q_heads: int, node_size: int) -> list[Setup]:
    """List setups to compare: balanced and zigzag exchange, a hybrid, contiguous and zigzag rings, Ulysses.

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
        setup: Name of the setup.
        ranks, tokens: Numbers of ranks and tokens.
        balance: Visible pairs of the busiest rank over the mean of all ranks.
        rows, rows_of_ring: Key rows that the busiest group fetches, and that a ring would fetch.
        received, received_across: Bytes that the busiest rank receives in total and from other nodes, forward
            and backward.
        received_mean: Bytes that the average rank receives.
        memory: Largest buffer memory of a rank, in bytes.
        seconds: Predicted time, or None without measured rates.
        compute_seconds, network_seconds: Lower bounds, see `attnspan.parallel.auto.Prediction`.
        bound: Largest part of the busiest rank's time.
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
        mask: Mask of the packed sequence.
        tokens: Length of the packed sequence.
        chosen: Setups to compare.
        machine: Measured rates. With None, no time is predicted.
        node_size: Ranks per node. Default: the machine's, or all ranks.
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
    """Draw document lengths with a heavy tail until they fill a row. The last document is cut.

    "lognormal" has a standard deviation of 1.5 in the logarithm, so the mean is three times the median.
    "pareto" has a tail of index 1.2, so one document in sixteen is ten times as long as the shortest. Each
    document has at least 16 tokens and at most the whole row.

    Raises:
        OptionError: ``kind`` is unknown, or the sizes do not give a row.

    Example:
        >>> int(sample_lengths("pareto", 100_000, seed=1).sum())
        100000
    """
    fits, wanted = tokens >= 1 and mean > _SHORTEST, f"tokens of at least 1 and a mean above {_SHORTEST}"
    expect(fits, "sample_lengths", wanted, f"{tokens} and {mean}", "Pass more tokens or a larger mean")
    known = kind in ("lognormal", "pareto")
    expect(known, "sample_lengths", "'lognormal' or 'pareto'", repr(kind), "Pass one of these")
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
    """Return lengths of documents from Python's standard library that fill a row of ``tokens`` tokens."""
    return np.diff(corpus_offsets(tokens, seed))


def pack(lengths: NDArray[np.integer]) -> Mask:
    """Build the causal document mask of documents with these lengths, packed into one row."""
    return causal() & segments(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))


def tokens_of(text: str) -> int:
    """Parse a number of tokens. The suffix K means 1,024, and M means 1,048,576.

    Example:
        >>> tokens_of("4M"), tokens_of("100")
        (4194304, 100)
    """
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text.strip()[-1:].upper(), 1)
    found = numbers("--tokens", text.strip()[:-1] if unit > 1 else text)
    wanted = "positive numbers, separated by commas"
    expect(len(found) == 1, "--tokens", wanted, repr(text), "Write it like 4M,16M")
    return unit * found[0]


def command(
    mask: Annotated[
        str, Argument(help='corpus, lognormal or pareto documents, or a mask like "causal"')
    ] = "lognormal",
    tokens: Annotated[str, Option(help="tokens of the packed row, like 4M or 1M,4M")] = "1M",
    ranks: Annotated[str, Option(help="numbers of ranks, separated by commas")] = "8,64,512",
    q_heads: Annotated[int, Option(help="number of query heads")] = 32,
    kv_heads: Annotated[int, Option(help="number of key heads")] = 8,
    head_dim: Annotated[int, Option(help="head dim of q, k and v")] = 128,
    itemsize: Annotated[int, Option(help="bytes per element")] = 2,
    mean: Annotated[int, Option(help="mean length of drawn documents, in tokens")] = 4096,
    seed: Annotated[int, Option(help="random seed of the drawn documents")] = 0,
    node_size: Annotated[int, Option(help="ranks per node")] = 8,
    machine: Annotated[
        Path | None, Option(help="file of rates from Machine.calibrate(), to predict times")
    ] = None,
    json: Annotated[Path | None, Option(help="write the results to this JSON file")] = None,
) -> None:
    """Compare context-parallel strategies over many ranks: balance, bytes, memory and predicted times."""
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
    said = "No predicted times: pass --machine, a file from Machine.calibrate()."
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
