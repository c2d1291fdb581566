"""Named attention problems for benchmarks.

Sizes: batch B, heads Hq/Hkv, queries Sq, keys Sk, head dim D. Masks are text in the syntax of
`attnspan.parse`, with two more names. ``packed(n)`` means n documents of equal length. ``corpus(seed)`` means
documents with the lengths of the files of Python's standard library. Both use the workload's number of keys.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np

from attnspan.errors import OptionError, expect
from attnspan.library.text import names, parse_with
from attnspan.masks import Mask, documents
from attnspan_lab.bench.cells import Workload
from attnspan_lab.files import from_plain, read_json

__all__ = [
    "DTYPES",
    "MODES",
    "builtin",
    "corpus_offsets",
    "grid",
    "load_workloads",
    "mask_of",
    "minimal_bytes",
    "select",
    "total_flops",
    "visible_pairs",
]

DTYPES = ("float32", "bfloat16", "float16")
MODES = ("forward", "forward+backward")

GRID_HEAD_DIMS = (32, 64, 128, 256)
GRID_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384)
_GRID_HEADS = 8
_LONG_LENGTHS = (2048, 8192, 16384, 32768, 65536)
_BYTES_PER_TOKEN = 4
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def builtin() -> tuple[Workload, ...]:
    """List the named workloads, without the grid, in every dtype.

    Example:
        >>> sorted({workload.family for workload in builtin()})[:3]
        ['causal', 'cross', 'decode']
        >>> next(w for w in builtin() if w.name == "report-shape").sizes
        '5x16384 D128'
    """
    return tuple(workload for dtype in DTYPES for workload in _named(dtype))


def _named(dtype: str) -> Iterable[Workload]:
    def work(
        name: str,
        family: str,
        mask: str,
        lengths: int | tuple[int, int],
        heads: int | tuple[int, int] = 8,
        dim: int = 64,
        note: str = "",
        batch: int = 1,
    ) -> Workload:
        q_len, k_len = (lengths, lengths) if isinstance(lengths, int) else lengths
        q_heads, kv_heads = (heads, heads) if isinstance(heads, int) else heads
        return Workload(name, family, batch, q_heads, kv_heads, q_len, k_len, dim, dim, dtype, mask, note)

    for dim in (64, 128):
        yield work(f"dense-d{dim}", "dense", "full", 2048, dim=dim)
        yield work(f"causal-d{dim}", "causal", "causal", 4096, dim=dim)
    yield work("window-256", "window", "window(256)", 8192)
    yield work("window-1024", "window", "window(1024)", 8192, dim=128)
    for count in (8, 32, 256):
        yield work(f"documents-{count}", "documents", f"causal & packed({count})", 8192)
    yield work("documents-corpus", "documents", "causal & corpus(3)", 8192, note="heavy-tailed lengths")
    yield work("documents-corpus-32k", "documents", "causal & corpus(0)", 32768, note="heavy-tailed lengths")
    yield work("documents-both-ways", "documents", "packed(32)", 8192, note="bidirectional, as an encoder")
    yield work("prefix-512", "prefix", "causal | prefix(512)", 2048)
    yield work("gqa-causal", "gqa", "causal", 2048, (32, 8), 128)
    for q_len, k_len in ((1, 8192), (4, 8192), (16, 8192), (1, 65536), (16, 65536)):
        yield work(f"decode-{q_len}-{k_len}", "decode", "causal", (q_len, k_len), (32, 8), 128)
    yield work("decode-mqa-1-65536", "decode", "causal", (1, 65536), (8, 1), 128, "fewer heads than threads")
    yield work("decode-batch-1-4096", "decode", "causal", (1, 4096), (32, 8), 128, batch=8)
    for length, head in ((16, 1), (64, 8), (128, 8)):
        yield work(f"small-{length}", "small", "causal", length, head, note="the cost of a call")
    for length in _LONG_LENGTHS:
        yield work(f"long-{length}", "long", "window(1023)", length, 2, note="fixed window: flat per pair")
    yield work("cross-77", "cross", "full", (4096, 77), note="text condition of an image model")
    yield work("cross-1024-4096", "cross", "full", (1024, 4096), dim=128)
    yield work("report-shape", "report", "full", 16384, 5, 128, "shape of a report from the field")


def grid() -> tuple[Workload, ...]:
    """List the grid for summaries: {full, causal} x dtype x head dim x length, with 8 heads.

    Lengths of 16,384 and more have 2 heads, so that a cell fits on a small machine.

    Example:
        >>> len(grid())
        168
        >>> grid()[0].name
        'grid-full-d32-s128'
    """
    return tuple(
        _grid_cell(mask, dtype, dim, length)
        for dtype in DTYPES
        for mask in ("full", "causal")
        for dim in GRID_HEAD_DIMS
        for length in GRID_LENGTHS
    )


def _grid_cell(mask: str, dtype: str, dim: int, length: int) -> Workload:
    heads = _GRID_HEADS if length < 16384 else 2
    name = f"grid-{mask}-d{dim}-s{length}"
    return Workload(name, "grid", 1, heads, heads, length, length, dim, dim, dtype, mask)


def mask_of(workload: Workload) -> Mask:
    """Parse the mask of a workload.

    Raises:
        OptionError: The text is not a mask.

    Example:
        >>> work = Workload("two", "documents", 1, 1, 1, 4, 4, 8, 8, "float32", "causal & packed(2)")
        >>> mask_of(work).spans(4, 4).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4]]
    """
    k_len = workload.k_len

    def packed(count: int) -> Mask:
        return documents(np.linspace(0, k_len, count + 1).astype(np.int32))

    def corpus(seed: int) -> Mask:
        return documents(corpus_offsets(k_len, seed))

    return parse_with(workload.mask, {**names(), "packed": packed, "corpus": corpus})


@lru_cache(maxsize=8)
def _file_tokens() -> tuple[int, ...]:
    """Count the tokens of each module of Python's standard library, at four bytes each, in stable order."""
    found: list[int] = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        own = (x for x in folders if x not in ("site-packages", "dist-packages") and x[0] != ".")
        folders[:] = sorted(own)
        modules = sorted(x for x in files if x.endswith(".py") and x[0] != ".")
        found += [Path(folder, x).stat().st_size for x in modules]
    return tuple(max(1, size // _BYTES_PER_TOKEN) for size in found if size)


def corpus_offsets(k_len: int, seed: int) -> np.ndarray:
    """Draw documents from Python's standard library until they fill a row. Return the cumulative lengths.

    Args:
        k_len: Tokens of the row. The last document is cut at the end.
        seed: Random seed of the documents' order.

    Example:
        >>> offsets = corpus_offsets(8192, seed=0)
        >>> int(offsets[0]), int(offsets[-1])
        (0, 8192)
    """
    draw, found = np.random.default_rng(seed), list[np.ndarray]()
    while sum(int(x.sum()) for x in found) < k_len:
        found.append(np.array(_file_tokens(), np.int64))
        draw.shuffle(found[-1])
    ends = np.cumsum(np.concatenate(found))
    ends = ends[ends < k_len]
    return np.concatenate([[0], ends, [k_len]]).astype(np.int32)


def visible_pairs(workload: Workload) -> int:
    """Count the visible (query, key) pairs over all batch elements and query heads.

    Example:
        >>> visible_pairs(Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal"))
        20
    """
    spans = mask_of(workload).spans(
        workload.q_len, workload.k_len, batch=workload.batch, heads=workload.q_heads
    )
    batch, heads = (int(size) for size in spans.bounds.shape[:2])
    rows = np.asarray(spans.cost(), np.int64)
    return int(rows.sum()) * (workload.batch // batch) * (workload.q_heads // heads)


def total_flops(workload: Workload, mode: str, pairs: int) -> float:
    """Count FLOPs over visible pairs: 2 * pairs * (D + Dv) forward, and 2.5 times as many backward.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> total_flops(work, "forward", 20), total_flops(work, "forward+backward", 20)
        (640.0, 2240.0)
    """
    forward = 2.0 * pairs * (workload.head_dim + workload.v_dim)
    return forward if mode == "forward" else 3.5 * forward


def minimal_bytes(workload: Workload, mode: str) -> float:
    """Compute the minimum memory traffic: every input is read once, and every result is written once.

    Example:
        >>> minimal_bytes(Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal"), "forward")
        1024.0
    """
    queries = workload.batch * workload.q_heads * workload.q_len
    keys = workload.batch * workload.kv_heads * workload.k_len
    q, k, v = queries * workload.head_dim, keys * workload.head_dim, keys * workload.v_dim
    out = queries * workload.v_dim
    # Forward: q, k, v, out. Backward reads q, k, v, out, dout and writes dq, dk, dv.
    elements = q + k + v + out if mode == "forward" else 3 * (q + k + v) + 3 * out
    return float(elements * _ELEMENT_BYTES[workload.dtype])


def select(
    workloads: Sequence[Workload],
    names: Sequence[str] = (),
    *,
    dtypes: Sequence[str] = (),
    lengths: Sequence[int] = (),
    head_dims: Sequence[int] = (),
) -> tuple[Workload, ...]:
    """Select workloads. An empty selection takes all.

    Args:
        workloads: All workloads.
        names: Names, families, or patterns such as "documents-*".
        dtypes: Element types.
        lengths: Numbers of keys.
        head_dims: Head dims.

    Raises:
        OptionError: A name matches nothing, or nothing is left.

    Example:
        >>> [work.label for work in select(builtin(), ["dense-*"], dtypes=["float32"])]
        ['dense-d64 float32', 'dense-d128 float32']
    """
    # If two workloads have the same label, the first counts: the user's workloads come before the named ones.
    workloads = list({work.label: work for work in reversed(workloads)}.values())[::-1]
    families = ", ".join(sorted({work.family for work in workloads}))
    for name in names:
        matched, known = (
            any(_matches(work, name) for work in workloads),
            f"a name, a pattern, or one of the families {families}",
        )
        expect(matched, "workloads", known, repr(name), "See attnspan bench --list")
    found = tuple(
        work
        for work in workloads
        if (not names or any(_matches(work, name) for name in names))
        and (not dtypes or work.dtype in dtypes)
        and (not lengths or work.k_len in lengths)
        and (not head_dims or work.head_dim in head_dims)
    )
    wanted = "at least one with these names, dtypes, lengths and head dims"
    expect(found, "workloads", wanted, "none", "Remove a restriction, or see attnspan bench --list")
    return found


def _matches(work: Workload, name: str) -> bool:
    return fnmatchcase(work.name, name) or fnmatchcase(work.family, name)


def load_workloads(path: Path) -> tuple[Workload, ...]:
    """Read the user's workloads: a JSON list of objects with the fields of `Workload`.

    Raises:
        OptionError: The file cannot be read, or a workload is not one.
    """
    what = "a JSON list of workloads"
    data = read_json(path, what)
    expect(isinstance(data, list), str(path), what, type(data).__name__, "Wrap the workload in a list")
    found = tuple(from_plain(Workload, item, f"{path}[{index}]") for index, item in enumerate(data))
    labels = [work.label for work in found]
    for work in found:
        twice, remedy = "a unique name among workloads of the same dtype", "Rename one of them"
        expect(labels.count(work.label) == 1, f"{path}: {work.name}", twice, work.label, remedy)
        _check(work, path)
    return found


def _check(work: Workload, path: Path) -> None:
    sizes = (work.batch, work.q_heads, work.kv_heads, work.q_len, work.k_len, work.head_dim, work.v_dim)
    if min(sizes) < 1 or work.q_heads % work.kv_heads or work.dtype not in DTYPES:
        raise OptionError(
            f"{path}: {work.name}",
            expected=f"sizes of 1 or more, kv_heads that divide q_heads, a dtype of {', '.join(DTYPES)}",
            got=f"{work.sizes} {work.dtype}",
            remedy="Correct the workload",
        )
    visible_pairs(work)  # Raises an error if the mask does not fit the lengths.
