"""A child process that runs a module on a task and reports its findings immediately."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from attnspan_lab.files import to_plain, write_whole

__all__ = ["Child", "received", "telling", "why_ended"]


class Child:
    """A running child process. Close it, for example with ``with``.

    Args:
        module: Module to run. Its only argument is the task as JSON.
        task: Plain data. Its "out" is set to the file for `telling`.
        variables: Environment variables, in addition to the variables of this process.
    """

    def __init__(self, module: str, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attnspan-")
        folder = Path(self._folder.name)
        self._out, self._errors, self._task = (folder / x for x in ("told.jsonl", "errors.txt", "task.json"))
        self._out.touch()
        self._taken = 0
        given = {**task, "out": str(self._out), "task": str(self._task)}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Only the parent handles Ctrl-C, and ends its processes.
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
        """Exit code, or None while the process runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """Return everything that the process wrote to stderr so far."""
        return self._errors.read_text(errors="replace")

    def send(self, task: Mapping[str, Any]) -> None:
        """Give the task to a process that waits in `received`."""
        write_whole(self._task, json.dumps(task))

    def told(self) -> list[dict[str, Any]]:
        """Return the records since the last call. A line that a crash cut short is left out."""
        text = self._out.read_text()
        whole = text[self._taken : text.rfind("\n") + 1]
        self._taken += len(whole)
        found = []
        for line in whole.splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def wait(self, seconds: float) -> int | None:
        """Wait for the exit code. Return None if the process still runs after the timeout."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the process and its own children, such as compilers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the process, and remove its files."""
        self.end()
        self._folder.cleanup()


@contextmanager
def telling(path: str) -> Iterator[Callable[..., None]]:
    """Return a function for the child that reports its keyword arguments to the parent, from any thread."""
    owner, lock = os.getpid(), threading.Lock()
    with Path(path).open("a") as out:

        def tell(**what: Any) -> None:
            if os.getpid() == owner:  # Forked processes report nothing.
                with lock:
                    out.write(json.dumps(to_plain(what)) + "\n")
                    out.flush()

        yield tell


def received(given: dict[str, Any]) -> dict[str, Any]:
    """Wait for the parent's `Child.send`, and return the task. The process ends if its parent ends.

    Args:
        given: The task that the process started with.
    """
    path, parent = Path(given["task"]), os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            os._exit(0)
        time.sleep(0.01)
    task: dict[str, Any] = json.loads(path.read_text())
    return {**given, **task}


def why_ended(code: int, errors: str) -> str:
    """Describe the end of a process: its signal, or its exit code and last line of stderr.

    Example:
        >>> why_ended(-6, ""), why_ended(1, "a\\nValueError: b\\n")
        ('signal SIGABRT', 'exit code 1, ValueError: b')
    """
    lines = errors.strip().splitlines() or [""]
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, {lines[-1][:300]}"
