"""Progress of a run: a bar or lines, TensorBoard and a log while it runs, and a table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from torch._dynamo.utils import counters
from torch.utils.tensorboard import SummaryWriter

from attnspan_lab.bench.monitor.lines import MetricsLog
from attnspan_lab.console import bytes_text, percent, progress, rate_text, seconds_text
from train.config import TrainConfig
from train.run import Run

__all__ = ["Summary", "graph_counts", "in_words", "introduce", "reporter", "say", "suggest"]

_LINE_SECONDS = 10.0
_SMOOTHING = 0.9


@contextmanager
def reporter(console: Console, run: Run) -> Iterator[Callable[[dict[str, float]], None]]:
    """Make a function that shows and records a step: "step", and the values of `StepResult`.

    It shows a bar or lines, and writes TensorBoard's scalars and ``metrics.jsonl``. On other ranks than the
    first, it does nothing.
    """
    if not run.ranks.is_first:
        yield lambda _: None
        return
    first, last, shown = run.done + 1, run.config.steps, -math.inf
    smooth: dict[str, float] = {}
    log = MetricsLog(run.folder / "metrics.jsonl", run.done)
    board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first)
    board.add_scalar("held_out/bits_per_byte", run.start_score, 0)

    def update(figures: dict[str, float]) -> None:
        nonlocal shown
        step = int(figures["step"])
        log.write(figures)
        for name, value in figures.items():
            if name != "step":
                board.add_scalar(f"train/{name}", value, step)
                smooth[name] = _SMOOTHING * smooth.get(name, value) + (1 - _SMOOTHING) * value
        speed = f"{smooth['tokens_per_second']:,.0f} tok/s  {rate_text(smooth['gflops'] * 1e9)}"
        text = f"loss {smooth['loss']:.3f}  {speed}  {bytes_text(smooth['memory'])}"
        due = time.monotonic() - shown > _LINE_SECONDS or step in (first, last)
        shown = time.monotonic() if due else shown
        line = f"step {step:>{len(str(last))}}/{last}  {text}" if due and not console.is_terminal else ""
        left = timedelta(seconds=round((last - step) * smooth["seconds"]))
        tell(line, completed=step, description=f"{text}  {left} left")

    with closing(board), closing(log), progress(console, last) as tell:
        yield update


def graph_counts() -> tuple[int, int]:
    """Count the graphs that torch has compiled in this process, and the graph breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


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
    graphs: int | None  # compiled until the end of warm-up; None without compilation
    breaks: int  # graph breaks
    recompiles: int  # graphs that were compiled after warm-up
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
        if self.graphs is not None:
            counts = f"{self.graphs} graph for all blocks, {self.breaks} breaks, {self.recompiles} recompiles"
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


def say(console: Console, name: str, text: str) -> None:
    """Print a line with a name before it."""
    console.print(f"[bold]{name:>6}[/bold]  {escape(text)}", soft_wrap=True, highlight=False)


def in_words(config: TrainConfig) -> str:
    """Describe the ranks of a job."""
    if config.world == 1:
        return "1 rank"
    shared = f", {config.strategy}" if config.cp > 1 else ""
    return f"{config.world} ranks: cp {config.cp}{shared}, dp {config.dp}{', sharded' * config.fsdp}"


def introduce(run: Run, console: Console) -> None:
    """Print what is about to run."""
    config, data, kind = run.config, run.data, run.ranks.device.type
    size = f"{len(data.train):,} documents, {decimal(data.train.num_bytes)}, {len(data.held_out)} held out"
    weights = sum(parameter.numel() for parameter in run.stepper.model.parameters())
    shape = f"{config.layers} blocks, {config.heads} heads on {config.kv_heads}, rows of {config.seq_len:,}"
    where = f"{config.threads} threads{' of each rank' * (config.world > 1)}" if kind == "cpu" else kind
    say(console, "data", f"{data.source}: {size}")
    say(console, "model", f"{weights / 1e6:.2f} M parameters, {shape}")
    say(console, "how", f"{config.attention} attention, {config.dtype}, {where}, {in_words(config)}")
    say(console, "run", str(run.folder) + (f", resumed at step {run.done}" if run.done else ""))
    say(console, "", f"{'compiling, ' * config.compile}scoring{', timing steps' * (not config.steps)} ...")


def suggest(run: Run, console: Console) -> None:
    """Suggest what to try next."""
    job, folder = "python examples/train", shlex.quote(str(run.folder))
    say(console, "next", f'{job}/sample.py {folder} "import "   more text of this model')
    say(console, "", f"{job} --resume {run.named} --steps {2 * run.config.steps}   train on")
    if run.config.world == 1:
        say(console, "", f"{job} --cp 2   two ranks share each row; --fsdp shards the model")
    if run.config.data is None:
        say(console, "", f"{job} --data FOLDER   your own text, .jsonl or .parquet")
