"""The end of a run: its figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attnspan.train.measure import AttentionShare, Comparison, Graphs
from attnspan.train.parity import Parity

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """What a run has come to.

    Args:
        bits_per_byte_start: Held-out score of the untrained model.
        bits_per_byte_end: Held-out score after the last step.
        steps: Steps of the run.
        tokens_per_second: Median over the steps of this process.
        mfu: Median over the steps of this process, 0..1 of the ceiling.
        ceiling: Measured FLOP/s of matrix products in the training dtype.
        dtype: The training dtype.
        compile_seconds: First forward and backward, compilation included; 0 without compilation.
        warm: Graphs compiled and broken during warm-up, or None without compilation.
        later: The same after it: all of these are recompilations.
        share: Time inside the attention operators.
        peak_memory: Largest resident size up to the end of training, bytes.
        seconds: Wall time of this process's part of the run, s.
        comparison: Steps against SDPA's, or None.
        ranks: Which ranks took part, in words.
        parity: Differences from the same steps on one rank, or None for a run of one.

    Example:
        >>> summary = Summary(
        ...     8.0, 2.5, 10, 1e4, 0.3, 1e11, "float32", 9.0, Graphs(1, 0), Graphs(0, 0),
        ...     AttentionShare(0.2, 1.0, 3e10), 2**30, 60.0, None,
        ... )
        >>> dict(summary.rows())["held-out bits per byte"]
        '8.000 at the start, 2.500 at the end'
    """

    bits_per_byte_start: float
    bits_per_byte_end: float
    steps: int
    tokens_per_second: float
    mfu: float
    ceiling: float
    dtype: str
    compile_seconds: float
    warm: Graphs | None
    later: Graphs | None
    share: AttentionShare
    peak_memory: int
    seconds: float
    comparison: Comparison | None
    ranks: str = "1"
    parity: Parity | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Names and texts of the table."""
        rows = [
            (
                "held-out bits per byte",
                f"{self.bits_per_byte_start:.3f} at the start, {self.bits_per_byte_end:.3f} at the end",
            ),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("MFU", f"{self.mfu:.0%} of {self.ceiling / 1e9:,.0f} GFLOP/s ({self.dtype} products, measured)"),
            ("compile", self._compile_text()),
            (
                "time in attention",
                f"{self.share.share:.0%} of a step, at {self.share.flops_per_second / 1e9:,.0f} GFLOP/s",
            ),
            ("peak memory", f"{self.peak_memory / 2**30:.2f} GiB"),
            ("wall time", f"{self.seconds:.0f} s"),
            ("ranks", self.ranks),
        ]
        if self.parity is not None:
            text = (
                f"loss {self.parity.loss:.1e}, gradient norm {self.parity.grad_norm:.1e}: largest relative "
                f"differences, first {self.parity.steps} steps"
            )
            rows.append(("parity with one rank", text))
        if self.comparison is not None:
            low, high = self.comparison.spread
            text = f"{self.comparison.ratio:.2f} (quartiles {low:.2f} to {high:.2f})"
            rows.append(("step time, sdpa / attnspan", text))
            if self.comparison.speedup is not None:
                rows.append(
                    ("step time, one rank / all", f"{self.comparison.speedup:.2f}, with as many threads")
                )
        return rows

    def _compile_text(self) -> str:
        if self.warm is None or self.later is None:
            return "off"
        return (
            f"{self.warm.compiled} graph per block kind, {self.warm.breaks + self.later.breaks} breaks, "
            f"{self.later.compiled} recompiles after warm-up; {self.compile_seconds:.0f} s"
        )

    def show(self, console: Console) -> None:
        """Print the table.

        Args:
            console: Where people read.
        """
        table = Table(title=f"after {self.steps} steps", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in self.rows():
            table.add_row(name, text)
        console.print(table)

    def save(self, path: Path) -> None:
        """Write all figures, the raw step times of the comparison among them, as JSON.

        Args:
            path: File to write.
        """
        figures: dict[str, Any] = asdict(self)
        figures["share"]["flops_per_second"] = self.share.flops_per_second
        if self.comparison is not None:
            ratios = {name: getattr(self.comparison, name) for name in ("ratio", "spread", "speedup")}
            figures["comparison"] |= ratios
        path.write_text(json.dumps(figures, indent=2) + "\n")
