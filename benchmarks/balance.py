"""Even work and few foreign rows: python benchmarks/balance.py [--packings N] [--frontier N]

Packs the documents of the training job (the standard library, as bytes) into rows of S tokens, causal within
documents, and deals each packing to P ranks by every method: the largest rank's visible pairs over the mean,
and the largest rank's foreign rows over the S - n rows that a ring brings. Beside it stands the bound that no
partition can beat: who owns the last row of the longest document must fetch all of it but its own n rows.

Writes benchmarks/results/balance.json and docs/images/balance.svg. Finished cases are kept in the JSON: a run
that was stopped goes on with the next one; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnspan import causal, documents
from attnspan.parallel.chunks import Chunks
from attnspan.parallel.needs import Holders, foreign, needs_of
from attnspan.parallel.partition import default_rows_per_chunk, partition
from attnspan.train.config import TrainConfig
from attnspan.train.data import PackedStream
from attnspan.train.documents import Vocabulary, load_data

ROOT = Path(__file__).parents[1]
CASES = ((131_072, 8), (131_072, 64), (1_048_576, 64))
TARGETS = {(131_072, 8): 0.65, (131_072, 64): 0.50, (1_048_576, 64): 0.28}
GREEDY_ROWS = {131_072: 128, 1_048_576: 512}  # rows per chunk; smaller chunks scatter documents more
METHODS = ("balanced", "greedy", "contiguous", "zigzag")
TOLERANCES = (1.001, 1.005, 1.02, 1.05, 1.1, 1.2, 1.5)
PER_GROUP = (8, 16, 32)


def packings(seq_len: int, count: int) -> Iterator[np.ndarray]:
    """Document offsets of rows of the training job's stream, seed 0."""
    corpus = load_data(TrainConfig(), Vocabulary()).train
    stream = PackedStream(corpus, seq_len=seq_len, batch_size=1, seed=0)
    for _ in range(count):
        ids = next(stream).ids[0].numpy()
        yield np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [seq_len]])


def measure(chunks: Chunks, ranks: int, **options: Any) -> dict[str, float]:
    """Unevenness, foreign rows of the largest rank and of the mean one (of a ring's), milliseconds."""
    start = time.perf_counter()
    part = partition(chunks, ranks, **options)
    took = 1e3 * (time.perf_counter() - start)
    work = np.bincount(part.owner, weights=chunks.pairs, minlength=ranks)
    rows = foreign(needs_of(chunks, part.owner, ranks), Holders.of(chunks, part.owner, ranks))
    ring = chunks.q_len - part.rows_per_rank
    return {
        "pairs": float(work.max() / work.mean()),
        "rows": float(rows.max() / ring),
        "mean_rows": float(rows.mean() / ring),
        "milliseconds": took,
    }


