"""The report of 2025 again: one kernel at (1, 5, S, 128), dense, by every route that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attnspan.bench.cells import Workload
from attnspan.bench.routes.findings import RouteStudy
from attnspan.bench.routes.jax_ways import CallJax, JaxJit, JaxNn
from attnspan.bench.routes.lazy import find_python, lazy_routes
from attnspan.bench.routes.measure import measure_routes
from attnspan.bench.routes.rounds import COLD_CALLS, Settings
from attnspan.bench.routes.torch_ways import FixedBlocks, Sdpa, TorchCompile, TorchEager
from attnspan.bench.routes.way import Way
from attnspan.bench.timing import Budget, Meter

__all__ = [
    "FULL_LENGTH",
    "LENGTH",
    "REPORT",
    "ReportPlan",
    "measure_report",
    "report_ways",
    "report_workload",
]

REPORT = "report-2025"
#: The report's own.
FULL_LENGTH = 16384
#: A thousandth of the report's work, which takes a few CPU cores the few ms that the report's device took.
LENGTH = 512
# Calls in a row, so that waiting for each or for all makes a difference; long calls need fewer.
_CALLS = {"short": 10, "long": 2}
_LONG = 4096


@dataclass(frozen=True)
class ReportPlan:
    """What of the report is measured.

    Args:
        lengths: Queries and keys, one study for each.
        dtypes: Element types.
        modes: "forward", "forward+backward".
        device: "cpu" or "cuda".
        budget: When a comparison may stop.
        xla_python: Interpreter with PyTorch/XLA, or None to look for one.

    Example:
        >>> len(list(ReportPlan(lengths=(128, 256)).cells()))
        2
    """

    lengths: tuple[int, ...] = (LENGTH,)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("forward",)
    device: str = "cpu"
    budget: Budget = field(default_factory=Budget)
    xla_python: Path | None = None

    def cells(self) -> Sequence[tuple[Workload, str]]:
        """Each workload in each mode."""
        return [
            (report_workload(length, dtype), mode)
            for length in self.lengths
            for dtype in self.dtypes
            for mode in self.modes
        ]


def report_workload(length: int = LENGTH, dtype: str = "float32") -> Workload:
    """The report's problem, at another length where it is asked for.

    Args:
        length: Queries and keys.
        dtype: "float32", "bfloat16" or "float16".

    Example:
        >>> report_workload(FULL_LENGTH).sizes
        '5x16384 D128'
    """
    share = (FULL_LENGTH / length) ** 2
    note = "the report's own shape" if share == 1 else f"1/{share:,.0f} of the report's work"
    return Workload(REPORT, "report", 1, 5, 5, length, length, 128, 128, dtype, "full", note)


def report_ways() -> tuple[Way, ...]:
    """Every route of this process; the first is what ratios are against.

    Example:
        >>> [way.name for way in report_ways()][:4]
        ['torch-eager', 'torch-compile', 'jax-jit', 'call-jax']
    """
    return (
        TorchEager(),
        TorchCompile(),
        JaxJit(),
        CallJax(),
        FixedBlocks(0, 0),
        FixedBlocks(32, 64),
        FixedBlocks(128, 128),
        FixedBlocks(512, 512),
        JaxJit("xla"),
        Sdpa(),
        JaxNn(),
    )


def measure_report(
    plan: ReportPlan,
    *,
    ways: Sequence[Way] | None = None,
    lazy: bool = True,
    tell: Callable[[str], None] | None = None,
) -> tuple[RouteStudy, ...]:
    """Take every route.

    Args:
        plan: What to measure.
        ways: Routes of this process; None takes `report_ways`.
        lazy: Take the route of the other environment too.
        tell: Told of each step that begins.

    Returns:
        A study for each cell of the plan; routes that cannot run say why.

    Example:
        >>> from attnspan.bench.routes.torch_ways import Sdpa, TorchEager
        >>> plan = ReportPlan(lengths=(32,), budget=Budget(0.05, sample_seconds=1e-4))
        >>> (study,) = measure_report(plan, ways=[TorchEager(), Sdpa()], lazy=False)
        >>> [route.name for route in study.routes]
        ['torch-eager', 'torch-sdpa']
    """
    python = find_python(plan.xla_python) if lazy else None
    meter = Meter(threads=torch.get_num_threads())
    studies = []
    for workload, mode in plan.cells():
        is_long = workload.q_len >= _LONG
        budget = replace(plan.budget, calls=_CALLS["long" if is_long else "short"])
        settings = Settings(budget, meter, 3 if is_long else COLD_CALLS, *((tell,) if tell else ()))
        study = measure_routes(workload, mode, ways or report_ways(), settings, device=plan.device)
        if lazy:
            settings.tell("PyTorch/XLA, in its own environment")
            found = lazy_routes(workload, mode, settings, threads=meter.threads, python=python)
            study = replace(study, routes=(*study.routes, *found))
        studies.append(study)
    return tuple(studies)
