"""The study of routes on one workload, in this process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnspan.bench.cells import Workload
from attnspan.bench.peers.job import Job
from attnspan.bench.routes.findings import RouteStudy
from attnspan.bench.routes.rounds import TINY_LENGTH, Settings, take_routes
from attnspan.bench.routes.way import Way
from attnspan.bench.runner import BOUNDS, difference
from attnspan.bench.workloads import total_flops, visible_pairs

__all__ = ["contiguous_job", "measure_routes"]


def measure_routes(
    workload: Workload, mode: str, ways: Sequence[Way], settings: Settings, *, device: str = "cpu"
) -> RouteStudy:
    """Take every route to one workload.

    Args:
        workload: What to compute.
        mode: "forward" or "forward+backward".
        ways: The first one that runs is what ratios are against.
        settings: How.
        device: "cpu" or "cuda".

    Raises:
        MeasurementError: A timed region ended before its work was done.

    Example:
        >>> from attnspan.bench.routes.torch_ways import Sdpa, TorchEager
        >>> from attnspan.bench.timing import Budget
        >>> work = Workload("two", "report", 1, 2, 2, 32, 32, 8, 8, "float32", "full")
        >>> settings = Settings(Budget(seconds=0.05, sample_seconds=1e-4), cold_calls=3)
        >>> study = measure_routes(work, "forward", [TorchEager(), Sdpa()], settings)
        >>> [(route.name, len(route.cold), route.ratio is None) for route in study.routes]
        [('torch-eager', 3, True), ('torch-sdpa', 3, False)]
    """
    tiny = contiguous_job(replace(workload, q_len=TINY_LENGTH, k_len=TINY_LENGTH), mode, device)
    expected: list[Any] = []

    def compare(found: Sequence[Any]) -> tuple[float, float]:
        plain = [x.detach() for x in found]
        if not expected:
            expected.extend(plain)
        return difference(expected, plain), BOUNDS[workload.dtype]

    routes = take_routes(ways, tiny, contiguous_job(workload, mode, device), compare, settings)
    gc.collect()
    flops = total_flops(workload, mode, visible_pairs(workload))
    return RouteStudy(workload, mode, flops, routes, device, TINY_LENGTH)


def contiguous_job(workload: Workload, mode: str, device: str) -> Job:
    """A job whose arrays are (B, H, S, D) in memory, as the report's kernels take them.

    JAX arrays have no strides: this layout alone reaches every route without a copy.

    Args:
        workload: Gives sizes and dtype.
        mode: "forward" or "forward+backward".
        device: "cpu" or "cuda".

    Example:
        >>> work = Workload("two", "report", 1, 5, 5, 16, 16, 8, 8, "float32", "full")
        >>> contiguous_job(work, "forward", "cpu").q.is_contiguous()
        True
    """
    job = Job.make(workload, mode, device)
    q, k, v = (x.detach().contiguous().requires_grad_(job.backward) for x in (job.q, job.k, job.v))
    return replace(job, q=q, k=k, v=v, dout=job.dout.contiguous())
