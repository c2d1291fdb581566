"""A child process that runs a module on a task, and tells its parent what it finds at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from attnspan_lab.files import to_plain

__all__ = ["Child", "telling", "why_ended"]


class Child:
    """A process that was started; to be closed, as by ``with``.

    Args:
        module: It gets the task, in JSON, as its only argument.
        task: Plain data; its "out" will be the file that `telling` takes.
        variables: Of its environment, in addition to those of this process.
    """

    def __init__(self, module: str, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attnspan-")
        self._out, self._errors = (Path(self._folder.name) / x for x in ("told.jsonl", "errors.txt"))
        self._out.touch()
        self._taken = 0
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps({**task, "out": str(self._out)})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Ctrl-C is for the parent, which ends its processes.
                start_new_session=True,
                env={**os.environ, **variables},
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """All that it wrote to its stderr so far."""
        return self._errors.read_text(errors="replace")

    def told(self) -> list[dict[str, Any]]:
        """Records that it told since the last look, in whole lines; one that a crash cut into is left out."""
        text = self._out.read_text()
        whole = text[self._taken : text.rfind("\n") + 1]
        self._taken += len(whole)
        found = []
        for line in whole.splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def wait(self, seconds: float) -> int | None:
        """Exit code, or None if it still runs after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the process and those that it started, such as compilers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the process, and remove its files."""
        self.end()
        self._folder.cleanup()


@contextmanager
def telling(path: str) -> Iterator[Callable[..., None]]:
    """In the child: a function that tells the parent what it is given by name, from any thread."""
    owner, lock = os.getpid(), threading.Lock()
    with Path(path).open("a") as out:

        def tell(**what: Any) -> None:
            if os.getpid() == owner:  # A fork says nothing.
                with lock:
                    out.write(json.dumps(to_plain(what)) + "\n")
                    out.flush()

        yield tell


def why_ended(code: int, errors: str) -> str:
    """The signal that ended a process, or its exit code and last words.

    Example:
        >>> why_ended(-6, ""), why_ended(1, "a\\nValueError: b\\n")
        ('signal SIGABRT', 'exit code 1, ValueError: b')
    """
    lines = errors.strip().splitlines() or [""]
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, {lines[-1][:300]}"
