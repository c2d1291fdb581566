"""Many ranks, simulated on one machine: python benchmarks/scale.py strategies | planning | plots | table

`strategies` counts pairs, rows and bytes of every strategy over masks, tokens and ranks with
`attnspan_lab.simulate`. With a machine's measured rates (``--machine``), it also predicts times. `planning`
times the planning of a step. Both write to a file in benchmarks/results and replace rows of the same case.
`plots` draws the results into docs/images, and `table` prints them for a number of tokens per rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from charts import Axis, Panel, decades, draw

from attnspan import Mask, parse
from attnspan.parallel import Layout
from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.files import read_json, write_json
from attnspan_lab.machine import Machine
from attnspan_lab.simulate import corpus_lengths, pack, sample_lengths, setups, simulate, tokens_of

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
SCALE, PLANNING = RESULTS / "scale.json.gz", RESULTS / "planning.json.gz"
MASKS = ("corpus", "lognormal", "pareto", "causal", "causal & window(4096)")
NODE_SIZE, HEADS = 8, (32, 8)
STAGES = ("mask.prepare", "Layout.of", "layout.plan", "plan.local")
RANK_TICKS = [(8, "8"), (64, "64"), (512, "512"), (4096, "4,096")]
Row = dict[str, Any]


def mask_of(name: str, tokens: int, seed: int = 0) -> Mask:
    """Build a mask: causal documents of the training job or of drawn lengths, or an expression."""
    if name == "corpus":
        return pack(corpus_lengths(tokens, seed))
    return pack(sample_lengths(name, tokens, seed=seed)) if name in ("lognormal", "pareto") else parse(name)


def merge(path: Path, key: Sequence[str], rows: Sequence[Row]) -> None:
    """Add rows to a file, and replace rows with the same key."""
    known = read_json(path) if path.exists() else []
    write_json(path, list({tuple(row[x] for x in key): row for row in (*known, *rows)}.values()))


def strategies(args: argparse.Namespace) -> None:
    machine = None if args.machine is None else Machine.load(args.machine)
    for name in args.masks:
        for tokens in args.tokens:
            prepared = mask_of(name, tokens).prepare(tokens, tokens)
            for ranks in args.ranks:
                chosen = setups(ranks, HEADS[0], NODE_SIZE)
                found = simulate(prepared, tokens, chosen, machine=machine, node_size=NODE_SIZE, heads=HEADS)
                rows = [{"mask": name, "machine": machine and str(machine), **asdict(x)} for x in found]
                merge(SCALE, ("mask", "tokens", "ranks", "setup"), rows)
                for x in found:
                    texts = (
                        f"{bytes_text(x.received):>10}{bytes_text(x.memory):>10}{seconds_text(x.seconds):>9}"
                    )
                    print(f"{name:<22}{tokens:>11,}{ranks:>6}  {x.setup:<24}{x.balance:8.3f}{texts}")


def planned(tokens: int, ranks: int, name: str, seed: int) -> Row:
    """Measure the seconds of each stage of planning, and the total processor time."""
    mask, busy, times = mask_of(name, tokens, seed), time.process_time(), [time.perf_counter()]
    prepared = mask.prepare(tokens, tokens)
    times.append(time.perf_counter())
    layout = Layout.of(prepared, q_len=tokens, ranks=ranks)
    times.append(time.perf_counter())
    plan = layout.plan(heads=HEADS, strategy="exchange")
    times.append(time.perf_counter())
    plan.local(ranks // 2)
    times.append(time.perf_counter())
    stages = {x: end - start for x, (start, end) in zip(STAGES, pairwise(times), strict=True)}
    row = {"mask": name, "tokens": tokens, "ranks": ranks, "stages": stages}
    return {**row, "total": times[-1] - times[0], "processor": time.process_time() - busy}


def planning(args: argparse.Namespace) -> None:
    for name in args.masks:
        for tokens in args.tokens:
            for ranks in args.ranks:
                runs = [planned(tokens, ranks, name, seed) for seed in range(args.repeats)]
                middle = sorted(runs, key=lambda run: run["total"])[len(runs) // 2]
                row = middle | {"totals": [run["total"] for run in runs]}
                merge(PLANNING, ("mask", "tokens", "ranks"), [row])
                stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in row["stages"].items())
                median = statistics.median(row["totals"])
                shared = "" if row["total"] < 1.2 * row["processor"] else ", on a busy machine"
                print(f"{name:<12}{tokens:>11,} tokens {ranks:>6} ranks {median:7.3f} s: {stages}{shared}")


def plots(args: argparse.Namespace) -> None:
    rows = [row for row in read_json(SCALE) if row["tokens"] == args.at]
    names = list(dict.fromkeys(row["setup"] for row in rows))
    kinds: dict[str, tuple[str, Callable[[Row], float]]] = {
        "balance": ("visible pairs of the busiest rank / mean", lambda row: row["balance"]),
        "bytes": ("GB received by the busiest rank, forward and backward", lambda row: row["received"] / 1e9),
    }
    for kind, (label, value) in kinds.items():
        panels = []
        for mask in MASKS:
            mine = [row for row in rows if row["mask"] == mask]
            lines = {x: sorted((r["ranks"], value(r)) for r in mine if r["setup"] == x) for x in names}
            panels.append(Panel(mask, {x: points for x, points in lines.items() if points}))
        values = [y for panel in panels for points in panel.lines.values() for _, y in points]
        axes = Axis("ranks", RANK_TICKS), Axis(f"{label}; {args.at >> 20}M tokens", decades(values))
        (IMAGES / f"scale-{kind}.svg").write_text(draw(panels, *axes, names), encoding="utf-8")


def table(args: argparse.Namespace) -> None:
    print("| documents | ranks, tokens | strategy, rows | max/mean | of a ring | received | across nodes |")
    print("|---|---|---|---|---|---|---|")
    chosen = [row for row in read_json(SCALE) if row["tokens"] == args.per_rank * row["ranks"]]
    for row in sorted(chosen, key=lambda row: (MASKS.index(row["mask"]), row["ranks"])):
        size = f"{row['ranks']:,}, {row['tokens'] >> 20}M"
        share = f"{row['rows'] / row['rows_of_ring']:.3f}" if row["rows_of_ring"] else "-"
        cells = f"{row['balance']:.3f} | {share} | {bytes_text(row['received'])}"
        print(f"| {row['mask']} | {size} | {row['setup']} | {cells} | {bytes_text(row['received_across'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    sizes: Callable[[str], list[int]] = lambda text: [tokens_of(each) for each in text.split(",")]  # noqa: E731
    for name, run in (("strategies", strategies), ("planning", planning), ("plots", plots), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        simulated = name == "strategies"
        if name == "plots":
            command.add_argument("--at", type=tokens_of, default=4 << 20, help="tokens")
        elif name == "table":
            command.add_argument("--per-rank", type=tokens_of, default=16 << 10, help="tokens per rank")
        else:
            masks = MASKS if simulated else ("lognormal", "causal")
            tokens, ranks = ("1M,4M,16M", "8,64,256,1024,4096") if simulated else ("1M,2M,4M,8M,16M", "1024")
            command.add_argument("--masks", type=lambda text: text.split(","), default=masks)
            command.add_argument("--tokens", type=sizes, default=sizes(tokens))
            command.add_argument("--ranks", type=sizes, default=sizes(ranks))
        if simulated:
            command.add_argument("--machine", type=Path, help="file from Machine.save(), to predict times")
        if name == "planning":
            command.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
