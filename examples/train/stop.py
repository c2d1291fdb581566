"""Ctrl-C and SIGTERM: the first signal ends and saves the current step, the second one exits immediately."""

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
# A scheduler signals every process, and torchrun passes its signal on: ranks may get one signal twice.
_SAME_SECONDS = 0.5
_HEARD = b"\ntrain: stopping after this step and a checkpoint. Ctrl-C again exits now, without one.\n"


class Stopped(SystemExit):
    """The run was stopped and saved after a signal. The signal determines the exit status."""


class Stop:
    """Whether the run should stop.

    While ``patient``, the first signal waits until the steps call `agreed`. Otherwise a signal raises a
    KeyboardInterrupt immediately.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.patient, self._signal, self._at = ranks, False, 0, 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals, unless they are ignored, as keyboard signals are after nohup."""
        here = threading.current_thread() is threading.main_thread()  # Only the main thread can set handlers.
        heard = [each for each in _SIGNALS if here and signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, self._hear) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _hear(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self._signal and now - self._at < _SAME_SECONDS:
            return
        if self._signal or not self.patient:
            raise KeyboardInterrupt
        self._signal, self._at = number, now
        if self._ranks.is_first:
            os.write(2, _HEARD)  # The signal may have interrupted a print.

    def agreed(self) -> Stopped | None:
        """Return the exception that all ranks raise after saving, if any rank got a signal."""
        asked = [float(self._signal == each) for each in _SIGNALS]
        heard = [each for each, ranks in zip(_SIGNALS, self._ranks.sum(asked), strict=True) if ranks]
        return Stopped(128 + heard[0]) if heard else None
