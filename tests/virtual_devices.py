"""Four devices for tests of JAX: a process of its own, whose CPU is four devices, runs jobs by name.

    def job(scale: float) -> float: ...                # in a module that tests can import
    devices().run("jax_jobs:job", 0.5)

How many devices there are is decided before JAX starts, so the tests' own process cannot have them. A job
that raises fails the test with its traceback.
"""

import atexit
import functools
import importlib
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

#: Devices of the process.
DEVICES = 4
#: Seconds that a job may take; a loaded machine is no failure.
JOB_SECONDS = 300.0

_processes = multiprocessing.get_context("spawn")


class JobError(AssertionError):
    """A job failed; the message holds what it raised."""


class Devices:
    """The process."""

    def __init__(self) -> None:
        self._pipe, there = _processes.Pipe()
        self._worker = _processes.Process(target=_serve, args=(there, list(sys.path)), daemon=True)
        self._worker.start()
        there.close()

    def run(self, job: str, *arguments: Any) -> Any:
        """The result of ``module:function``."""
        self._pipe.send((job, arguments))
        try:
            if not self._pipe.poll(JOB_SECONDS):
                raise EOFError
            kind, value = self._pipe.recv()
        except EOFError:
            self.close()
            raise JobError(f"{job}{arguments}: no answer, or the process ended") from None
        if kind == "raised":
            raise JobError(f"{job}{arguments}:\n{value}")
        return value

    def close(self) -> None:
        """End it; the next test gets another one."""
        devices.cache_clear()
        self._worker.kill()
        self._worker.join()


@functools.cache
def devices() -> Devices:
    """The process that all tests share."""
    found = Devices()
    atexit.register(found.close)
    return found


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    while True:
        job, arguments = pipe.recv()
        try:
            module, _, name = job.partition(":")
            pipe.send(("done", getattr(importlib.import_module(module), name)(*arguments)))
        except Exception:
            pipe.send(("raised", traceback.format_exc()))
