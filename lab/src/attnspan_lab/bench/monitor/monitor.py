"""The monitor that a training loop calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from attnspan.errors import OptionError, expect
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.bench.monitor.log import RecordLog
from attnspan_lab.bench.monitor.probes import (
    AttentionTotals,
    CudaProbe,
    HostProbe,
    attention_totals,
    compile_seconds,
)
from attnspan_lab.bench.processes import resident_memory
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results

__all__ = ["Monitor"]

T = TypeVar("T")

_PHASES = ("forward", "backward", "optimizer", "communication")


@dataclass
class _Interval:
    """One visit to a phase, possibly within another phase. ``compiling`` seconds of it do not count."""

    phase: str
    inside: str | None
    start: Any
    stop: Any = None
    compiling: float = 0.0


@dataclass
class _Step:
    """Marks and readings of a step, in order. The step begins at the end of the previous step."""

    number: int
    tokens: int
    begin: Any
    attention_before: AttentionTotals | None
    intervals: list[_Interval] = field(default_factory=list)
    end: Any = None
    waited: float = 0.0
    attention: AttentionTotals | None = None
    compiling: float = 0.0
    loss: float | torch.Tensor | None = None
    memory: int | None = None
    device_memory: int | None = None

    def spent(self, probe: HostProbe) -> dict[str, float]:
        """Compute the seconds in each phase, without compilation and inner phases."""
        spent = dict.fromkeys(_PHASES, 0.0)
        for interval in self.intervals:
            working = probe.seconds(interval.start, interval.stop) - interval.compiling
            spent[interval.phase] += working
            if interval.inside is not None:
                spent[interval.inside] -= working
        # A device's events may measure less time than the host spent compiling in the phase.
        return {phase: max(0.0, seconds) for phase, seconds in spent.items()}

    def record(self, seconds: float, spent: dict[str, float], utilisation: float | None) -> MonitorRecord:
        rest = max(0.0, seconds - sum(spent.values()))
        # If the device has queued work, waiting for data costs only the remaining time.
        data = min(self.waited, rest)
        parts = {"data": data, "host": rest - data} | spent
        shares = {name: part / seconds if seconds > 0 else 0.0 for name, part in parts.items()}
        return MonitorRecord(
            step=self.number,
            seconds=seconds,
            tokens=self.tokens,
            phases=PhaseShares(**shares),
            attention_seconds=None if self.attention is None else self.attention.seconds,
            attention_flops=None if self.attention is None else self.attention.flops,
            compile_seconds=self.compiling,
            memory=self.memory,
            device_memory=self.device_memory,
            utilisation=utilisation,
            loss=None if self.loss is None else float(self.loss),
        )


class Monitor:
    """Watches the steps of a training. It takes well under 1 % of the time and does not change the steps.

    A step lasts from the end of the previous step to its own end. The shares of phases, data and host
    therefore add up to 1. Time inside attention comes from counters of the operators, which need no profiler
    and also count in compiled graphs.

    Args:
        log_dir: Folder of ``monitor.jsonl``, ``monitor.json`` and ``tensorboard/monitor``. The first step
            creates it.
        ceiling: Measured peak FLOP/s to compare attention with, or None. A faster step raises it.
        device: Device of the model: "cpu" or a CUDA device. Events time the phases of a CUDA device without
            synchronization.
        every: Number of steps between two sets of TensorBoard scalars, which are means over these steps.
        save_seconds: Seconds between two writes of ``monitor.json``.
        attention: Returns the totals of the attention operators so far, or None if there are none.
        probe: Marks moments, and reads utilisation and memory. Default: the device's own probe.

    Raises:
        OptionError: A step or phase begins at a wrong place, a phase is unknown, or an option is out of
            range.

    Example:
        >>> import tempfile
        >>> from attnspan import causal
        >>> from attnspan.torch import attention
        >>> x = torch.randn(1, 1, 8, 16, requires_grad=True)
        >>> with Monitor(Path(tempfile.mkdtemp()), ceiling=1e11) as monitor:
        ...     for batch in monitor.data([x, x]):
        ...         with monitor.step(tokens=8):
        ...             with monitor.phase("forward"):
        ...                 loss = attention(batch, batch, batch, mask=causal()).sum()
        ...             with monitor.phase("backward"):
        ...                 loss.backward()
        ...             monitor.loss(loss)
        >>> [record.step for record in monitor.results().monitor]
        [1, 2]
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        ceiling: float | None = None,
        device: str | torch.device = "cpu",
        every: int = 10,
        save_seconds: float = 60.0,
        attention: Callable[[], AttentionTotals | None] = attention_totals,
        probe: HostProbe | None = None,
    ) -> None:
        expect(every >= 1, "every", "1 or more", every, "Pass a larger number")
        positive = ceiling is None or ceiling > 0
        expect(positive, "ceiling", "FLOP/s above 0, or None", str(ceiling), "Measure it")
        self._folder, self._ceiling, self._every, self._save_seconds = log_dir, ceiling, every, save_seconds
        self._attention = attention
        device = torch.device(device)
        remedy = "Pass your own probe for other devices"
        expect(device.type in ("cpu", "cuda") or probe, "device", "cpu or cuda", str(device), remedy)
        self._probe = probe or (CudaProbe(device) if device.type == "cuda" else HostProbe())
        self._environment = describe_environment(device.type)
        self._environment["utilisation"] = self._probe.utilisation_source
        self._log: RecordLog | None = None
        self._step: _Step | None = None
        self._phases: list[_Interval] = []
        self._pending: deque[_Step] = deque()
        self._last = 0
        self._closed = False
        self._first_evaluation: float | None = None
        self._own_seconds = self._seconds = 0.0
        # Begins at the end of the last step. None before the first step.
        self._begin: object | None = None
        self._compiled_before = 0.0
        self._waited = 0.0

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and measure the time to get each batch as the wait for data.

        Raises:
            OptionError: A batch is requested within a phase, whose time would include the wait.
        """
        iterator = iter(batches)
        while True:
            self._watch()
            if self._phases:
                raise _misplaced("data", "a request for a batch outside of all phases", self._phases)
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - start
            yield batch

    @contextmanager
    def step(self, *, number: int | None = None, tokens: int = 0) -> Iterator[None]:
        """Measure the step in a ``with`` block. A step that raises is not recorded.

        Args:
            number: Number of the step, from 1. None continues to count. At the first step, existing records
                of earlier steps in the folder stay, and records of this and later steps are removed.
            tokens: Number of tokens that the step trains on, including padding.

        Raises:
            OptionError: The step is within another step, comes after `close`, or its number is not above the
                last number.
        """
        self._start_step(number, tokens)
        try:
            yield
        except BaseException:
            self._step, self._phases = None, []
            raise
        self._end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a step in a ``with`` block. Time outside all phases counts as the host's.

        Args:
            name: "forward", "backward", "optimizer" or "communication". A step may enter a phase several
                times. Communication may lie within another phase, and its time is then subtracted from that
                phase.

        Raises:
            OptionError: The phase is outside of a step or within another phase, or its name is unknown.
        """
        interval = self._start_phase(name)
        compiled = compile_seconds()
        try:
            yield
        finally:
            # An exception ended the step earlier, and the loop caught it.
            if self._phases and self._phases[-1] is interval:
                self._phases.pop()
                interval.stop = self._probe.mark()
                interval.compiling = compile_seconds() - compiled

    def loss(self, loss: float | torch.Tensor) -> None:
        """Record the loss of the current step. A tensor is read after the device has finished the step.

        Raises:
            OptionError: The call is outside of a step.
        """
        if self._step is None:
            remedy = "Call it within monitor.step()"
            raise OptionError(
                "loss", expected="a loss within a step", got="a loss outside of a step", remedy=remedy
            )
        self._step.loss = loss.detach().clone() if isinstance(loss, torch.Tensor) else loss

    def held_out(self, loss: float) -> None:
        """Record the loss on held-out data after the last step, or before the first one.

        Raises:
            OptionError: The call is within a step, or after `close`.
        """
        got = "a closed monitor" if self._closed else "a call within a step"
        outside = not self._closed and self._step is None
        expect(outside, "held_out", "an open monitor between steps", got, "Evaluate after the step")
        if self._log is None:
            self._first_evaluation = float(loss)
        else:
            self._log.evaluate(Evaluation(self._last, float(loss)))

    def results(self) -> Results:
        """The records so far, with the environment, as results for `attnspan_lab.report`."""
        return Results(environment=self._environment) if self._log is None else self._log.results()

    @property
    def overhead(self) -> float:
        """Share of the watched time that the monitor's own work took, from 0 to 1."""
        return self._own_seconds / self._seconds if self._seconds else 0.0

    def save(self) -> None:
        """Write ``monitor.json`` now."""
        if self._log is not None:
            self._log.save()

    def close(self) -> None:
        """Wait for the device, write everything, and close the files. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._pending:
            self._probe.wait(self._pending[-1].end)
        self._write_known()
        if self._log is not None:
            self._log.close()

    def _watch(self) -> None:
        """Begin to watch, unless the monitor already watches."""
        if self._begin is None:
            self._begin, self._compiled_before = self._probe.mark(), compile_seconds()
            self._probe.start()

    def _start_step(self, number: int | None, tokens: int) -> None:
        expect(not self._closed, "step", "an open monitor", "a closed monitor", "Create a new one")
        inside = f"a step within step {self._step.number}" if self._step else ""
        expect(self._step is None, "step", "no step within another", inside, "End the other step first")
        number = self._last + 1 if number is None else number
        wanted, remedy = "a number above {}, the last one", "Increase the number, or leave it out"
        expect(number > self._last, "step", wanted, number, remedy, self._last)
        self._watch()
        if self._log is None:
            how = {"every": self._every, "save_seconds": self._save_seconds}
            self._log = RecordLog(self._folder, taken=number - 1, environment=self._environment, **how)  # type: ignore[arg-type]
            if self._first_evaluation is not None:
                self._log.evaluate(Evaluation(number - 1, self._first_evaluation))
        self._step = _Step(number, tokens, self._begin, self._attention())

    def _end_step(self) -> None:
        start = time.perf_counter()
        step, self._step = self._step, None
        assert step is not None
        # The mark at the end of a step is also the begin of the next step.
        step.end = self._begin = self._probe.mark()
        self._last = step.number
        after = self._attention()
        if after is not None and step.attention_before is not None:
            step.attention = after - step.attention_before
        compiled = compile_seconds()
        step.compiling, self._compiled_before = compiled - self._compiled_before, compiled
        step.waited, self._waited = self._waited, 0.0
        step.memory, step.device_memory = resident_memory(), self._probe.device_memory()
        self._pending.append(step)
        self._write_known()
        self._own_seconds += time.perf_counter() - start

    def _write_known(self) -> None:
        """Write the steps that the device has finished. On the CPU, these are all steps."""
        while self._pending and self._probe.known(self._pending[0].end):
            step = self._pending.popleft()
            seconds, spent = self._probe.seconds(step.begin, step.end), step.spent(self._probe)
            self._seconds += seconds
            record = step.record(seconds, spent, self._probe.utilisation(seconds, sum(spent.values())))
            if self._ceiling is not None:
                self._ceiling = max(self._ceiling, record.attention_flops_per_second or 0.0)
            assert self._log is not None
            self._log.write(replace(record, ceiling=self._ceiling))

    def _start_phase(self, name: str) -> _Interval:
        expect(name in _PHASES, "phase", " or ".join(_PHASES), repr(name), "Use one of these")
        got, remedy = f"{name!r} outside of a step", "Enter the phase within monitor.step()"
        if self._step is None:
            raise OptionError("phase", expected="a phase within a step", got=got, remedy=remedy)
        if self._phases and (name != "communication" or len(self._phases) > 1):
            raise _misplaced("phase", f"{name!r} outside of all other phases", self._phases)
        inside = self._phases[-1].phase if self._phases else None
        interval = _Interval(name, inside, self._probe.mark())
        self._step.intervals.append(interval)
        self._phases.append(interval)
        return interval


def _misplaced(what: str, expected: str, phases: list[_Interval]) -> OptionError:
    remedy = "End that phase first. Only communication may lie within another phase"
    return OptionError(what, expected=expected, got=f"it within {phases[-1].phase!r}", remedy=remedy)
