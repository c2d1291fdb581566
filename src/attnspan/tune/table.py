"""What tuning gained, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attnspan.tune.entry import Entry

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["config_text", "gains", "line"]


def gains(entries: Iterable[Entry], title: str) -> Table:
    """A table with a row for each key.

    Args:
        entries: What was found.
        title: Of the table.

    Example:
        >>> gains([], "nothing yet").row_count
        0
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("calls", no_wrap=True)
    for name in ("default ms", "tuned ms", "gain", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for entry in entries:
        table.add_row(*_cells(entry))
    return table


def line(entry: Entry) -> str:
    """One entry in a line.

    Args:
        entry: What was found.

    Example:
        >>> from attnspan.kernels.tuned import Key
        >>> key = Key("cpu", "forward", "avx2", "float32", 64, 10, "half")
        >>> line(Entry(key, {"block_q": 0}, "1", {}, reason="no candidate"))
        'cpu forward avx2 float32 D=64 S<=1024 half: default (no candidate)'
    """
    if entry.accepted and entry.ratio is not None:
        ratio = entry.ratio
        found = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] with {config_text(entry.config)}"
    else:
        found = f"default ({entry.reason})"
    return f"{entry.key}: {found}"


def config_text(config: Mapping[str, int]) -> str:
    """The choices of a configuration; what is left to the kernel is left out.

    Args:
        config: Field to value.

    Example:
        >>> config_text({"block_q": 96, "block_k": 0, "threads": 1}), config_text({"block_q": 0})
        ('block_q=96 threads=1', 'default')
    """
    return " ".join(f"{name}={value}" for name, value in config.items() if value) or "default"


def _cells(entry: Entry) -> Iterable[str]:
    key, ratio = entry.key, entry.ratio
    yield f"{key.direction} {key.dtype} D={key.head_dim} S<={2**key.length_bucket} {key.mask_kind}"
    for times in (entry.default, entry.tuned):
        yield "" if times is None else f"{times.median * 1e3:.3g}"
    yield "" if ratio is None else f"{ratio.median:.3f}"
    yield "" if ratio is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    yield config_text(entry.config) if entry.accepted else f"default: {entry.reason.partition(':')[0]}"
