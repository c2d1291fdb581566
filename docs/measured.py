"""A page of benchmarks for each machine, from raw files: `python docs/measured.py` writes docs/figures/*.md.

A test compares the pages with the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from attnspan.errors import expect
from attnspan_lab.bench.cited import cite, reasons_not_to_cite
from attnspan_lab.bench.results import Results
from attnspan_lab.console import ratio_digits

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "figures"

HEAD = """# {title}

{about}

Each number is a *speedup*: the time of the other library over the time of attnspan, measured in turn in one
process. Above 1, attnspan is faster. Each number is a median of at least nine pairs of samples. `~` marks an
interval that is wider than 4 %. `?` marks a ratio that may be 1. A `-` marks a cell that was not measured.
This page is generated from raw files ([How we measure](../benchmarks.md)).
"""
SECTION = """
## {title}

The raw file is [`{file}`](../../benchmarks/results/{file}). It was measured on {date} with {versions},
{threads} threads, instruction set `{isa}`, at revision `{revision}`:

```bash
{command}
attnspan bench --cite benchmarks/results/{file}    # prints this table
```

{table}
"""


@dataclass(frozen=True)
class Machine:
    """A page: its name, title and introduction, and a title and a command for each raw file."""

    name: str
    title: str
    about: str
    files: tuple[tuple[str, str, str], ...]


GRID = "attnspan bench grid --lengths {lengths} --head-dims {dims} --dtypes {dtypes}"
DOCUMENTS = (
    "attnspan bench documents-8 documents-32 documents-256 documents-corpus --dtypes {dtypes} "
    "--peers sdpa-dense-mask,sdpa-per-document"
)
PER_DOCUMENT = DOCUMENTS.replace("sdpa-dense-mask,", "")

MACHINES = (
    Machine(
        "zen5",
        "AMD EPYC (Zen 5), 2 cores",
        "This machine has AVX-512 with bfloat16 products. Some runs are held to AVX2 or to plain AVX-512 by "
        "`ATTNSPAN_ISA`, and the other libraries by their own variables ([Building](../building.md)).",
        (
            ("zen5-avx512bf16.json.gz", "AVX-512 with bfloat16 products", GRID),
            ("zen5-avx512bf16-4096.json.gz", "AVX-512 with bfloat16 products, 4,096 tokens", GRID),
            ("zen5-avx512bf16-4096h.json.gz", "AVX-512 with bfloat16 products, 4,096 tokens, float16", GRID),
            ("zen5-avx512.json.gz", "AVX-512 without bfloat16 products", GRID),
            ("zen5-avx512-4096.json.gz", "AVX-512 without bfloat16 products, 4,096 tokens", GRID),
            ("zen5-avx2.json.gz", "AVX2, float32", GRID),
            ("zen5-avx2-4096.json.gz", "AVX2, 4,096 tokens", GRID),
            ("zen5-avx2-16.json.gz", "AVX2, 16-bit dtypes, forward", GRID),
            ("zen5-avx2-16-backward.json.gz", "AVX2, 16-bit dtypes, forward and backward", GRID),
        ),
    ),
    Machine(
        "xeon-tiles",
        "Intel Xeon with matrix tiles (Granite Rapids), 2 cores",
        "This machine has AMX tiles for bfloat16. Its clock changes while the tiles work, so most intervals "
        "are wide.",
        (("tiles-amx.json.gz", "Matrix tiles", GRID),),
    ),
    Machine(
        "zen4",
        "AMD EPYC (Zen 4), 2 cores",
        "This machine has AVX-512 with bfloat16 products, half as wide as Zen 5's. Some runs are held to "
        "AVX2 or to plain AVX-512 by `ATTNSPAN_ISA`, and the other libraries by their own variables "
        "([Building](../building.md)).",
        (
            ("zen4-avx512bf16.json.gz", "AVX-512 with bfloat16 products", GRID),
            ("zen4-avx512bf16-4096.json.gz", "AVX-512 with bfloat16 products, 4,096 tokens", GRID),
            ("zen4-avx512.json.gz", "AVX-512 without bfloat16 products", GRID),
            ("zen4-avx2.json.gz", "AVX2", GRID),
            ("zen4-documents-avx512.json.gz", "Packed documents, AVX-512", DOCUMENTS),
            (
                "zen4-documents-avx512bf16.json.gz",
                "Packed documents, AVX-512 with bfloat16 products",
                PER_DOCUMENT,
            ),
        ),
    ),
)


def page(machine: Machine) -> str:
    """The Markdown of a machine's page."""
    parts = [HEAD.format(title=machine.title, about=machine.about)]
    for file, title, command in machine.files:
        results = Results.load(RESULTS / file)
        facts = results.environment
        versions = ", ".join(
            f"{name} {version}" for name in ("torch", "openvino") if (version := facts["versions"].get(name))
        )
        parts.append(
            SECTION.format(
                title=title,
                file=file,
                date=facts["date"][:10],
                versions=versions,
                threads=facts["threads"],
                isa=facts["isa"],
                revision=facts["revision"],
                command=_command(command, results),
                table=cite(results),
            )
        )
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


