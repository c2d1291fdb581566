"""What a run says while it runs: a bar in a terminal, a line now and then elsewhere, TensorBoard, a log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from attnspan.train.errors import CheckpointError
from attnspan.train.step import StepResult

__all__ = ["MetricsLog", "Reporter", "metrics"]

_LINE_SECONDS = 10.0
_SMOOTHING = 0.9


def metrics(step: int, result: StepResult, ceiling: float) -> dict[str, float]:
    """Figures of one step.

    Args:
        step: Number of the step, from 1.
        result: What it did.
        ceiling: Measured FLOP/s of matrix products, which MFU refers to.

    Returns:
        loss in nats per token, tokens_per_second, attention_gflops (useful attention work per second of the
        whole step), mfu in 0..1, peak_memory in bytes, and what else the result says; of all ranks together.

    Example:
        >>> from attnspan.train.model import StepFlops
        >>> flops = StepFlops(3e9, 1e9)
        >>> result = StepResult(2.0, 1.0, 1e-3, tokens=100, seconds=0.5, flops=flops, memory=2**30)
        >>> figures = metrics(1, result, ceiling=16e9)
        >>> figures["tokens_per_second"], figures["attention_gflops"], figures["mfu"]
        (200.0, 2.0, 0.5)
    """
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "attention_gflops": result.flops.attention / result.seconds / 1e9,
        "mfu": result.flops.total / result.seconds / ceiling,
        "peak_memory": result.memory,
    }


class MetricsLog:
    """One JSON line per step, continued after a resume as if nothing had happened.

    Args:
        path: File; made when missing.
        step: Steps that are already taken; later lines are of a run that was cut off, and removed.

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
        """Append a line and hand it to the system, so that a killed process does not lose it.

        Args:
            figures: JSON values; must have "step".
        """
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
        figures = json.loads(line)
    except ValueError:
        figures = None
    step = figures.get("step") if isinstance(figures, dict) else None
    if not isinstance(step, int):
        raise CheckpointError(
            expected=f"line {number} of {path} to be a JSON object with a step",
            got=repr(line[:80]),
            remedy="remove that line, or move the file away; only the log of past steps is lost",
        )
    return step


class Reporter:
    """Shows and records the figures of a run.

    Args:
        console: Where people read.
        folder: The run's folder: TensorBoard events and ``metrics.jsonl`` go there.
        step: Steps already taken.
        steps: Steps in all.

    Example:
        >>> import tempfile
        >>> from attnspan.train.model import StepFlops
        >>> result = StepResult(2.0, 1.0, 1e-3, 100, 0.5, StepFlops(3e9, 1e9), 2**30)
        >>> figures = metrics(1, result, ceiling=16e9)
        >>> with Reporter(Console(width=100), Path(tempfile.mkdtemp()), step=0, steps=1) as reporter:
        ...     reporter.update(figures)  # doctest: +ELLIPSIS
        step 1/1  loss 2.000  200 tok/s  attention 2 GFLOP/s  MFU 50%  ... GiB
    """

    def __init__(self, console: Console, folder: Path, step: int, steps: int) -> None:
        self._console, self._step, self._steps = console, step, steps
        self._log = MetricsLog(folder / "metrics.jsonl", step)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
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
        self._board.close()
        self._log.close()

    def update(self, figures: dict[str, float]) -> None:
        """Show and record one step.

        Args:
            figures: What `metrics` returned.
        """
        step = int(figures["step"])
        self._log.write(figures)
        for name, value in figures.items():
            if name != "step":
                self._board.add_scalar(f"train/{name}", value, step)
                before = self._smooth.get(name, value)
                self._smooth[name] = _SMOOTHING * before + (1 - _SMOOTHING) * value
        text = self._text()
        self._bar.update(self._task, completed=step, text=text)
        due = time.monotonic() - self._last_line > _LINE_SECONDS or step in (self._step + 1, self._steps)
        if not self._console.is_terminal and due:
            self._last_line = time.monotonic()
            self._console.print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}", soft_wrap=True)

    def scalar(self, name: str, value: float, step: int) -> None:
        """Record a figure for TensorBoard alone.

        Args:
            name: Tag, "group/name".
            value: The figure.
            step: Steps taken.
        """
        self._board.add_scalar(name, value, step)

    def _text(self) -> str:
        now = self._smooth
        return (
            f"loss {now['loss']:.3f}  {now['tokens_per_second']:,.0f} tok/s  "
            f"attention {now['attention_gflops']:.0f} GFLOP/s  MFU {now['mfu']:.0%}  "
            f"{now['peak_memory'] / 2**30:.1f} GiB"
        )
