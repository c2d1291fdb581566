"""What a run says: while it runs, a bar or a line now and then, TensorBoard and a log; at its end, a table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch._dynamo.utils import counters
from torch.utils.tensorboard import SummaryWriter

from attnspan.errors import expect
from attnspan.train.config import CheckpointError

__all__ = ["Graphs", "MetricsLog", "Reporter", "Summary"]

_LINE_SECONDS = 10.0
_SMOOTHING = 0.9


class MetricsLog:
    """One JSON line per step, continued after a resume as if nothing had happened.

    Args:
        path: File; made when missing.
        step: Steps that are already taken; later lines are of a run that was cut off, and removed.

    Raises:
        CheckpointError: A line of the file is damaged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> for step in (0, 1, 1):
        ...     with MetricsLog(path, step) as log:
        ...         log.write({"step": step + 1})
        >>> path.read_text()
        '{"step": 1}\\n{"step": 2}\\n'
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = []
        if path.is_file():
            # The last line may be cut short: then it has no newline.
            whole = path.read_bytes().split(b"\n")[:-1]
            kept = [line for number, line in enumerate(whole, 1) if _step(line, number, path) <= step]
        draft = path.with_suffix(".tmp")
        draft.write_bytes(b"".join(line + b"\n" for line in kept))
        draft.replace(path)
        self._file = path.open("a")

    def write(self, figures: dict[str, Any]) -> None:
        """Append JSON values, "step" among them, and hand them to the system: a killed process keeps them."""
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _step(line: bytes, number: int, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        step = None
    expect(
        isinstance(step, int),
        "checkpoint",
        f"line {number} of {path} to be a JSON object with a step",
        repr(line[:80]),
        "Remove that line, or move the file away; only the log of past steps is lost",
        error=CheckpointError,
    )
    return int(step)


class Reporter:
    """Shows and records the figures of a run.

    Args:
        console: Where people read.
        folder: The run's folder: TensorBoard events and ``metrics.jsonl`` go there.
        step: Steps already taken.
        steps: Steps in all.
    """

    def __init__(self, console: Console, folder: Path, step: int, steps: int) -> None:
        self._console, self._step, self._steps = console, step, steps
        self._log = MetricsLog(folder / "metrics.jsonl", step)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._smooth: dict[str, float] = {}
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=step, text="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self.board.close()
        self._log.close()

    def update(self, figures: dict[str, float]) -> None:
        """Show and record one step.

        Args:
            figures: "step" and what `attnspan.train.train.Step` has.
        """
        step = int(figures["step"])
        self._log.write(figures)
        for name, value in figures.items():
            if name != "step":
                self.board.add_scalar(f"train/{name}", value, step)
                before = self._smooth.get(name, value)
                self._smooth[name] = _SMOOTHING * before + (1 - _SMOOTHING) * value
        now = self._smooth
        text = (
            f"loss {now['loss']:.3f}  {now['tokens_per_second']:,.0f} tok/s  "
            f"{now['gflops']:,.0f} GFLOP/s  {now['memory'] / 2**30:.1f} GiB"
        )
        self._bar.update(self._task, completed=step, text=text)
        due = time.monotonic() - self._last_line > _LINE_SECONDS or step in (self._step + 1, self._steps)
        if not self._console.is_terminal and due:
            self._last_line = time.monotonic()
            self._console.print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}", soft_wrap=True)


class Graphs(NamedTuple):
    """What torch's compiler has done in this process: graphs compiled, and graph breaks."""

    compiled: int
    breaks: int

    @classmethod
    def now(cls) -> Graphs:
        """Read torch's counters."""
        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))

    def since(self, earlier: Graphs) -> Graphs:
        """What has been added."""
        return Graphs(self.compiled - earlier.compiled, self.breaks - earlier.breaks)


@dataclass(frozen=True)
class Summary:
    """What a run has come to.

    Args:
        bits_per_byte_start: Held-out score of the untrained model.
        bits_per_byte_end: Held-out score after the last step.
        steps: Steps of the run.
        tokens_per_second: Median over the steps of this process.
        flops_per_second: The same of useful work, attention's visible pairs only.
        fastest: Largest FLOP/s of a step.
        ceiling: FLOP/s of each burst that measured what the cores can do; zeros where nobody knows.
        compile_seconds: First forward and backward, compilation included; 0 without compilation.
        warm: Graphs compiled and broken during warm-up, or None without compilation.
        later: The same after it: all of these are recompilations.
        peak_memory: Largest memory, the sum over ranks, bytes.
        seconds: Wall time of this process's part of the run, s.
        ranks: Which ranks took part, in words.
        text: Sampled at the end.
    """

    bits_per_byte_start: float
    bits_per_byte_end: float
    steps: int
    tokens_per_second: float
    flops_per_second: float
    fastest: float
    ceiling: list[float]
    compile_seconds: float
    warm: Graphs | None
    later: Graphs | None
    peak_memory: float
    seconds: float
    ranks: str
    text: str = ""

    @property
    def mfu(self) -> float | None:
        """Median share of the ceiling, 0..1; None where there is none that every step of the run keeps."""
        highest = max(self.ceiling)
        return self.flops_per_second / highest if self.fastest <= highest and highest else None

    def rows(self) -> list[tuple[str, str]]:
        """Names and texts of the table."""
        score = f"{self.bits_per_byte_start:.3f} at the start, {self.bits_per_byte_end:.3f} at the end"
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.flops_per_second / 1e9:,.0f} GFLOP/s"
        rows = [("held-out bits per byte", score), ("speed", speed)]
        if self.mfu is not None:
            low, high = min(self.ceiling) / 1e9, max(self.ceiling) / 1e9
            bursts = f"bursts of multiply-adds on registers: {low:,.0f} to {high:,.0f}"
            rows.append(("MFU", f"{self.mfu:.0%} of {high:,.0f} GFLOP/s ({bursts})"))
        if self.warm is not None and self.later is not None:
            breaks = self.warm.breaks + self.later.breaks
            counts = f"{self.warm.compiled} graph for all blocks, {breaks} breaks, {self.later.compiled} recompiles"
            rows.append(("compile", f"{counts}; {self.compile_seconds:.0f} s"))
        rows += [
            ("peak memory", f"{self.peak_memory / 2**30:.2f} GiB"),
            ("wall time", f"{self.seconds:.0f} s"),
        ]
        return [*rows, ("ranks", self.ranks)]

    def show(self, console: Console) -> None:
        """Print the table and the text."""
        table = Table(title=f"after {self.steps} steps", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in self.rows():
            table.add_row(name, text)
        console.print(table)
        if self.text:
            console.print("[bold]text of the model[/bold], from its last weights:")
            console.print(self.text, markup=False, highlight=False, soft_wrap=True)

    def save(self, path: Path) -> None:
        """Write all figures as JSON."""
        path.write_text(json.dumps(asdict(self) | {"mfu": self.mfu}, indent=2) + "\n")
