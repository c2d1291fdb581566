"""What a route is to the study: something that can be opened cold, and called.

Nothing here imports a framework: routes are also taken in environments that lack one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnspan.bench.devices import Device
from attnspan.bench.timing import Meter, Subject, first_call

__all__ = ["Opened", "Way", "cold_loop"]


def _as_tuple(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else (result,)


@dataclass(frozen=True)
class Opened:
    """A route to one job, nothing of it traced nor compiled.

    Args:
        call: Computes the job once: the output, or the output and the gradients of q, k and v.
        device: Where it runs.
        arrays: Brings a result into (B, H, S, D) arrays of one kind for all routes, for the comparison.
        compiler: Seconds that the route's compiler has taken in this process so far; None: it has none.
        retraces: Seconds of Python that each call so far took to build its graph; None: it is built once.
        note: What runs in truth.

    Example:
        >>> from attnspan.bench.devices import HostDevice
        >>> Opened(lambda: 7, HostDevice()).arrays(7)
        (7,)
    """

    call: Callable[[], Any]
    device: Device
    arrays: Callable[[Any], Sequence[Any]] = _as_tuple
    compiler: Callable[[], float] | None = None
    retraces: Sequence[float] | None = None
    note: str = ""


class Way(Protocol):
    """A way from Python to a kernel.

    Attributes:
        name: Unique among the routes.
        what: The same in a few words.
    """

    name: str
    what: str

    def refuses(self, job: Any) -> str | None:
        """Return None, or why it cannot do the job."""

    def open(self, job: Any) -> Opened:
        """Make a new function, so that its first call begins from nothing."""


def cold_loop(
    opened: Opened, meter: Meter, calls: int, name: str = "route"
) -> tuple[Any, tuple[float, ...], float | None]:
    """Call a cold route some times in a row, waiting after each call: what a hasty benchmark does.

    Args:
        opened: A route that was not called before.
        meter: The clocks.
        calls: Number of calls.
        name: Of the route.

    Returns:
        The last result, the seconds of each call, and what the compiler took (None where there is none).

    Example:
        >>> from attnspan.bench.devices import HostDevice
        >>> result, seconds, compiling = cold_loop(Opened(lambda: 7, HostDevice()), Meter(), 3)
        >>> result, len(seconds), compiling
        (7, 3, None)
    """
    subject = Subject(name, opened.call, opened.device)
    before = opened.compiler() if opened.compiler else 0.0
    seconds: list[float] = []
    result = None
    for _ in range(calls):
        result, each = first_call(subject, meter)
        seconds.append(each)
    return result, tuple(seconds), opened.compiler() - before if opened.compiler else None
