"""Context parallelism: P ranks of one thread each, compared with one rank of P threads.

    python benchmarks/context_parallel.py --json benchmarks/results/context_parallel.json.gz

Starts its own ranks, with gloo. All contestants are first checked, against float64 at a small size and
against one rank at the full size. Then they are called in turn, round by round. The time of a call is the
time of its slowest rank. The efficiency of a contestant is the time of one rank with P threads over its own
time. The phases of a call belong to its slowest rank: seconds in attnspan's kernel, seconds of waiting for
others, and the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.multiprocessing
from _cp_ranks import SAMPLE, Settings, serve
from rich.console import Console
from rich.table import Table

from attnspan_lab.bench.statistics import Samples, paired
from attnspan_lab.files import write_json

#: Contestant that other times are also compared with.
OURS = "exchange"
#: Target efficiency at 16,384 rows, forward + backward.
TARGETS = {"causal": 0.90, "documents": 0.85}


def launch(settings: Settings) -> dict[str, Any]:
    """Start the ranks, and return their results."""
    load = list(os.getloadavg())
    with tempfile.TemporaryDirectory(prefix="attnspan-ranks-") as folder:
        results = Path(folder, "results.json")
        arguments = (settings, str(Path(folder, "store")), str(results))
        torch.multiprocessing.spawn(serve, arguments, nprocs=settings.ranks)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(results.read_text())
    found["load_before"] = load
    for run in found["runs"]:
        judge(run)
    return found


def judge(run: dict[str, Any]) -> None:
    """Add times, phases and efficiency to each contestant, from the samples of its ranks."""
    entries = run["contestants"]
    for entry in entries.values():
        slowest = [max(ranks, key=lambda sample: sample[0]) for ranks in entry["ranks"]]
        entry["seconds"] = [sample[0] for sample in slowest]
        entry["phases"] = {
            name: statistics.median(sample[i] for sample in slowest) for i, name in enumerate(SAMPLE)
        }
        wall, kernel, waiting = (entry["phases"][name] for name in SAMPLE[:3])
        entry["phases"]["rest"] = wall - kernel - waiting
    first = next(iter(entries.values()))["seconds"]
    ours = entries.get(OURS, {}).get("seconds")
    for entry in entries.values():
        if ours is not None:
            entry["times_ours"] = asdict(paired(ours, entry["seconds"]))
        # Ratios of adjacent times, so that drift of the machine cancels.
        ratios = tuple(a / b for a, b in zip(first, entry["seconds"], strict=True))
        found = asdict(paired(entry["seconds"], first))
        entry["efficiency"] = {**found, "quartiles": Samples(ratios).quartiles}


def table(run: dict[str, Any]) -> Table:
    """Make the table of a run, with one row per contestant."""
    documents = "" if run["documents"] is None else f" of {len(run['documents'])}"
    found = Table(
        title=f"{run['case']}{documents}, {run['dtype']}, heads {run['heads'][0]}/{run['heads'][1]}, "
        f"D {run['head_dim']}, {run['mode']}",
        title_justify="left",
    )
    found.add_column("")
    for name in (
        "ms [quartiles]",
        "efficiency [95 %]",
        f"times {OURS}",
        "kernel",
        "waiting",
        "rest",
        "MB in",
        "MB grown",
    ):
        found.add_column(name, justify="right")
    for name, entry in run["contestants"].items():
        low, middle, high = (1e3 * x for x in Samples(tuple(entry["seconds"])).quartiles)
        score, phases, growth = entry["efficiency"], entry["phases"], entry["memory_growth"]
        strategy, ratio = entry.get("strategy", name), entry.get("times_ours", "")
        found.add_row(
            name if name.startswith(strategy.split("(")[0]) else f"{name}: {strategy}",
            f"{middle:.1f} [{low:.1f}, {high:.1f}]",
            f"{score['median']:.1%} [{score['low']:.1%}, {score['high']:.1%}]",
            ratio and f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            # There are no counters for the kernels of FlexAttention and ATen.
            *(f"{1e3 * phases[x]:.1f}" if phases["kernel"] else "" for x in ("kernel", "waiting", "rest")),
            f"{entry['received_bytes'] / 1e6:.1f}",
            "" if growth is None else f"{growth / 1e6:.0f}",
        )
    return found


def losses(run: dict[str, Any], name: str) -> str:
    """Describe a contestant's losses against an ideal split, in percent of one rank's time."""
    one, entry = (run["contestants"][x]["phases"] for x in (next(iter(run["contestants"])), name))
    parts = {
        "a slower kernel": entry["kernel"] - one["kernel"],
        "waiting": entry["waiting"],
        "the rest": entry["rest"] - one["rest"],
    }
    return ", ".join(f"{part} {seconds / one['wall']:+.1%}" for part, seconds in parts.items())


def report(found: dict[str, Any], console: Console) -> None:
    """Print all tables, the contestants that did not take part with the reasons, and the targets."""
    for run in found["runs"]:
        console.print(table(run))
        for name, reason in run["refused"].items():
            console.print(f"  {name}: not measured: {reason}", highlight=False)
        for name in (OURS, "auto"):
            if name in run["contestants"]:
                console.print(f"  {name} against one rank's time: {losses(run, name)}", highlight=False)
        console.print()
    ours = ("exchange", "ring, zigzag", "ulysses", "hybrid", "auto")
    for run in found["runs"]:
        target = TARGETS.get(run["case"].partition(":")[0])
        known = {x: run["contestants"][x]["efficiency"]["median"] for x in ours if x in run["contestants"]}
        if target is not None and run["mode"] == "forward+backward" and known:
            console.print(
                f"{run['case']:<12} {run['dtype']:<9} {run['heads']} D {run['head_dim']}: "
                + ", ".join(f"{name} {score:.1%}" for name, score in known.items())
                + f" (target at 16,384 rows: {target:.0%})",
                highlight=False,
            )


def settings_of(arguments: Sequence[str] | None = None) -> tuple[Settings, Path | None]:
    """Parse the command line: settings, and the file for results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--q-len", type=int, default=16384, help="total number of rows")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contestant")
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks, and of threads of the single rank"
    )
    parser.add_argument(
        "--cases", default="causal,documents,window", help="causal, documents, documents:SEED, window"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes of q, k and v")
    parser.add_argument("--heads", default="8/8,8/2", help="query heads/key heads")
    parser.add_argument("--head-dims", default="64", help="D")
    parser.add_argument("--modes", default="forward,forward+backward", help="passes to measure")
    parser.add_argument(
        "--only",
        default="",
        help="contestants besides the single rank, separated by semicolons (default: all)",
    )
    parser.add_argument(
        "--calibrate", type=float, default=6.0, help='seconds to measure rates for "auto" (0: minimize bytes)'
    )
    parser.add_argument("--json", type=Path, help="write settings, environment and raw samples to this file")
    args = parser.parse_args(arguments)
    if args.ranks < 2 or args.rounds < 1 or args.q_len < 1:
        parser.error("expected at least two ranks, one round and one row")
    settings = Settings(
        q_len=args.q_len,
        rounds=args.rounds,
        ranks=args.ranks,
        cases=tuple(args.cases.split(",")),
        dtypes=tuple(args.dtypes.split(",")),
        heads=tuple(tuple(map(int, pair.split("/"))) for pair in args.heads.split(",")),  # type: ignore[misc]
        head_dims=tuple(map(int, args.head_dims.split(","))),
        modes=tuple(args.modes.split(",")),
        only=tuple(name for name in args.only.split(";") if name),
        calibrate=args.calibrate,
    )
    return settings, args.json


def main() -> None:
    settings, path = settings_of()
    found = launch(settings)
    report(found, Console(width=150))
    if path is not None:
        write_json(path, found)


if __name__ == "__main__":
    main()
