"""What a clock must know of a device: whether calls return early, and how to wait for their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from attnspan.errors import DeviceError

__all__ = ["CudaDevice", "Device", "EventTimer", "HostDevice", "JaxDevice", "device_named", "leaves"]


class EventTimer(Protocol):
    """A clock that the device itself reads."""

    def start(self) -> None:
        """Mark the beginning in the device's queue."""

    def stop(self) -> None:
        """Mark the end in the device's queue."""

    def seconds(self) -> float:
        """Time between the marks; both must have been passed."""


class Device(Protocol):
    """Where a call runs.

    Attributes:
        name: For people.
        is_asynchronous: Calls return before their results are there.
        is_ordered: Work is done in the order of the calls, so that waiting for the last waits for all.
    """

    name: str
    is_asynchronous: bool
    is_ordered: bool

    def synchronize(self, result: Any) -> None:
        """Wait until the result, or all work of an ordered device, is done."""

    def is_idle(self, result: Any) -> bool:
        """Whether it is done, without waiting."""

    def timer(self) -> EventTimer | None:
        """A new timer in the device's queue, or None where it has none."""


def leaves(result: Any) -> Iterator[Any]:
    """The arrays of a result of nested tuples, lists and dicts.

    Args:
        result: What a call returned.

    Example:
        >>> list(leaves((1, [2, {"a": 3}])))
        [1, 2, 3]
    """
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        for item in result:
            yield from leaves(item)
    else:
        yield result


class HostDevice:
    """The processor that runs Python: a call returns with its result.

    Example:
        >>> HostDevice().is_idle(1.0)
        True
    """

    name = "cpu"
    is_asynchronous = False
    is_ordered = True

    def synchronize(self, result: Any) -> None:
        """Nothing to wait for.

        Args:
            result: Unused.
        """

    def is_idle(self, result: Any) -> bool:
        """False for results of a device that works on its own: they would be timed too early.

        Args:
            result: What the call returned.
        """
        return not any(hasattr(x, "is_ready") or getattr(x, "is_cuda", False) for x in leaves(result))

    def timer(self) -> None:
        """The host's clock is the only one."""


class CudaDevice:
    """torch's current CUDA stream.

    Raises:
        DeviceError: torch sees no CUDA device.

    Example:
        >>> CudaDevice.is_asynchronous
        True
    """

    name = "cuda"
    is_asynchronous = True
    is_ordered = True

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(
                "device",
                expected="a CUDA device that torch can use",
                got="none",
                remedy="Measure with --device cpu",
            )
        self._cuda = torch.cuda

    def synchronize(self, result: Any) -> None:
        """Wait for the stream.

        Args:
            result: Unused: the stream is ordered.
        """
        del result
        self._cuda.current_stream().synchronize()

    def is_idle(self, result: Any) -> bool:
        """Whether the stream has nothing left to do.

        Args:
            result: Unused.
        """
        del result
        return bool(self._cuda.current_stream().query())

    def timer(self) -> EventTimer:
        """A pair of events in the stream."""
        return _CudaTimer(self._cuda)


class _CudaTimer:
    def __init__(self, cuda: Any) -> None:
        self._marks = [cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        self._marks[0].record()

    def stop(self) -> None:
        self._marks[1].record()

    def seconds(self) -> float:
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3


class JaxDevice:
    """JAX arrays, which become ready on their own, on any platform.

    Args:
        name: JAX's platform.

    Example:
        >>> JaxDevice("cpu").is_ordered
        False
    """

    is_asynchronous = True
    is_ordered = False

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self, result: Any) -> None:
        """Wait for the arrays.

        Args:
            result: JAX arrays, nested as they may be.
        """
        for array in leaves(result):
            array.block_until_ready()

    def is_idle(self, result: Any) -> bool:
        """Whether the arrays are there.

        Args:
            result: JAX arrays.
        """
        return all(array.is_ready() for array in leaves(result))

    def timer(self) -> None:
        """JAX has none."""


def device_named(name: str) -> Device:
    """The device of a torch call.

    Args:
        name: "cpu" or "cuda".

    Raises:
        DeviceError: The device is unknown or missing.

    Example:
        >>> device_named("cpu").is_asynchronous
        False
    """
    if name == "cpu":
        return HostDevice()
    if name == "cuda":
        return CudaDevice()
    raise DeviceError("device", expected="cpu or cuda", got=repr(name), remedy="Name one of the two")
