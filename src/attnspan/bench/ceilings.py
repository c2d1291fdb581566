"""What the machine can do at most, measured: products per element type, and reading from memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from attnspan.bench.cells import Ceilings
from attnspan.bench.devices import Device, device_named

__all__ = ["Probe", "measure_ceilings", "native_probe"]

_TORCH_KINDS = {
    "matmul_f32": torch.float32,
    "matmul_bf16": torch.bfloat16,
    "matmul_f16": torch.float16,
}
_SIZES = {"cpu": (128, 512, 2048), "cuda": (4096, 8192)}
_BURSTS = 5
_READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


class Probe(Protocol):
    """Native microbenchmarks, as the CPU kernel has them: register-only loops and streaming reads."""

    def peak_kinds(self) -> Sequence[str]:
        """Kinds that this machine can run, like "fma_f32", "dot_bf16" or "amx_bf16"."""

    def peak(self, kind: str, *, num_threads: int, seconds: float) -> float:
        """FLOP/s of a loop of that instruction."""

    def read_bandwidth(self, size: int, *, num_threads: int, seconds: float) -> float:
        """Bytes/s of reading a buffer of that many bytes."""


def native_probe() -> Probe | None:
    """The microbenchmarks of the compiled module, or None where it is not built.

    Example:
        >>> probe = native_probe()
        >>> probe is None or "fma_f32" in probe.peak_kinds()
        True
    """
    from attnspan.kernels import cpu

    return cpu if cpu.core is not None else None


def measure_ceilings(
    device: str, *, probe: Probe | None = None, threads: int = 1, seconds: float = 1.0
) -> Ceilings:
    """Measure the ceilings of a device.

    Args:
        device: "cpu" or "cuda".
        probe: Native microbenchmarks of the CPU; None measures torch's matrix products instead, a lower
            bound, as on CUDA.
        threads: Threads of the probe.
        seconds: For each ceiling.

    Example:
        >>> measure_ceilings("cpu", seconds=0.01).flops["matmul_f32"] > 0
        True
    """
    if probe is not None and device == "cpu":
        flops, bandwidth = _ask(probe, threads, seconds / _BURSTS)
        notes = dict.fromkeys(flops, f"register-only loop of the instruction, {threads} threads")
        return Ceilings(flops, bandwidth, notes | {"read_bandwidth": "reading 256 MiB in order"})
    where = device_named(device)
    flops = {kind: _matmul(dtype, where, seconds) for kind, dtype in _TORCH_KINDS.items()}
    notes = dict.fromkeys(flops, "best square matrix product of torch: a lower bound of the peak")
    return Ceilings(flops, _read(where, seconds), notes | {"read_bandwidth": "sum over a large tensor"})


def _ask(probe: Probe, threads: int, seconds: float) -> tuple[dict[str, float], float]:
    """The best of several rounds through all kinds: who shares the machine cannot slow down every round."""
    flops = dict.fromkeys(probe.peak_kinds(), 0.0)
    bandwidth = 0.0
    for _ in range(_BURSTS):
        for kind in flops:
            flops[kind] = max(flops[kind], probe.peak(kind, num_threads=threads, seconds=seconds))
        read = probe.read_bandwidth(_READ_BYTES["cpu"], num_threads=threads, seconds=seconds)
        bandwidth = max(bandwidth, read)
    return flops, bandwidth


def _matmul(dtype: torch.dtype, device: Device, seconds: float) -> float:
    """FLOP/s of the best size. A CPU without instructions for a dtype takes minutes for the large ones."""
    best = 0.0
    for size in _SIZES[device.name]:
        factor = torch.randn(size, size, device=device.name).to(dtype)
        flops = 2.0 * size**3
        if best and flops / best > seconds:
            break
        best = max(best, flops / _best(partial(torch.mm, factor, factor), device, seconds / 3))
    return best


def _read(device: Device, seconds: float) -> float:
    data = torch.ones(_READ_BYTES[device.name] // 4, device=device.name)
    return data.numel() * data.element_size() / _best(data.sum, device, seconds)


def _best(call: object, device: Device, seconds: float) -> float:
    """Seconds of the fastest of a burst of calls."""
    assert callable(call)
    device.synchronize(call())
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        timer = device.timer()
        start = time.perf_counter()
        if timer:
            timer.start()
        result = call()
        if timer:
            timer.stop()
        device.synchronize(result)
        stop = time.perf_counter()
        best = min(best, timer.seconds() if timer else stop - start)
        if stop > end:
            return best
