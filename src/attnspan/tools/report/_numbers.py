"""Figures as texts: units that keep three digits, a dash where there is none."""

from __future__ import annotations

import html
import re

from attnspan.tools.bench.results import Ratio

__all__ = [
    "NONE",
    "TIMES",
    "bandwidth",
    "bytes_text",
    "length_text",
    "percent",
    "plain",
    "rate",
    "ratio_text",
    "rounded",
    "seconds_text",
    "times",
]

NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_SIZES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_RATES = (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0))


def _scaled(value: float | None, units: tuple[tuple[str, float], ...]) -> str:
    if value is None:
        return NONE
    unit, size = next((entry for entry in units if abs(value) >= entry[1]), units[-1])
    return f"{_digits(value / size)} {unit}"


def _digits(value: float) -> str:
    """Three digits, and no more of them behind the point than that leaves."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 or size == 0 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def rounded(text: str) -> str:
    """A figure without zeros behind its point, for a tick: "2.00 ns" becomes "2 ns"."""
    return re.sub(r"\.0+(?=\D|$)", "", text)


def seconds_text(value: float | None) -> str:
    """A time: "1.50 ms"."""
    return _scaled(value, _TIMES)


def bytes_text(value: float | None) -> str:
    """A size: "12.0 MiB"."""
    return _scaled(value, _SIZES)


def rate(value: float | None) -> str:
    """FLOP/s: "210 GFLOP/s"."""
    return _scaled(value, _RATES)


def bandwidth(value: float | None) -> str:
    """Bytes per second: "18.5 GB/s"."""
    return rate(value).replace("FLOP/s", "B/s")


def percent(value: float | None) -> str:
    """A share: "87 %"."""
    return NONE if value is None else f"{value * 100:.0f} %" if value >= 0.0995 else f"{value * 100:.1f} %"


def times(value: float | None) -> str:
    """A ratio: "1.42×"."""
    return NONE if value is None else f"{_digits(value)}{TIMES}"


def ratio_text(ratio: Ratio | None) -> str:
    """A ratio with its interval: "1.42× (1.40 to 1.45)"."""
    if ratio is None:
        return NONE
    return f"{times(ratio.median)} ({_digits(ratio.low)} to {_digits(ratio.high)})"


def length_text(value: int) -> str:
    """A length: "512", "4K"."""
    return f"{value // 1024}K" if value % 1024 == 0 and value else f"{value}"


def plain(text: str) -> str:
    """Text for a chart, which takes tags for markup."""
    return html.escape(text, quote=False)
