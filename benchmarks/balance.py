"""Balance of work and number of foreign rows: python benchmarks/balance.py [--packings N]

Packs the documents of the training job (the standard library, as bytes) into rows of S tokens, causal within
documents, and partitions each packing over P ranks with every method. The benchmark reports two ratios. The
first is the visible pairs of the busiest rank over the mean. The second is the largest number of foreign rows
of a rank over the S - n rows of a ring. No layout is below the bound: the rank with the last row of the
longest document fetches the whole document except its own n rows.

Writes benchmarks/results/balance.json.gz. Finished cases are stored there, so that an interrupted run
continues with the next case.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnspan import causal, documents
from attnspan.masks import Prepared
from attnspan.parallel import Layout
from attnspan_lab.files import read_json, write_json

OUTPUT = Path(__file__).parents[1] / "benchmarks" / "results" / "balance.json.gz"
#: Tokens and ranks, with the maximum mean share of a ring's rows for "balanced".
CASES = {(131_072, 8): 0.49, (131_072, 64): 0.50, (1_048_576, 64): 0.18}
MOST_PAIRS = 1.01
METHODS = ("balanced", "contiguous", "zigzag")


def packings(seq_len: int, count: int) -> Iterator[np.ndarray]:
    """Yield document offsets of rows from the training job's stream, seed 0."""
    from train.config import TrainConfig
    from train.data import PackedStream
    from train.documents import Vocabulary, load_data

    corpus = load_data(TrainConfig(), Vocabulary()).train
    stream = PackedStream(corpus, seq_len=seq_len, batch_size=1, seed=0)
    for _ in range(count):
        ids = next(stream).ids[0].numpy()
        yield np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [seq_len]])


def measure(mask: Prepared, seq_len: int, ranks: int, method: Any) -> dict[str, float]:
    """Compute the imbalance, and the foreign rows of the busiest and the mean rank over a ring's rows."""
    layout = Layout.of(mask, q_len=seq_len, ranks=ranks, method=method)
    cost = layout.plan(heads=(1, 1), strategy="exchange").cost()
    rows = cost.fetched / (seq_len - layout.rows_per_rank)
    return {"pairs": cost.balance, "rows": rows.max(), "mean_rows": rows.mean()}


def case_of(seq_len: int, ranks: int, count: int) -> dict[str, Any]:
    """Collect samples of each method and of the bound over the packings."""
    each = -(-seq_len // ranks)
    bound, found = [], {method: [] for method in METHODS}
    for offsets in packings(seq_len, count):
        bound.append(max(int(np.diff(offsets).max()) - each, 0) / (seq_len - each))
        mask = (causal() & documents(offsets)).prepare(seq_len, seq_len)
        for method, samples in found.items():
            samples.append(measure(mask, seq_len, ranks, method))
    methods = {name: {key: [float(x[key]) for x in rows] for key in rows[0]} for name, rows in found.items()}
    return {"tokens": seq_len, "ranks": ranks, "packings": count, "bound": bound, "methods": methods}


def show(cases: list[dict[str, Any]]) -> None:
    """Print the Markdown tables of docs/partition.md, and whether the targets are met."""
    print("| tokens, ranks | | max/mean pairs: mean (worst) | rows: mean | median | worst | mean rank |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        name = f"{case['tokens']:,}, {case['ranks']}"
        for method, x in case["methods"].items():
            pairs, rows = np.array(x["pairs"]), np.array(x["rows"])
            print(
                f"| {name} | {method} | {pairs.mean():.3f} ({pairs.max():.3f}) | {rows.mean():.3f} "
                f"| {np.median(rows):.3f} | {rows.max():.3f} | {np.mean(x['mean_rows']):.3f} |"
            )
            name = ""
        bound = np.array(case["bound"])
        print(f"| | bound | | {bound.mean():.3f} | {np.median(bound):.3f} | {bound.max():.3f} | |")
    for case in cases:
        ours, target = case["methods"]["balanced"], CASES[case["tokens"], case["ranks"]]
        met = np.mean(ours["rows"]) <= target and max(ours["pairs"]) <= MOST_PAIRS
        print(
            f"{case['tokens']:,} tokens, {case['ranks']} ranks, {case['packings']} packings: rows "
            f"{np.mean(ours['rows']):.3f} (target {target}), max/mean pairs at most {max(ours['pairs']):.4f} "
            f"(target {MOST_PAIRS}): {'met' if met else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packings", type=int, default=1000)
    parser.add_argument("--fresh", action="store_true", help="ignore stored results and start again")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    results: dict[str, Any] = {"packings": args.packings, "cases": []}
    results["environment"] = {"python": platform.python_version(), "numpy": np.__version__}
    if args.output.exists() and not args.fresh:
        kept = read_json(args.output)
        results = kept if kept["packings"] == args.packings else results
    for case in list(CASES)[len(results["cases"]) :]:
        results["cases"].append(case_of(*case, args.packings))
        write_json(args.output, results)
    show(results["cases"])


if __name__ == "__main__":
    main()
