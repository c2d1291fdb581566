"""Trials of a timed region: the same statements again, warm, with and without waiting after each call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from attnspan_lab.bench.devices import CudaDevice, Device, JaxDevice
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.bench.timing import LEAST_ROUNDS, Budget, Subject, interleave
from attnspan_lab.doctor.patched import patched
from attnspan_lab.doctor.timing.body import Body, CannotRepeatError
from attnspan_lab.doctor.timing.clocks import page_faults

_WARM = 2  # Calls before the first sample.
_IN_A_ROW = 4  # Least number of calls before one wait.


@dataclass(frozen=True)
class Replay:
    """Times of a call, measured again.

    Args:
        each: Seconds of a call if each call waits for its result.
        in_a_row: Seconds of a call if several calls run before one wait. None on a synchronous device.
        without_inputs: Seconds of a call whose inputs were made before. None if it makes no inputs.
        slowest: Longest time of the whole region in a few repetitions, in seconds.
        faults: Number of page faults of the whole region.
        returned: Share of a region's time after which its statements return. Less than 1 if the statements
            do not wait for their results.
        results: Number of arrays that a call returns.
    """

    each: Interval
    in_a_row: Interval | None
    without_inputs: Interval | None
    slowest: float
    faults: float
    returned: float
    results: int


def replay(body: Body, seconds: float, limit: float) -> Replay:
    """Run the statements of a timed region again, after two warm calls.

    Args:
        body: The statements.
        seconds: Time to spend on each way of measuring.
        limit: Longest time to spend in all. Slow calls that do not fit are not measured.

    Raises:
        CannotRepeatError: The statements cannot run again, or take too long.
    """
    once = body.once()
    call = once.repeat()
    results, cost = _warm(call)
    if cost * LEAST_ROUNDS * 4 > limit:
        raise CannotRepeatError(
            f"a call takes {cost:.1f} s, too long for {LEAST_ROUNDS} rounds in {limit:.0f} s"
        )
    device = _device_of(results)
    calls = [call, once.empty().repeat()]
    if once.makers:
        calls.append(once.repeat(makes_once=True))
    for other in calls[1:]:
        _warm(other)
    subjects = [Subject(str(i), _without_waits(x, device), device) for i, x in enumerate(calls)]
    in_a_row = _IN_A_ROW if device.is_asynchronous else 1
    runs = interleave(subjects, Budget(seconds, sample_seconds=0.002, calls=in_a_row))

    def times(index: int, name: str) -> Interval | None:
        """Return the times of a call without the time that the repetition itself takes."""
        own, empty = (getattr(runs[i], name) for i in (index, 1))
        return None if own is None else Interval.of([max(x - empty.median, 0.0) for x in own.samples])

    each = times(0, "execute")
    assert each is not None
    return Replay(
        each,
        times(0, "pipelined"),
        times(2, "execute") if len(runs) > 2 else None,
        *_region(body, device, seconds),
        len(results),
    )


def _warm(call: Callable[[], list[Any]]) -> tuple[list[Any], float]:
    """Make warm calls. Return the last arrays and the seconds of the last call."""
    results, took = list[Any](), 0.0
    for _ in range(_WARM):
        start = time.perf_counter()
        results = arrays(call())
        _device_of(results).synchronize(results)
        took = time.perf_counter() - start
    return results, took


def arrays(value: Any) -> list[Any]:
    """List the arrays of torch, JAX and NumPy in a value.

    Example:
        >>> import numpy as np
        >>> len(arrays([1, {"a": np.ones(3)}, (np.ones(2),)]))
        2
    """
    if "jax" in sys.modules:
        value = sys.modules["jax"].tree.leaves(value)
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    found = []
    for one in values:
        if hasattr(one, "dtype") and hasattr(one, "shape"):
            found.append(one)
        elif isinstance(one, list | tuple | dict):
            found += arrays(one)
    return found


def _device_of(results: list[Any]) -> Device:
    of_jax = next((x for x in results if hasattr(x, "is_ready")), None)
    if of_jax is not None:
        return _Jax(next(iter(of_jax.devices())).platform, type(of_jax))
    return CudaDevice() if any(getattr(x, "is_cuda", False) for x in results) else Device()


class _Jax(JaxDevice):
    """JAX, also where a call returns arrays of other kinds."""

    def __init__(self, name: str, array: type) -> None:
        super().__init__(name)
        self.array = array

    def synchronize(self, result: Any) -> None:
        super().synchronize(_of_jax(result))

    def is_idle(self, result: Any) -> bool:
        return super().is_idle(_of_jax(result))


def _of_jax(result: Any) -> list[Any]:
    return [x for x in arrays(result) if hasattr(x, "is_ready") and not x.is_deleted()]


def _without_waits(call: Callable[[], list[Any]], device: Device) -> Callable[[], list[Any]]:
    """Make a call whose own waits do nothing, so that the timer decides when to wait."""
    if not isinstance(device, CudaDevice | _Jax):
        return call

    def free() -> list[Any]:
        with _no_waits(device):
            return arrays(call())

    return free


@contextmanager
def _no_waits(device: CudaDevice | _Jax) -> Iterator[None]:
    with ExitStack() as stack:
        if isinstance(device, CudaDevice):
            stack.enter_context(patched(sys.modules["torch"].cuda, synchronize=lambda *_: None))
        else:
            for owner in (sys.modules["jax"], device.array):
                stack.enter_context(patched(owner, block_until_ready=lambda x: x))
        yield


def _region(body: Body, device: Device, seconds: float) -> tuple[float, float, float]:
    """Run the whole region three to nine times. Return `slowest`, `faults` and `returned` of `Replay`."""
    shares, times, call = list[float](), list[float](), body.repeat()
    before = page_faults()
    while len(times) < 3 or (len(times) < LEAST_ROUNDS and sum(times) < seconds):
        start = time.perf_counter()
        results = call()
        returned = time.perf_counter()
        device.synchronize(arrays(results))
        times.append(time.perf_counter() - start)
        shares.append((returned - start) / times[-1] if device.is_asynchronous else 1.0)
    return max(times), (page_faults() - before) / len(times), median(shares)
