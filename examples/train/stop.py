"""Ctrl-C and SIGTERM: the first lets a step end and be saved, the second ends the run at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from train.parallelize import Ranks

__all__ = ["Stop", "Stopped"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A scheduler signals every process, and torchrun passes its signal on to the ranks: they hear one wish twice.
_SAME_SECONDS = 0.5
_HEARD = b"\ntrain: the step ends, then a checkpoint is written. Ctrl-C again ends at once, without it.\n"


class Stopped(SystemExit):
    """The run was stopped and saved, as a signal asked; the exit status is the one of that signal."""


class Stop:
    """Whether the run is to stop. Outside of `patient` a signal raises a KeyboardInterrupt at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._patient, self._signal, self._at = ranks, False, 0, 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals, unless they are ignored, as those of the keyboard are after nohup."""
        here = threading.current_thread() is threading.main_thread()  # Others can set no handler.
        heard = [each for each in _SIGNALS if here and signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, self._hear) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Surround steps that ask `agreed`: the first signal waits for that."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def _hear(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self._signal and now - self._at < _SAME_SECONDS:
            return
        if self._signal or not self._patient:
            raise KeyboardInterrupt
        self._signal, self._at = number, now
        if self._ranks.is_first:
            os.write(2, _HEARD)  # A print may be what the signal has interrupted.

    def agreed(self) -> Stopped | None:
        """Exception that all ranks raise once they have saved, if any rank was asked to stop."""
        asked = [float(self._signal == each) for each in _SIGNALS]
        heard = [each for each, ranks in zip(_SIGNALS, self._ranks.sum(asked), strict=True) if ranks]
        return Stopped(128 + heard[0]) if heard else None
