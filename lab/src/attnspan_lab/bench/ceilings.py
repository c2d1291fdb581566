"""Measured ceilings of the machine: FLOP/s of products per element type, and read bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from attnspan_lab.bench.cells import Ceilings
from attnspan_lab.bench.devices import Device, device_named

__all__ = ["Probe", "measure_ceilings", "native_probe"]

_TORCH_KINDS = {"matmul_f32": torch.float32, "matmul_bf16": torch.bfloat16, "matmul_f16": torch.float16}
_SIZES = {"cpu": (128, 512, 2048), "cuda": (4096, 8192)}
_ROUNDS = 9
_READ = "read_bandwidth"
_READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


class Probe(Protocol):
    """Microbenchmarks of the CPU kernel's module: register-only loops and streaming reads."""

    def peak_kinds(self) -> Sequence[str]:
        """List the kinds that this machine can run, such as "fma_f32", "dot_bf16" or "amx_bf16"."""

    def peak(self, kind: str, *, num_threads: int, seconds: float) -> float:
        """Measure the FLOP/s of a loop of this instruction."""

    def read_bandwidth(self, size: int, *, num_threads: int, seconds: float) -> float:
        """Measure the bytes/s of reading a buffer of this size in bytes."""


def native_probe() -> Probe | None:
    """Return the microbenchmarks of the compiled module, or None if it is not built."""
    from attnspan.kernels import cpu

    return cpu if cpu.core is not None else None


def measure_ceilings(
    device: str, *, probe: Probe | None = None, threads: int = 1, seconds: float = 1.0
) -> Ceilings:
    """Measure the ceilings of a device, in nine rounds over all ceilings.

    The best round counts, because other processes rarely slow down every round. The spread of the rounds is
    stored. `Ceilings.lifted` raises a ceiling that a run exceeds.

    Args:
        device: "cpu" or "cuda".
        probe: Native microbenchmarks of the CPU. With None, as on CUDA, torch's matrix products are measured
            instead, which give a lower bound.
        threads: Number of threads of the probe.
        seconds: Time for each ceiling.
    """
    share = seconds / _ROUNDS
    if probe is not None and device == "cpu":
        note = f"register-only loop of the instruction, {threads} threads"
        read_note = "reading 256 MiB in order"
        calls: dict[str, Callable[[], float]] = {
            kind: partial(probe.peak, kind, num_threads=threads, seconds=share) for kind in probe.peak_kinds()
        }
        calls[_READ] = partial(probe.read_bandwidth, _READ_BYTES["cpu"], num_threads=threads, seconds=share)
    else:
        note = "best square matrix product of torch: a lower bound of the peak"
        read_note = "sum over a large tensor"
        where = device_named(device)
        calls = {kind: _matmul(dtype, where, share) for kind, dtype in _TORCH_KINDS.items()}
        data = torch.ones(_READ_BYTES[device] // 4, device=device)
        calls[_READ] = _rate(data.sum, data.numel() * data.element_size(), where)
    found: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(_ROUNDS):
        for kind, call in calls.items():
            found[kind].append(call())
    best = {kind: max(rates) for kind, rates in found.items()}
    spread = {kind: (best[kind] - min(rates)) / best[kind] for kind, rates in found.items()}
    flops = {kind: rate for kind, rate in best.items() if kind != _READ}
    notes = dict.fromkeys(flops, note) | {_READ: read_note}
    return Ceilings(flops, best[_READ], notes, spread)


def _matmul(dtype: torch.dtype, device: Device, seconds: float) -> Callable[[], float]:
    """Measure the FLOP/s of the best size.

    Large sizes take minutes on CPUs without instructions for a dtype.
    """
    best: tuple[float, Callable[[], float]] | None = None
    for size in _SIZES[device.name]:
        work = 2.0 * size**3
        if best is not None and work / best[0] > 3 * seconds:
            break
        factor = torch.randn(size, size, device=device.name).to(dtype)
        call = _rate(partial(torch.mm, factor, factor), work, device)
        call()
        best = max([*([best] if best else []), (call(), call)], key=lambda found: found[0])
    assert best is not None
    return best[1]


def _rate(call: Callable[[], Any], work: float, device: Device) -> Callable[[], float]:
    """Make a function that runs a call once and returns its work per second."""

    def measure() -> float:
        timer = device.timer()
        start = time.perf_counter()
        if timer:
            timer.start()
        result = call()
        if timer:
            timer.stop()
        device.synchronize(result)
        return work / (timer.seconds() if timer else time.perf_counter() - start)

    return measure