def _command(command: str, results: Results) -> str:
    """The command with the sizes that a file has."""
    work = [cell.workload for cell in results.cells]
    modes = sorted({cell.mode for cell in results.cells})
    numbers = {"lengths": {w.k_len for w in work}, "dims": {w.head_dim for w in work}}
    sizes = {name: ",".join(map(str, sorted(found))) for name, found in numbers.items()}
    found = command.format(**sizes, dtypes=",".join(sorted({w.dtype for w in work})))
    isa = results.environment["variables"].get("ATTNSPAN_ISA")
    prefix = f"ATTNSPAN_ISA={isa} " if isa else ""
    return f"{prefix}{found}{f' --modes {modes[0]}' if len(modes) == 1 else ''}"


@dataclass(frozen=True)
class Row:
    """A row of README's table: lowest and highest speedup of a file's cells over one peer."""

    what: str
    file: str
    peer: str
    workloads: str  # a pattern of names


_GRIDS = (
    ("Zen 5 with AVX-512", "zen5-avx512bf16.json.gz"),
    ("Zen 5 held to AVX2", "zen5-avx2.json.gz"),
    ("Zen 4 with AVX-512", "zen4-avx512bf16.json.gz"),
    ("Xeon with matrix tiles", "tiles-amx.json.gz"),
)
ROWS = (
    *(
        Row(f"{machine}, {mask} mask", file, "sdpa-flash", f"grid-{mask}-*")
        for machine, file in _GRIDS
        for mask in ("full", "causal")
    ),
)
COLUMNS = (
    ("float32", "forward"),
    ("float32", "forward+backward"),
    ("bfloat16", "forward"),
    ("bfloat16", "forward+backward"),
)
MARKS = ("<!-- measured -->\n", "<!-- end of measured -->")


def readme_table() -> str:
    """Speedups over SDPA, lowest to highest, with "~" where an interval is wide; "-" was not measured."""
    lines = ["| speedup over SDPA | " + " | ".join(f"{dtype}, {mode}" for dtype, mode in COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(COLUMNS))
    for row in ROWS:
        results = Results.load(RESULTS / row.file)
        expect(
            not (reasons := reasons_not_to_cite(results)),
            row.file,
            "a file to cite",
            reasons,
            "Measure again",
        )
        lines.append(f"| {row.what} | {' | '.join(_range(results, row, *column) for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def _range(results: Results, row: Row, dtype: str, mode: str) -> str:
    cells = [
        x for x in results.cells if fnmatch(x.workload.name, row.workloads) and x.workload.dtype == dtype
    ]
    runs = [run for x in cells if x.mode == mode and (run := x.run(row.peer)) and run.ratio]
    if not runs:
        return "-"
    ends = [pick(runs, key=lambda run: run.ratio.median) for pick in (min, max)]
    low, high = (f"{ratio_digits(run.ratio.median)}{' ~' if run.noisy else ''}" for run in ends)
    return low if low == high else f"{low} to {high}"


def readme() -> str:
    """README with the table of today's files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}{readme_table()}{MARKS[1]}{after}"


def main() -> None:
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    for machine in MACHINES:
        (FOLDER / f"{machine.name}.md").write_text(page(machine), encoding="utf-8")


if __name__ == "__main__":
    main()
