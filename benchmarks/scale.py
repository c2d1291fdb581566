"""Many ranks on one machine: python benchmarks/scale.py strategies | planning | plots | table

`strategies` runs partition, needs, bytes and predicted time of `attnspan.parallel.simulate` over masks,
tokens and ranks; `planning` measures how long a rank takes to plan a step; each adds to its JSON file in
benchmarks/results, where rows of the same case are replaced. `plots` draws what is there into docs/images,
`table` prints what is there for a fixed number of tokens per rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from attnspan.parallel.choose import Call
from attnspan.parallel.command import lowered, tokens_of
from attnspan.parallel.planning import Request, lower, make_plan
from charts import Axis, Panel, decades, draw

from attnspan import Mask, causal, segments
from attnspan.parallel.local import encode
from attnspan.parallel.machine import Machine
from attnspan.parallel.simulate import sample_lengths, setups, simulate

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
MASKS = ("corpus", "lognormal", "pareto", "causal", "causal & window(4096)")
NAMES = (
    "exchange, balanced",
    "hybrid(8, r), balanced",
    "exchange, zigzag",
    "ring, contiguous",
    "ring, zigzag",
    "ulysses",
)
STAGES = ("total", "lowering", "partition", "needs", "digest", "one rank's lists")
CALL = Call(q_heads=32, kv_heads=8)
RANK_TICKS = [(8, "8"), (64, "64"), (512, "512"), (4096, "4,096")]
Row = dict[str, Any]


def corpus(tokens: int, seed: int) -> np.ndarray:
    """Lengths of the documents in a row of the training job's data."""
    from attnspan.train.config import TrainConfig
    from attnspan.train.data import PackedStream
    from attnspan.train.documents import Vocabulary, load_data

    documents = load_data(TrainConfig(), Vocabulary()).train
    return np.bincount(next(PackedStream(documents, seq_len=tokens, batch_size=1, seed=seed)).ids[0].numpy())


def merge(path: Path, key: Callable[[Row], object], rows: Sequence[Row]) -> list[Row]:
    """Add rows to a file; those of the same key are replaced."""
    known = json.loads(path.read_text()) if path.exists() else []
    merged = {str(key(row)): row for row in (*known, *rows)}
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")
    return list(merged.values())


def strategies(args: argparse.Namespace) -> None:
    machine = Machine()
    for mask in args.masks:
        for tokens in args.tokens:
            spans = lowered(mask, tokens, corpus=corpus, mean=4096, seed=0)
            for ranks in args.ranks:
                found = simulate(spans, CALL, machine, setups(ranks, CALL.q_heads, machine.node_size))
                rows = [{"mask": mask, "machine": str(machine), **asdict(each)} for each in found]
                merge(
                    RESULTS / "scale.json",
                    lambda row: [row[x] for x in ("mask", "tokens", "ranks", "setup")],
                    rows,
                )
                for row in rows:
                    print(f"{mask:<22}{tokens:>11,}{ranks:>6}  {row['setup']:<24}", end="")
                    gigabytes, ms = row["received"] / 1e9, row["seconds"] * 1e3
                    print(f"{row['balance']:8.3f}{gigabytes:9.2f} GB{ms:10.1f} ms", end="")
                    print(f"{row['compute_seconds'] / row['seconds']:8.1%}{row['planning_seconds']:8.2f} s")


