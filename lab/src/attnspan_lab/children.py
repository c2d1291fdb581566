"""Child processes that run a module on a task and report their findings immediately."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attnspan_lab.files import to_plain

__all__ = ["Child", "Loaded", "forked_task", "telling", "why_ended"]

_LOOK = 0.01  # Seconds between two looks at files of another process.


class Child:
    """A running child process. Close it, for example with ``with``.

    Args:
        module: Module to run. Its only argument is the task as JSON.
        task: Plain data. Its "out" is set to the file for `telling`.
        variables: Environment variables, in addition to the variables of this process.
    """

    def __init__(self, module: str, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        given = self._prepared(task)
        with self._errors.open("wb") as errors:
            self._process: subprocess.Popen[bytes] | _Forked = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Only the parent handles Ctrl-C, and ends its processes.
                start_new_session=True,
                env={**os.environ, **variables},
            )

    def _prepared(self, task: Mapping[str, Any], parent: Path | None = None) -> dict[str, Any]:
        """Make the files of the process, and return the task with their names."""
        self._folder = tempfile.TemporaryDirectory(prefix="attnspan-", dir=parent)
        self.folder, self._taken = Path(self._folder.name), 0
        self._out, self._errors = self.folder / "told.jsonl", self.folder / "errors.txt"
        self._out.touch()
        self._errors.touch()
        return {**task, "out": str(self._out), "folder": str(self.folder)}

    def __enter__(self) -> Self:
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
        if (pid := self._process.pid) is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End the process, and remove its files."""
        self.end()
        self._folder.cleanup()


class Loaded(Child):
    """A child process that loads a module, and forks a process for each task. These need no time to load it.

    The module calls `forked_task` when it is loaded. Close all forked processes before this one.
    """

    def fork(self, task: Mapping[str, Any], loads: Sequence[str] = ()) -> Child:
        """Start a process for a task.

        Args:
            task: Plain data.
            loads: Names of more modules to load before the fork.
        """
        return _Fork(self, task, loads)


class _Fork(Child):
    """A process that `Loaded` forks."""

    def __init__(self, loaded: Loaded, task: Mapping[str, Any], loads: Sequence[str]) -> None:
        given = self._prepared(task, loaded.folder)
        self._loaded = loaded
        self._process = _Forked(self.folder, loaded)
        _put(self.folder / "task.json", json.dumps({**given, "loads": list(loads)}))

    @property
    def errors(self) -> str:
        """Return everything that the process wrote to stderr so far, or the process that has to fork it."""
        return super().errors if self._process.pid is not None else self._loaded.errors


class _Forked:
    """The part of `subprocess.Popen` that `Child` uses, for a process that another process forks."""

    def __init__(self, folder: Path, loaded: Loaded) -> None:
        self._pid, self._code, self._loaded = folder / "pid", folder / "code", loaded

    @property
    def pid(self) -> int | None:
        """Its id and the id of its group, or None before the fork."""
        return int(self._pid.read_text()) if self._pid.exists() else None

    def poll(self) -> int | None:
        # If the loading process ends, it could not load, or it was killed.
        return int(self._code.read_text()) if self._code.exists() else self._loaded.code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            time.sleep(_LOOK)
        return code


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


def forked_task(folder: str) -> dict[str, Any]:
    """Fork a process for each task of `Loaded.fork`, and return the task there, with the id of its "parent".

    The calling process ends when its parent ends.

    Args:
        folder: Folder of this process.
    """
    own, parent, running = os.getpid(), os.getppid(), dict[int, Path]()
    while os.getppid() == parent:
        for path in Path(folder).glob("*/task.json"):
            task: dict[str, Any] = json.loads(path.read_text())
            path.unlink()
            for name in task["loads"]:
                with suppress(Exception):  # The process that needs the module reports it.
                    importlib.import_module(name)
            if (pid := os.fork()) == 0:
                _enter(path.parent, own)
                return {**task, "parent": own}
            os.setpgid(pid, pid)
            _put(path.parent / "pid", str(pid))
            running[pid] = path.parent / "code"
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                _put(running.pop(pid), str(os.waitstatus_to_exitcode(status)))
        time.sleep(_LOOK)
    os._exit(0)


def _put(path: Path, text: str) -> None:
    """Write a file atomically. If its folder is gone, the process that waits for the file was closed."""
    draft = path.with_suffix(".part")
    draft.write_text(text)
    draft.replace(path)


def _enter(folder: Path, parent: int) -> None:
    """Begin a forked process, which waits until its parent knows its id: the parent may have to end it."""
    while not (folder / "pid").exists():
        if os.getppid() != parent:
            os._exit(0)
        time.sleep(_LOOK / 2)
    os.dup2(os.open(folder / "errors.txt", os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())


def why_ended(code: int, errors: str) -> str:
    """Describe the end of a process: its signal, or its exit code and last line of stderr.

    Example:
        >>> why_ended(-6, ""), why_ended(1, "a\\nValueError: b\\n")
        ('signal SIGABRT', 'exit code 1, ValueError: b')
    """
    lines = errors.strip().splitlines() or [""]
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, {lines[-1][:300]}"
