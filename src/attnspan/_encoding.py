"""Booleans to spans: run-length encoding of the rows of a mask, on values and in traced programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Array, Arrays
from .errors import OptionError

CHUNK_PAIRS = 1 << 22
"""(query, key) pairs that are looked at once, per batch row and head: what bounds the memory."""

TRACED_RUNS = 8
"""R in a traced program, where it cannot follow from data and no `max_runs` says it."""

_SMALL = 1 << 20
"""Bytes below which the size of spans is nobody's concern."""

_operators: dict[str, Callable[[Any, int], Any]] = {}


class SpansLargerThanMask(UserWarning):
    """The spans of a mask take more memory than its booleans would: its rows alternate too often."""


def register_operator(framework: str, operator: Callable[[Any, int], Any]) -> None:
    """Name what encodes booleans inside the programs of a framework: a front end calls this.

    Args:
        framework: as in `Arrays.name`.
        operator: (bool (B, H, rows, k_len), runs) -> int32 (B, H, rows, runs, 2), which refuses a row with
            more runs than that, or writes (0, -1) into each of its spans.

    Example:
        >>> _operators.get("numpy") is None  # NumPy traces nothing
        True
    """
    _operators[framework] = operator


def encode_traced(arrays: Arrays, visible: Array, runs: int) -> Array:
    """Encode booleans that nobody can read yet.

    Args:
        arrays: the framework that traces.
        visible: bool (B, H, rows, k_len).
        runs: R, static.

    Returns:
        int32 (B, H, rows, runs, 2). A row with more runs is refused where the operator runs on the host, and
        illegal elsewhere.

    Raises:
        OptionError: if no front end has registered an operator.
    """
    if arrays.name == "jax":
        return _encode_in_passes(arrays, visible, runs)
    if arrays.name not in _operators:
        raise OptionError(
            "from_predicate, from_dense",
            expected=f"attnspan.{arrays.name}, which encodes booleans in traced programs, to be imported",
            got="a program traced without it",
            remedy=f"Import attnspan.{arrays.name} first",
        )
    return _operators[arrays.name](visible, runs)


def _encode_in_passes(arrays: Arrays, visible: Array, runs: int) -> Array:
    """In plain operations: two reductions per run, which a compiler fuses with what makes the booleans."""
    k_len = visible.shape[-1]
    if 0 in visible.shape:
        return arrays.full((*visible.shape[:-1], runs, 2), 0)
    keys, reached, ends = arrays.arange(k_len), 0, []
    for _ in range(runs):
        lo = arrays.where(visible & (keys >= reached), keys, k_len).min(-1)
        hi = arrays.where(~visible & (keys >= lo[..., None]), keys, k_len).min(-1)
        reached = hi[..., None]
        exists = lo < k_len
        ends.append(arrays.stack([arrays.where(exists, lo, 0), arrays.where(exists, hi, 0)]))
    more = arrays.any(visible & (keys >= reached))[..., None]
    spans = [arrays.where(more[..., None], arrays.asarray([0, -1], "int32"), x[..., None, :]) for x in ends]
    return arrays.cast(arrays.xp.concatenate(spans, axis=-2), "int32")


def encode(
    visible: np.ndarray[Any, Any], runs: int | None = None, what: str = "from_dense"
) -> np.ndarray[Any, Any]:
    """Run-length encode the rows of a boolean mask.

    Args:
        visible: bool (B, H, rows, k_len).
        runs: R; None: the largest number of runs in a row, at least 1.
        what: who asks, for the error.

    Returns:
        int32 (B, H, rows, R, 2); empty spans last, as (0, 0).

    Raises:
        OptionError: if a row has more than `runs` runs.

    Example:
        >>> encode(np.array([[[[True, False, True]]]]))[0, 0, 0].tolist()
        [[0, 1], [2, 3]]
    """
    *lead, k_len = visible.shape
    if visible.size == 0:
        return np.zeros((*lead, runs or 1, 2), np.int32)
    flat = np.ascontiguousarray(visible).reshape(-1, k_len)
    edges = np.zeros((len(flat), k_len + 1), bool)
    edges[:, 0:1] = flat[:, 0:1]
    edges[:, 1:-1] = flat[:, 1:] != flat[:, :-1]
    edges[:, -1:] = flat[:, -1:]
    count = edges.sum(axis=1) // 2
    most = int(count.max(initial=0))
    if runs is not None and most > runs:
        raise too_many_runs(what, runs, most)
    width = max(most, 1) if runs is None else runs
    row, at = np.nonzero(edges)
    bounds = np.zeros((len(flat), width, 2), np.int32)
    # Edges of a row alternate between starts and stops, and come in pairs.
    slot = np.arange(len(row) // 2) - np.repeat(np.cumsum(count) - count, count)
    bounds[row[::2], slot] = np.stack([at[::2], at[1::2]], axis=-1)
    if runs is None and bounds.nbytes > max(flat.nbytes, _SMALL):
        warnings.warn(
            f"mask: its rows have up to {width} runs, so its spans take {bounds.nbytes >> 20} MiB where "
            f"booleans would take {flat.nbytes >> 20} MiB. Spans are meant for masks with few runs per row.",
            SpansLargerThanMask,
            stacklevel=2,
        )
    return bounds.reshape(*lead, width, 2)


def too_many_runs(what: str, runs: int, found: int) -> OptionError:
    """The error for a row with more runs of visible keys than the program has room for.

    Example:
        >>> str(too_many_runs("from_dense", 2, 3)).partition(". ")[0]
        'from_dense: expected rows of at most max_runs=2 runs of visible keys, got one with 3'
    """
    return OptionError(
        what,
        expected=f"rows of at most max_runs={runs} runs of visible keys",
        got=f"one with {found}",
        remedy=f"Pass max_runs={found} or more (in a traced program it is {TRACED_RUNS} unless given), or "
        "lower the mask outside the compiled function, with mask.prepare(...)",
    )
