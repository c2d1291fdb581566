"""Devices for the timer: whether calls are asynchronous, how to synchronize, how to empty caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attnspan.errors import DeviceError, expect
from attnspan_lab.bench.environment import caches

__all__ = ["CudaDevice", "Device", "JaxDevice", "cache_evictor", "device_named", "last_level_bytes"]

_UNKNOWN_CACHE = 64 << 20


def _leaves(result: Any) -> Iterator[Any]:
    """Yield the arrays in nested tuples, lists and dicts."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


class Device:
    """Device of a call. This base class is the CPU, where a call returns with its result.

    Attributes:
        name: Name for tables.
        is_asynchronous: Calls return before their results are complete.
        is_ordered: Work runs in the order of the calls, so waiting for the last call waits for all.
    """

    name = "cpu"
    is_asynchronous = False
    is_ordered = True

    def synchronize(self, result: Any) -> None:
        """Wait until the result is complete, or all work of an ordered device."""

    def is_idle(self, result: Any) -> bool:
        """Whether the result is complete, without waiting. False for results on another device."""
        return not any(hasattr(x, "is_ready") or getattr(x, "is_cuda", False) for x in _leaves(result))

    def timer(self) -> _CudaTimer | None:
        """Return a new timer of the device's queue, or None if the device has none."""
        return None


class CudaDevice(Device):
    """torch's current CUDA stream.

    Raises:
        DeviceError: torch sees no CUDA device.
    """

    name = "cuda"
    is_asynchronous = True
    is_ordered = True

    def __init__(self) -> None:
        import torch

        found, wanted = torch.cuda.is_available(), "a CUDA device that torch can use"
        expect(found, "device", wanted, "none", "Measure with --device cpu", error=DeviceError)
        self._cuda = torch.cuda

    def synchronize(self, result: Any) -> None:
        del result
        self._cuda.current_stream().synchronize()

    def is_idle(self, result: Any) -> bool:
        del result
        return bool(self._cuda.current_stream().query())

    def timer(self) -> _CudaTimer:
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


class JaxDevice(Device):
    """A platform of JAX, whose arrays become ready independently."""

    is_asynchronous = True
    is_ordered = False

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self, result: Any) -> None:
        for array in _leaves(result):
            array.block_until_ready()

    def is_idle(self, result: Any) -> bool:
        return all(array.is_ready() for array in _leaves(result))


def device_named(name: str) -> Device:
    """Return the device of a torch call by its name, "cpu" or "cuda".

    Raises:
        DeviceError: The device is unknown or missing.
    """
    kinds: dict[str, Callable[[], Device]] = {"cpu": Device, "cuda": CudaDevice}
    expect(name in kinds, "device", "cpu or cuda", repr(name), "Use one of the two", error=DeviceError)
    return kinds[name]()


def cache_evictor(name: str) -> Callable[[], object]:
    """Make a function that empties a device's caches by writing to twice the last-level cache.

    Args:
        name: "cpu" or "cuda".

    Example:
        >>> evict = cache_evictor("cpu")
        >>> _ = evict()
    """
    if name == "cuda":
        import torch

        size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _UNKNOWN_CACHE
        on_device = torch.zeros(2 * size // 4, dtype=torch.int32, device="cuda")

        def walk() -> None:
            on_device.add_(1)
            torch.cuda.synchronize()

        return walk
    data = np.zeros(2 * last_level_bytes() // 8, np.int64)
    return lambda: np.add(data, 1, out=data)


def last_level_bytes() -> int:
    """Read the size of the first core's largest cache, in bytes. Default: 64 MiB if the size is unknown.

    Example:
        >>> last_level_bytes() > 0
        True
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [int(text.rstrip("KMG")) * units.get(text[-1], 1) for text in caches().values()]
    return max(sizes, default=_UNKNOWN_CACHE)
