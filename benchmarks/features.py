"""All combinations of mask, compiler, checkpointing and ranks, with attnspan's attention and its peers.

    python benchmarks/features.py                  # all cells, about ten minutes on two cores
    python benchmarks/features.py --covering       # a few cells that cover every pair of values

Prints a Markdown table and writes benchmarks/results/features.json. A cell compares results and
gradients with eager float64. It also checks that no graph breaks, that another mask does not recompile, and
for attnspan the number of kernel runs.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path

from _features import ATTENTIONS, FACTORS, Cell, run_cells

from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.doctor.torch.matrix import all_cells, covering
from attnspan_lab.files import write_json

RESULTS = Path(__file__).parent / "results" / "features.json"
ROWS = [(c, k, o) for c in FACTORS["compile"] for k in FACTORS["checkpoint"] for o in FACTORS["order"]]


def cells_of(attention: str) -> list[Cell]:
    """List the cells that an attention supports. Only attnspan can shard a sequence here."""
    ranks = FACTORS["ranks"] if attention == "attnspan" else FACTORS["ranks"][:2]
    return all_cells(Cell, FACTORS | {"mask": ATTENTIONS[attention], "ranks": ranks})


def table(found: dict[str, dict[Cell, str]]) -> list[str]:
    """Make the Markdown table: the number of passing cells of each attention, by compiler features."""
    names = list(found)
    lines = [
        "| compile | checkpoint | order | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for row in ROWS:
        shown = []
        for name in names:
            same = {c: w for c, w in found[name].items() if (c.compile, c.checkpoint, c.order) == row}
            good = sum(not w for w in same.values())
            shown.append(f"{good} of {len(same)}" if same else "")
        if any(shown):
            lines.append(f"| {' | '.join(row)} | {' | '.join(shown)} |")
    totals = [f"**{sum(not w for w in x.values())} of {len(x)}**" for x in found.values()]
    return [*lines, f"| all | | | {' | '.join(totals)} |"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--covering", action="store_true")
    parser.add_argument("--only", default=",".join(ATTENTIONS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, dict[Cell, str]] = {}
    for name in options.only.split(","):
        cells = cells_of(name)
        found[name] = {}
        for cell, what in run_cells(covering(cells) if options.covering else cells, name):
            found[name][cell] = what
            if what:
                print(f"{name}: {cell}: {what}", flush=True)
    rows = [
        {"attention": name, **asdict(cell), "failed": what}
        for name, x in found.items()
        for cell, what in x.items()
    ]
    if not options.covering:
        write_json(RESULTS, {"environment": describe_environment(), "cells": rows}, indent=1)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