def table_of(seq_len: int, ranks: int, count: int) -> dict[str, Any]:
    """Samples of each method over the packings, and of the bound."""
    each, found = -(-seq_len // ranks), {method: [] for method in METHODS}
    bound = []
    size = default_rows_per_chunk(seq_len, ranks)
    for offsets in packings(seq_len, count):
        bound.append(max(int(np.diff(offsets).max()) - each, 0) / (seq_len - each))
        spans = (causal() & documents(offsets)).spans(seq_len, seq_len)
        chunks = Chunks.of(spans, size)
        coarse = Chunks.of(spans, GREEDY_ROWS[seq_len])
        for method in METHODS:
            by = coarse if method == "greedy" else chunks
            found[method].append(measure(by, ranks, method=method))
    samples = {m: {key: [s[key] for s in x] for key in x[0]} for m, x in found.items()}
    return {"tokens": seq_len, "ranks": ranks, "packings": count, "bound": bound, "methods": samples}


def frontier_of(seq_len: int, ranks: int, count: int) -> list[dict[str, float]]:
    """Means over the packings for each granularity and tolerance."""
    points = []
    spans = [(causal() & documents(x)).spans(seq_len, seq_len) for x in packings(seq_len, count)]
    for per_group in PER_GROUP:
        cut = [Chunks.of(x, seq_len // ranks // per_group) for x in spans]
        for tolerance in TOLERANCES:
            found = [measure(chunks, ranks, tolerance=tolerance) for chunks in cut]
            means = {key: float(np.mean([x[key] for x in found])) for key in found[0]}
            points.append({"chunks_per_rank": per_group, "tolerance": tolerance, **means})
    return points


def show_time(seq_len: int = 4_194_304, ranks: int = 1024, calls: int = 5) -> None:
    """Median milliseconds of each step from the mask to the counts of foreign rows."""
    mask = causal() & documents(next(packings(seq_len, 1)))
    size, times = default_rows_per_chunk(seq_len, ranks), []
    for _ in range(calls):
        stamps = [time.perf_counter()]
        spans = mask.spans(seq_len, seq_len)
        stamps.append(time.perf_counter())
        chunks = Chunks.of(spans, size)
        stamps.append(time.perf_counter())
        part = partition(chunks, ranks)
        stamps.append(time.perf_counter())
        foreign(needs_of(chunks, part.owner, ranks), Holders.of(chunks, part.owner, ranks))
        stamps.append(time.perf_counter())
        times.append(1e3 * np.diff(stamps))
    print(f"{seq_len:,} tokens, {ranks:,} ranks, median of {calls} calls, milliseconds")
    for name, took in zip(
        ("mask.spans", "Chunks.of", "partition", "needs"), np.median(times, axis=0), strict=True
    ):
        print(f"{name:<12}{took:6.0f}")


def environment() -> dict[str, Any]:
    return {"python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count()}


def show(results: dict[str, Any]) -> None:
    """The tables in Markdown, as docs/partition.md has them."""
    print("| tokens, ranks | | max/mean pairs: mean (worst) | rows: mean | median | worst | mean rank | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for case in results["cases"]:
        name = f"{case['tokens']:,}, {case['ranks']}"
        for method, x in case["methods"].items():
            pairs, rows = np.array(x["pairs"]), np.array(x["rows"])
            print(
                f"| {name} | {method} | {pairs.mean():.3f} ({pairs.max():.3f}) | {rows.mean():.3f} "
                f"| {np.median(rows):.3f} | {rows.max():.3f} | {np.mean(x['mean_rows']):.3f} "
                f"| {np.median(x['milliseconds']):.0f} |"
            )
            name = ""
        bound = np.array(case["bound"])
        gap = np.array(case["methods"]["balanced"]["rows"]) - bound
        print(f"| | bound | | {bound.mean():.3f} | {np.median(bound):.3f} | {bound.max():.3f} | | |")
        print(
            f"| | balanced over the bound | | {gap.mean():.3f} | {np.median(gap):.3f} | {gap.max():.3f} | | |"
        )


def draw(results: dict[str, Any]) -> str:
    """The frontier: one panel per case, a line per granularity, the other methods as points."""
    width, height, pad = 330, 300, 46
    same = results["asked"]["frontier"]  # what stands beside the lines is of the same packings
    colours = dict(zip(map(str, PER_GROUP), ("#9ecae1", "#4292c6", "#08306b"), strict=True))
    parts = []
    for number, (case, points) in enumerate(zip(results["cases"], results["frontiers"], strict=True)):
        left = number * width + pad

        def x(rows: float, left: int = left) -> float:
            return left + rows * (width - pad - 14)

        def y(pairs: float) -> float:
            # Unevenness from 0.1 % to 500 %, by powers of ten.
            share = (np.log10(max(pairs - 1, 1e-3)) + 3) / (np.log10(5) + 3)
            return height - pad - share * (height - 2 * pad)

        parts.append(
            f'<text x="{x(0.5)}" y="20" class="t">{case["tokens"]:,} tokens, {case["ranks"]} ranks</text>'
        )
        for tick in (0, 0.25, 0.5, 0.75, 1):
            parts.append(f'<path d="M{x(tick):.1f} {y(1.001)}V{y(6):.1f}" class="g"/>')
            parts.append(f'<text x="{x(tick):.1f}" y="{height - pad + 16}">{tick:g}</text>')
        for tick in (0.001, 0.01, 0.1, 1):
            parts.append(f'<path d="M{x(0)} {y(1 + tick):.1f}H{x(1):.1f}" class="g"/>')
            label = f"{100 * tick:g} %"
            parts.append(f'<text x="{x(0) - 5}" y="{y(1 + tick) + 4:.1f}" class="e">{label}</text>')
        bound = float(np.mean(case["bound"][:same]))
        parts.append(f'<path d="M{x(bound):.1f} {y(1.001):.1f}V{y(6):.1f}" class="b"/>')
        for per_group, colour in colours.items():
            line = [p for p in points if str(p["chunks_per_rank"]) == per_group]
            path = " ".join(f"{x(p['rows']):.1f},{y(p['pairs']):.1f}" for p in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [
                f'<circle cx="{x(p["rows"]):.1f}" cy="{y(p["pairs"]):.1f}" r="2.6" fill="{colour}"/>'
                for p in line
            ]
        for method in METHODS[1:]:
            means = {key: float(np.mean(v[:same])) for key, v in case["methods"][method].items()}
            at = f'x="{x(means["rows"]):.1f}" y="{y(means["pairs"]):.1f}"'
            parts.append(f'<text {at} class="m" dy="4">{method[0].upper()}</text>')
    legend = 10
    for per_group, colour in colours.items():
        parts.append(f'<rect x="{legend}" y="{height + 4}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{legend + 24}" y="{height + 11}" class="l">{per_group} chunks a rank</text>')
        legend += 128
    note = (
        "G greedy, C contiguous, Z zigzag; dashed: the bound; across: foreign rows of the largest rank; "
        "up: its work beyond the mean; a line's dots: tolerances"
    )
    parts.append(f'<text x="10" y="{height + 30}" class="l">{note}</text>')
    style = (
        "text{font:11px sans-serif;text-anchor:middle;fill:#333}.t{font-weight:bold}.e{text-anchor:end}"
        ".l{text-anchor:start}.m{font-weight:bold;font-size:13px;fill:#b3331d}.g{stroke:#ddd}"
        ".b{stroke:#b3331d;stroke-dasharray:4 3}"
    )
    size = f'viewBox="0 0 {3 * width + 10} {height + 40}" width="{3 * width + 10}" height="{height + 40}"'
    white = '<rect width="100%" height="100%" fill="#fff"/>'
    inner = f"<style>{style}</style>{white}{''.join(parts)}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inner}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packings", type=int, default=1000)
    parser.add_argument("--frontier", type=int, default=12, help="packings of each point of the frontier")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/balance.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/balance.svg")
    parser.add_argument("--time", action="store_true", help="only time one large partition")
    args = parser.parse_args()
    if args.time:
        show_time()
        return
    asked = {"packings": args.packings, "frontier": args.frontier}
    results: dict[str, Any] = {"asked": asked, "environment": environment(), "cases": [], "frontiers": []}
    if args.output.exists() and not args.fresh:
        kept = json.loads(args.output.read_text())
        results = kept if kept.get("asked") == asked else results
    for key, work, count in (("cases", table_of, args.packings), ("frontiers", frontier_of, args.frontier)):
        for case in CASES[len(results[key]) :]:
            results[key].append(work(*case, count))
            args.output.write_text(json.dumps(results) + "\n")
    args.picture.write_text(draw(results), encoding="utf-8")
    show(results)
    for case in results["cases"]:
        rows, target = np.mean(case["methods"]["balanced"]["rows"]), TARGETS[case["tokens"], case["ranks"]]
        print(f"{case['tokens']:,} tokens, {case['ranks']} ranks: rows {rows:.3f}, target {target}")


if __name__ == "__main__":
    main()
