"""Progress of a run: a bar or lines, TensorBoard and a log while it runs, and a table at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch._dynamo.utils import counters
from torch.utils.tensorboard import SummaryWriter

from attnspan_lab.bench.monitor.lines import MetricsLog
from attnspan_lab.console import bytes_text, percent, rate_text, seconds_text

__all__ = ["Graphs", "MetricsLog", "Reporter", "Summary"]

_LINE_SECONDS = 10.0
_SMOOTHING = 0.9


class Reporter:
    """Shows the measurements of a run, and records them in TensorBoard and ``metrics.jsonl``."""

    def __init__(self, console: Console, folder: Path, step: int, steps: int) -> None:
        self._console, self._step, self._steps = console, step, steps
        self._log = MetricsLog(folder / "metrics.jsonl", step)
        self._smooth: dict[str, float] = {}
        self._last_line = 0.0
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        text, wide = TextColumn("{task.fields[text]}"), BarColumn(bar_width=None)
        columns = TextColumn("[bold]train"), wide, MofNCompleteColumn(), text, TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("train", total=steps, completed=step, text="")
        self._bar.start()

    def close(self) -> None:
        """Close the bar and the files."""
        self._bar.stop()
        self.board.close()
        self._log.close()

    def update(self, figures: dict[str, float]) -> None:
        """Show and record one step: "step", and the values of `StepResult.figures`."""
        step, now = int(figures["step"]), self._smooth
        self._log.write(figures)
        for name, value in figures.items():
            if name != "step":
                self.board.add_scalar(f"train/{name}", value, step)
                now[name] = _SMOOTHING * now.get(name, value) + (1 - _SMOOTHING) * value
        speed = f"{now['tokens_per_second']:,.0f} tok/s  {rate_text(now['gflops'] * 1e9)}"
        text = f"loss {now['loss']:.3f}  {speed}  {bytes_text(now['memory'])}"
        self._bar.update(self._task, completed=step, text=text)
        due = time.monotonic() - self._last_line > _LINE_SECONDS or step in (self._step + 1, self._steps)
        if not self._console.is_terminal and due:
            self._last_line = time.monotonic()
            self._console.print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}", soft_wrap=True)


class Graphs(NamedTuple):
    """Counts of torch's compiler: compiled graphs, and graph breaks."""

    compiled: int
    breaks: int

    @classmethod
    def since(cls, compiled: int = 0, breaks: int = 0) -> Graphs:
        """Read the counts of this process, minus the given counts."""
        now = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return cls(now[0] - compiled, now[1] - breaks)


@dataclass(frozen=True)
class Summary:
    """Summary of a run."""

    bits_per_byte_start: float  # held-out score before training
    bits_per_byte_end: float  # held-out score after the last step
    steps: int
    tokens_per_second: float  # median over the steps of this process
    flops_per_second: float  # median FLOP/s of useful work
    fastest: float  # largest FLOP/s of a step
    ceiling: list[float]  # FLOP/s of each burst that measured the peak of the cores; zeros if unknown
    compile_seconds: float  # first forward and backward, including compilation
    warm: Graphs | None  # until the end of warm-up; None without compilation
    later: Graphs | None  # after warm-up: all of these are recompilations
    peak_memory: float  # sum over ranks, in bytes
    seconds: float  # wall time of this process
    ranks: str  # as text
    text: str = ""  # sampled at the end

    @property
    def mfu(self) -> float | None:
        """Median share of the ceiling, from 0 to 1. None without a ceiling that every step respects."""
        highest = max(self.ceiling)
        return self.flops_per_second / highest if 0 < self.fastest <= highest else None

    def rows(self) -> list[tuple[str, str]]:
        """List the names and texts of the table."""
        score = f"{self.bits_per_byte_start:.3f} at the start, {self.bits_per_byte_end:.3f} at the end"
        rows = [("held-out bits per byte", score)]
        if self.tokens_per_second:  # A run that is resumed at its end takes no step.
            speed = f"{self.tokens_per_second:,.0f} tokens/s, {rate_text(self.flops_per_second)}"
            rows.append(("speed", speed))
        if self.mfu is not None:
            low, high = rate_text(min(self.ceiling)), rate_text(max(self.ceiling))
            bursts = f"bursts of multiply-adds on registers: {low} to {high}"
            rows.append(("MFU", f"{percent(self.mfu)} of {high} ({bursts})"))
        if self.warm is not None and self.later is not None:
            breaks, again = self.warm.breaks + self.later.breaks, self.later.compiled
            counts = f"{self.warm.compiled} graph for all blocks, {breaks} breaks, {again} recompiles"
            rows.append(("compile", f"{counts}; {seconds_text(self.compile_seconds)}"))
        rows.append(("peak memory", bytes_text(self.peak_memory)))
        return [*rows, ("wall time", f"{self.seconds:.0f} s"), ("ranks", self.ranks)]

    def show(self, console: Console) -> None:
        """Print the table and the text."""
        table = Table(title=f"after {self.steps} steps", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in self.rows():
            table.add_row(name, text)
        console.print(table)
        if self.text:  # A model's text must not send control characters to the terminal.
            clean = (char if char.isprintable() or char == "\n" else "\N{MIDDLE DOT}" for char in self.text)
            shown = "".join(clean)
            console.print(f"text of the model:\n{shown}", markup=False, highlight=False, soft_wrap=True)
