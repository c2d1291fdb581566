"""Four devices for tests of JAX: a process of its own, whose CPU is four devices, runs the bodies of tests.

    @on_devices
    def test_of_meshes() -> None: ...                  # the body runs there

How many devices there are is decided before JAX starts, so the tests' own process cannot have them. A body
that raises fails the test with its traceback.
"""

import atexit
import functools
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import few_collections  # noqa: F401
import sending

#: Devices of the process.
DEVICES = 4
#: Seconds that a body may take; a loaded machine is no failure.
SECONDS = 300.0

_processes = multiprocessing.get_context("spawn")


class DevicesError(AssertionError):
    """A body failed; the message holds what it raised."""


class Devices:
    """The process."""

    def __init__(self) -> None:
        self._pipe, there = _processes.Pipe()
        self._worker = _processes.Process(target=_serve, args=(there, list(sys.path)), daemon=True)
        self._worker.start()
        there.close()

    def run(self, body: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function."""
        __tracebackhide__ = True
        self._pipe.send_bytes(sending.dumps((body, arguments, named)))
        try:
            if not self._pipe.poll(SECONDS):
                raise EOFError
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.close()
            raise DevicesError(f"{body.__name__}: no answer, or the process ended") from None
        if kind == "raised":
            raise DevicesError(f"{body.__name__}\n{value}")
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


def on_devices(body: Callable[..., Any]) -> Callable[..., Any]:
    """Let the body of a function, mostly of a test, run where there are four devices."""

    @functools.wraps(body)
    def there(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        return devices().run(body, *arguments, **named)

    return there


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    sending.explain_asserts()
    while True:
        pipe.send_bytes(sending.answer(pipe.recv_bytes()))
