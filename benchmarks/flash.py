"""attnspan beside torch's own CPU attention, interleaved A B A B: python benchmarks/flash.py [--json FILE]

Two tables: against the flash kernel of `scaled_dot_product_attention` over {dtype} x {mask} x {head_dim} x
{length}, forward and forward + backward; and packed documents against SDPA with a dense boolean mask, the
only way it can express them. A ratio is the median of the paired ratios, peer time / our time; the spread is
its interquartile range. Raw samples go to --json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal, documents, full
from attnspan.kernels import cpu
from attnspan.torch import attention

HEADS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One comparison: what was run, its FLOPs, and the raw seconds of both sides, sample by sample."""

    name: str
    peer: str
    mode: str
    flops: float
    ours: list[float]
    theirs: list[float]

    def ratio(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the paired ratios."""
        low, middle, high = statistics.quantiles(
            (b / a for a, b in zip(self.ours, self.theirs, strict=True)), n=4
        )
        return low, middle, high


def interleave(
    ours: Callable[[], object], theirs: Callable[[], object], seconds: float
) -> tuple[list[float], list[float]]:
    """Time both calls in turn after a warm-up, at least 5 times each and for about `seconds` in all."""
    samples: tuple[list[float], list[float]] = ([], [])
    ours(), theirs()
    begin = time.perf_counter()
    while len(samples[1]) < 5 or (time.perf_counter() - begin < seconds and len(samples[1]) < 200):
        for call, times in zip((ours, theirs), samples, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return samples


def inputs(length: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the output's gradient as a model makes them: (B, S, H, D) in memory."""
    torch.manual_seed(0)
    x = [torch.randn(1, length, HEADS, head_dim).to(dtype).transpose(1, 2) for _ in range(4)]
    return [*(t.requires_grad_() for t in x[:3]), x[3]]


def compare(
    name: str, peer: str, pairs: int, x: list[torch.Tensor], ours: Callable, theirs: Callable, seconds: float
) -> Iterator[Cell]:
    """Forward, then forward + backward."""
    q, k, v, grad = x

    def forward(call: Callable) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                call(q, k, v)

        return run

    def both(call: Callable) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(q, k, v), (q, k, v), grad)

    flops = 4.0 * pairs * HEADS * q.shape[-1]
    yield Cell(name, peer, "forward", flops, *interleave(forward(ours), forward(theirs), seconds))
    yield Cell(name, peer, "forward+backward", 3.5 * flops, *interleave(both(ours), both(theirs), seconds))


def dense_cells(args: argparse.Namespace) -> Iterator[Cell]:
    for dtype in args.dtypes:
        for head_dim in args.head_dims:
            for length in args.lengths:
                for is_causal in (False, True):
                    mask = (causal() if is_causal else full()).prepare(length, length, like=torch.empty(0))
                    name = f"{dtype} {'causal' if is_causal else 'full'} D{head_dim} S{length}"
                    pairs = length * (length + 1) // 2 if is_causal else length * length
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        yield from compare(
                            name,
                            "SDPA flash",
                            pairs,
                            inputs(length, head_dim, DTYPES[dtype]),
                            lambda q, k, v, mask=mask: attention(q, k, v, mask=mask),
                            lambda q, k, v, c=is_causal: scaled_dot_product_attention(q, k, v, is_causal=c),
                            args.seconds,
                        )


def packed_cells(args: argparse.Namespace) -> Iterator[Cell]:
    length, head_dim, count = 8192, 64, 32
    size = length // count
    mask = causal() & documents(torch.arange(0, length + 1, size, dtype=torch.int32))
    prepared = mask.prepare(length, length, like=torch.empty(0))
    row = torch.arange(length)
    visible = (row[:, None] >= row) & (row[:, None] // size == row // size)
    for dtype in args.dtypes:
        yield from compare(
            f"{dtype} {count} documents, S{length} D{head_dim}",
            "SDPA with a dense mask",
            count * size * (size + 1) // 2,
            inputs(length, head_dim, DTYPES[dtype]),
            lambda q, k, v: attention(q, k, v, mask=prepared),
            lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=visible),
            args.seconds,
        )


def row_of(cell: Cell) -> list[str]:
    low, middle, high = cell.ratio()
    ours, theirs = statistics.median(cell.ours), statistics.median(cell.theirs)
    rates = [f"{cell.flops / t / 1e9:.0f}" for t in (ours, theirs)]
    return [
        cell.name,
        cell.mode,
        f"{ours * 1e3:.2f}",
        f"{theirs * 1e3:.2f}",
        *rates,
        f"{middle:.2f}",
        f"{low:.2f}-{high:.2f}",
    ]


def show(title: str, cells: list[Cell], console: Console) -> None:
    table = Table(title=title)
    for heading in (
        "workload",
        "mode",
        "ours ms",
        "peer ms",
        "ours GFLOP/s",
        "peer GFLOP/s",
        "ratio",
        "quartiles",
    ):
        table.add_column(heading, justify="left" if heading in ("workload", "mode") else "right")
    for cell in cells:
        table.add_row(*row_of(cell))
    console.print(table)
    console.print(f"slowest cell: {min(c.ratio()[1] for c in cells):.2f}x, geometric mean: "
                  f"{statistics.geometric_mean(c.ratio()[1] for c in cells):.2f}x")  # fmt: skip


def environment() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "isa": cpu.isa(),
        "threading": cpu.threading(),
        "machine": platform.machine(),
        "processor": next(
            (
                line.split(":", 1)[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.processor(),
        )
        if Path("/proc/cpuinfo").exists()
        else platform.processor(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to sample a cell")
    parser.add_argument("--json", type=Path, help="where to keep the raw samples")
    args = parser.parse_args()
    console = Console(width=130)
    console.print(environment())
    dense = list(dense_cells(args))
    show("against SDPA flash", dense, console)
    packed = list(packed_cells(args))
    show("packed documents", packed, console)
    if args.json:
        cells = [asdict(c) for c in (*dense, *packed)]
        args.json.write_text(json.dumps({"environment": environment(), "cells": cells}))
        console.print(f"raw samples: {args.json}")


if __name__ == "__main__":
    main()
