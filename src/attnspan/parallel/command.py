"""The command ``attnspan simulate``: sizes in, a table of strategies out."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..masks import parse
from ..spans import Spans
from .choose import Call
from .machine import Machine
from .simulate import Outcome, pack, sample_lengths, setups, simulate

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Lengths", "command", "execute", "lowered", "tokens_of"]

#: Lengths of documents that fill a row of so many tokens, given them and a seed.
Lengths = Callable[[int, int], NDArray[np.integer]]

_WIDTH = 120
_LEGEND = (
    "of the busiest rank, forward and backward: bytes received, time predicted, and two lower bounds, "
    "the mean of all ranks' pairs at the full rate and its own bytes at the full bandwidth"
)
_SYNTHETIC = ("lognormal", "pareto")


def command(corpus: Lengths) -> Callable[..., None]:
    """The command as a function with an option for each of its sizes.

    Args:
        corpus: Packs the documents that the training job reads; a room above this one knows them.
    """
    import typer

    def simulate(
        mask: Annotated[
            str, typer.Argument(help='corpus, lognormal or pareto documents, or a mask like "causal"')
        ] = "lognormal",
        tokens: Annotated[str, typer.Option(help="of the row, like 4M; several with commas between")] = "1M",
        ranks: Annotated[str, typer.Option(help="numbers of ranks, with commas between")] = "8,64,512",
        q_heads: Annotated[int, typer.Option(help="query heads")] = 32,
        kv_heads: Annotated[int, typer.Option(help="key heads")] = 8,
        head_dim: Annotated[int, typer.Option(help="elements of a row of q, k and v")] = 128,
        itemsize: Annotated[int, typer.Option(help="bytes of an element")] = 2,
        mean: Annotated[int, typer.Option(help="mean length of documents that are drawn")] = 4096,
        seed: Annotated[int, typer.Option(help="of the documents")] = 0,
        node_size: Annotated[int | None, typer.Option(help="ranks of a node; default: the machine's")] = None,
        machine: Annotated[
            Path | None, typer.Option(help="figures of Machine.calibrate(); default: assumed ones")
        ] = None,
        json: Annotated[Path | None, typer.Option(help="write the outcomes to this file")] = None,
    ) -> None:
        figures = Machine.default() if machine is None else Machine.load(machine)
        execute(
            mask,
            tokens=[tokens_of(text) for text in tokens.split(",")],
            ranks=[_count(text) for text in ranks.split(",")],
            call=Call(q_heads, kv_heads, head_dim, head_dim, itemsize),
            machine=figures if node_size is None else figures.with_nodes(node_size),
            lower=lambda size: lowered(mask, size, corpus=corpus, mean=mean, seed=seed),
            json_path=json,
        )

    return simulate


def execute(
    mask: str,
    *,
    tokens: Iterable[int],
    ranks: Iterable[int],
    call: Call,
    machine: Machine,
    lower: Callable[[int], Spans],
    json_path: Path | None = None,
) -> list[Outcome]:
    """Run the command: a table for each number of tokens.

    Args:
        mask: What the tables are called.
        tokens, ranks: To go through.
        call: Sizes of a call.
        machine: Figures for the predictions.
        lower: The mask of a row of so many tokens.
        json_path: Where the outcomes go too; None: nowhere.

    Example:
        >>> from attnspan import causal
        >>> found = execute("causal", tokens=[64], ranks=[2], call=Call(2, 1), machine=Machine(),
        ...                 lower=lambda size: causal().spans(size, size))  # doctest: +ELLIPSIS
        causal, 64 tokens...
        >>> len(found)
        5
    """
    from rich.console import Console

    console = Console(soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH  # of a table that is read in a file
    ranks, outcomes = list(ranks), []
    for size in tokens:
        spans = lower(size)
        found = []
        for count in ranks:
            found += simulate(spans, call, machine, setups(count, call.q_heads, machine.node_size))
        console.print(_table(f"{mask}, {size:,} tokens", found), soft_wrap=False)
        outcomes += found
    console.print(_LEGEND, highlight=False, soft_wrap=False)
    console.print(f"predicted with {machine}", highlight=False, soft_wrap=False)
    if json_path is not None:
        _write(json_path, mask, machine, outcomes)
    return outcomes


def lowered(mask: str, tokens: int, *, corpus: Lengths, mean: int, seed: int) -> Spans:
    """The mask of a row.

    Args:
        mask: "corpus", "lognormal", "pareto", or an expression that `attnspan.parse` reads.
        tokens: Of the row.
        corpus: Packs the documents of "corpus".
        mean, seed: Of the documents that are drawn.

    Raises:
        OptionError: There is no such mask.

    Example:
        >>> lowered("causal", 4, corpus=lambda tokens, seed: np.array([tokens]), mean=64, seed=0)
        Spans(B=1, H=1, q_len=4, k_len=4, R=1)
    """
    if mask == "corpus":
        return pack(corpus(tokens, seed))
    if mask in _SYNTHETIC:
        return pack(sample_lengths(mask, tokens, mean=mean, seed=seed))
    return parse(mask).spans(tokens, tokens).lowered


def tokens_of(text: str) -> int:
    """A number of tokens, in units of 1,024 or 1,048,576 where it ends in K or M.

    Raises:
        OptionError: It is no positive number.

    Example:
        >>> tokens_of("4M"), tokens_of("100")
        (4194304, 100)
    """
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text.strip()[-1:].upper(), 1)
    return unit * _count(text.strip()[:-1] if unit > 1 else text)


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise OptionError(
            "attnspan simulate",
            expected="positive numbers, like 8 or, for tokens, 4M",
            got=repr(text),
            remedy="Separate several by commas",
        )
    return int(text)


def _table(title: str, outcomes: Iterable[Outcome]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("ranks", justify="right")
    table.add_column("strategy, rows", no_wrap=True)
    for name in ("max/mean", "rows / ring", "GB", "GB across", "ms", "pairs ms", "bytes ms", "bound by"):
        table.add_column(name, justify="left" if name == "bound by" else "right")
    last = None
    for each in outcomes:
        if last not in (None, each.ranks):
            table.add_section()
        table.add_row(str(each.ranks) if each.ranks != last else "", *_cells(each))
        last = each.ranks
    return table


def _cells(found: Outcome) -> Iterable[str]:
    yield found.setup
    yield f"{found.balance:.3f}"
    yield f"{found.rows / found.rows_of_ring:.3f}" if found.rows_of_ring else ""
    yield f"{found.received / 1e9:.3g}"
    yield f"{found.received_across / 1e9:.3g}"
    yield f"{found.seconds * 1e3:.4g}"
    yield f"{found.compute_seconds * 1e3:.4g}"
    yield f"{found.network_seconds * 1e3:.4g}"
    yield found.bound


def _write(path: Path, mask: str, machine: Machine, outcomes: Iterable[Outcome]) -> None:
    value: dict[str, Any] = {"mask": mask, "machine": asdict(machine)}
    value["outcomes"] = [asdict(each) for each in outcomes]
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise OptionError(
            str(path),
            expected="a place that can be written",
            got=error.strerror or str(error),
            remedy="Name another file",
        ) from None