def planned(tokens: int, ranks: int, kind: str, seed: int) -> Row:
    """Seconds of each stage of one rank's planning."""
    mask: Mask = causal()
    if kind != "causal":
        lengths = sample_lengths(kind, tokens, seed=seed)
        mask = causal() & segments(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    request = Request(ranks=ranks, call=CALL, strategy="exchange")
    busy = time.process_time()
    times = [time.perf_counter()]
    prepared = lower(mask, tokens, tokens, CALL.batch, CALL.q_heads)
    times.append(time.perf_counter())
    plan, _ = make_plan(prepared, request)
    times.append(time.perf_counter())
    _ = plan.needs
    times.append(time.perf_counter())
    _ = plan.digest
    times.append(time.perf_counter())
    encode(plan.local(ranks // 2))
    times.append(time.perf_counter())
    stages = {name: end - start for name, (start, end) in zip(STAGES[1:], pairwise(times), strict=True)}
    sizes = {"mask": kind, "tokens": tokens, "ranks": ranks}
    return {**sizes, "stages": stages, "total": times[-1] - times[0], "processor": time.process_time() - busy}


def planning(args: argparse.Namespace) -> None:
    for kind in args.masks:
        for tokens in args.tokens:
            for ranks in args.ranks:
                runs = [planned(tokens, ranks, kind, seed) for seed in range(args.repeats)]
                middle = sorted(runs, key=lambda run: run["total"])[len(runs) // 2]
                row = middle | {"totals": [run["total"] for run in runs]}
                merge(
                    RESULTS / "planning.json",
                    lambda row: [row[x] for x in ("mask", "tokens", "ranks")],
                    [row],
                )
                stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["stages"].items())
                median = statistics.median(row["totals"])
                shared = "" if row["total"] < 1.2 * row["processor"] else ", on a busy machine"
                print(f"{kind:<12}{tokens:>11,} tokens {ranks:>6} ranks {median:7.3f} s: {stages}{shared}")


def plots(args: argparse.Namespace) -> None:
    rows = json.loads((RESULTS / "scale.json").read_text())
    rows = [row for row in rows if row["tokens"] == args.at]
    kinds: dict[str, tuple[str, Callable[[Row], float]]] = {
        "time": (
            "predicted time of a layer / time of the mean rank's pairs alone",
            lambda row: row["seconds"] / row["compute_seconds"],
        ),
        "balance": ("visible pairs of the busiest rank / mean", lambda row: row["balance"]),
        "bytes": ("GB received by the busiest rank, forward and backward", lambda row: row["received"] / 1e9),
    }
    for name, (label, value) in kinds.items():
        panels = []
        for mask in MASKS:
            mine = [row for row in rows if row["mask"] == mask]
            lines = {
                name: sorted((row["ranks"], value(row)) for row in mine if row["setup"] == name)
                for name in NAMES
            }
            panels.append(Panel(mask, {name: points for name, points in lines.items() if points}))
        values = [y for panel in panels for points in panel.lines.values() for _, y in points]
        chart = draw(
            panels,
            Axis("ranks", RANK_TICKS),
            Axis(f"{label}; {args.at >> 20}M tokens", decades(values)),
            NAMES,
        )
        (IMAGES / f"scale-{name}.svg").write_text(chart, encoding="utf-8")
    timed = json.loads((RESULTS / "planning.json").read_text())
    (IMAGES / "scale-planning.svg").write_text(planning_chart(timed), encoding="utf-8")


def table(args: argparse.Namespace) -> None:
    rows = json.loads((RESULTS / "scale.json").read_text())
    chosen = [row for row in rows if row["tokens"] == args.per_rank * row["ranks"]]
    print(f"predicted with {rows[0]['machine']}\n")
    print("| documents | ranks, tokens | strategy, rows | max/mean | GB | ms | mean pairs, ms |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(chosen, key=lambda row: (MASKS.index(row["mask"]), row["ranks"])):
        size = f"{row['ranks']:,}, {row['tokens'] >> 20}M"
        received, ms, least = row["received"] / 1e9, row["seconds"] * 1e3, row["compute_seconds"] * 1e3
        cells = f"{row['balance']:.3f} | {received:.3g} | {ms:.4g} | {least:.4g}"
        print(f"| {row['mask']} | {size} | {row['setup']} | {cells} |")


def planning_chart(rows: Sequence[Row]) -> str:
    panels = []
    for kind in dict.fromkeys(row["mask"] for row in rows):
        mine = sorted(
            (row for row in rows if row["mask"] == kind and row["ranks"] == 1024), key=lambda r: r["tokens"]
        )
        lines = {name: [(row["tokens"], row["stages"][name]) for row in mine] for name in mine[0]["stages"]}
        lines[STAGES[0]] = [(row["tokens"], row["total"]) for row in mine]
        panels.append(Panel(f"{kind}, 1,024 ranks", lines))
    ticks = [(n << 20, f"{n}M") for n in (1, 2, 4, 8, 16)]
    values = [y for panel in panels for points in panel.lines.values() for _, y in points]
    return draw(panels, Axis("tokens", ticks), Axis("seconds to plan", decades(values)), STAGES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    sizes: Callable[[str], list[int]] = lambda text: [tokens_of(each) for each in text.split(",")]  # noqa: E731
    for name, run in (("strategies", strategies), ("planning", planning), ("plots", plots), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        if name == "plots":
            command.add_argument("--at", type=tokens_of, default=4 << 20, help="tokens")
            continue
        if name == "table":
            command.add_argument("--per-rank", type=tokens_of, default=16 << 10, help="tokens of a rank")
            continue
        simulated = name == "strategies"
        masks = MASKS if simulated else ("lognormal", "causal")
        command.add_argument("--masks", type=lambda text: text.split(","), default=masks)
        command.add_argument(
            "--tokens", type=sizes, default=sizes("1M,4M,16M" if simulated else "1M,2M,4M,8M,16M")
        )
        command.add_argument(
            "--ranks", type=sizes, default=sizes("8,64,256,1024,4096" if simulated else "1024")
        )
        command.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
