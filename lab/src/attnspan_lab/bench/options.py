"""The options of ``attnspan bench``. This module imports no framework."""

# ruff: noqa: RUF009 (`option` makes a field of the dataclass)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnspan_lab.console import option, words

__all__ = ["NAMES", "BenchOptions"]

_what = partial(option, "Selection")
_how = partial(option, "Measurement")
_where = partial(option, "Output")
#: Help text of the arguments.
NAMES = (
    'names of workloads or families, patterns like "long-*", "grid", "training" (default: all but these two)'
)


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command. Each field's metadata has its help text. Lists are comma-separated."""

    names: tuple[str, ...] = ()
    workload: str = _what("more names, separated by commas", default="")
    full: bool = _what("measure everything: grid, training, every dtype, memory", "--full", default=False)
    dtypes: str = _what("some of float32, bfloat16, float16 (default: float32,bfloat16)", default="")
    modes: str = _what("forward or forward+backward (default: both)", default="")
    lengths: str = _what("keep only workloads with these numbers of keys, such as 1024,4096", default="")
    head_dims: str = _what("keep only workloads with these head dims, such as 64,128", default="")
    peers: str = _what(
        "names from --list (default: all; on the grid torch's fused kernels, and OpenVINO if installed)",
        default="",
    )
    workloads: Path | None = _what(
        "JSON file with your own workloads, used instead of the default ones", default=None
    )

    device: str = _how("cpu or cuda", default="cpu")
    threads: int | None = _how("number of CPU threads (default: torch's)", default=None)
    samples: int = _how("samples per peer and cell, 9 or more", default=25)
    seconds: float = _how(
        "seconds per peer and cell; slow peers get fewer samples, but at least 9", default=1.0
    )
    width: float = _how(
        "mark ratios as noisy if their interval is wider than this fraction of the ratio", default=0.04
    )
    cold: bool | None = _how(
        "empty the caches before each sample (default: only for decoding)", "--cold/--warm", default=None
    )
    memory: bool | None = _how(
        "also measure the peak memory of each peer", "--memory/--no-memory", default=None
    )
    rounds: int = _how("training: number of steps with each attention, 9 or more", default=20)
    ranks: int = _how("training: also compare this number of context-parallel ranks with one rank", default=1)

    json: Path | None = _where(
        "write raw samples to this JSON file after every cell (.gz compresses)", default=None
    )
    html: Path | None = _where(
        "write a self-contained HTML page of the results, also with --show", default=None
    )
    list: bool = _where("print the names of workloads and peers, and exit", "--list", default=False)
    show: Path | None = _where("print the tables of a results file, and exit", default=None)
    cite: Path | None = _where(
        "print a results file as Markdown, and exit; incomplete or unclean files are an error", default=None
    )
    summary: Path | None = _where("print the grid's summary of a results file, and exit", default=None)
    compare: tuple[Path, Path] | None = _where(
        "compare two results files, old and new; exit code 1 if something became slower", default=None
    )

    @property
    def asked(self) -> tuple[str, ...]:
        """All requested names, from the arguments and ``--workload``."""
        return (*self.names, *words(self.workload))
