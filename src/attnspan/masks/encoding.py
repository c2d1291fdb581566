"""Run-length encoding of booleans as spans, for values and in traced programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnspan.base.arrays import Array, Arrays
from attnspan.errors import expect

CHUNK_PAIRS = 1 << 22
"""The most (query, key) pairs that are encoded at once for a batch element and head. It bounds the memory."""

TRACED_RUNS = 8
"""R in a traced program without `max_runs`, because R cannot depend on data there."""

_Values = np.ndarray[Any, Any]

_operators: dict[str, Callable[[Any, int], Any]] = {}


def register_operator(framework: str, operator: Callable[[Any, int], Any]) -> None:
    """Set the function that `encode_traced` calls in traced programs of a framework (`Arrays.name`)."""
    _operators[framework] = operator


def encode_traced(arrays: Arrays, visible: Array, runs: int) -> Array:
    """Encode booleans (B, H, rows, k_len) of a traced program as int32 (B, H, rows, runs, 2).

    A query with more runs raises if the operator runs on the host. On a device, its spans are illegal.

    Raises:
        OptionError: If no front end has registered an operator.
    """
    if arrays.name != "torch":
        return _encode_in_passes(arrays, visible, runs)
    expected = f"attnspan.{arrays.name}, which encodes booleans in traced programs, to be imported"
    got, remedy = "a program traced without it", f"Import attnspan.{arrays.name} first"
    expect(arrays.name in _operators, "from_predicate, from_dense, keys", expected, got, remedy)
    return _operators[arrays.name](visible, runs)


def _encode_in_passes(arrays: Arrays, visible: Array, runs: int) -> Array:
    """Encode with plain operations: two reductions per run, which a compiler fuses with the predicate."""
    k_len = visible.shape[-1]
    if 0 in visible.shape:
        return arrays.full((*visible.shape[:-1], runs, 2), 0)
    # All operands have the same number of dims, because JAX can be configured to refuse rank promotion.
    lead = (1,) * (visible.ndim - 1)
    keys, reached, ends = arrays.arange(k_len).reshape(*lead, k_len), 0, []
    for _ in range(runs):
        lo = arrays.where(visible & (keys >= reached), keys, k_len).min(-1)
        hi = arrays.where(~visible & (keys >= lo[..., None]), keys, k_len).min(-1)
        reached = hi[..., None]
        exists = lo < k_len
        ends.append(arrays.stack([arrays.where(exists, lo, 0), arrays.where(exists, hi, 0)]))
    more = arrays.any(visible & (keys >= reached))[..., None]
    illegal = arrays.asarray([0, -1], "int32").reshape(*lead, 1, 2)
    spans = [arrays.where(more[..., None], illegal, x[..., None, :]) for x in ends]
    return arrays.cast(arrays.xp.concatenate(spans, axis=-2), "int32")


def encode(visible: _Values, runs: int | None = None, what: str = "from_dense") -> _Values:
    """Run-length encode the rows of a boolean mask.

    Args:
        visible: bool (B, H, rows, k_len).
        runs: R. None means the largest number of runs in a row, at least 1.
        what: Name of the caller, for the error.

    Returns:
        int32 (B, H, rows, R, 2), with empty spans last, as (0, 0).

    Raises:
        OptionError: If a row has more than `runs` runs.

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
    expected = "at most max_runs={} runs of visible keys for each query"
    remedy = (
        f"Pass max_runs={most} or more (in a traced program it is {TRACED_RUNS} unless given), or lower the "
        "mask outside the compiled function, with mask.prepare(...)"
    )
    expect(runs is None or most <= runs, what, expected, f"a query with {most}", remedy, runs)
    row, at = np.nonzero(edges)
    # Edges of a row alternate between starts and stops, and come in pairs.
    bounds = table(row[::2], at[::2], at[1::2], len(flat), runs)
    return bounds.reshape(*lead, -1, 2)


def table(row: _Values, lo: _Values, hi: _Values, rows: int, runs: int | None = None) -> _Values:
    """Write spans [lo, hi), sorted by row and place, as int32 bounds (rows, runs, 2).

    `runs` is at least the most spans of a row. None means exactly that number.
    """
    count = np.bincount(row, minlength=rows)
    runs = max(int(count.max(initial=0)), 1) if runs is None else runs
    bounds = np.zeros((rows, runs, 2), np.int32)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    bounds[row, slot] = np.stack([lo, hi], axis=-1)
    return bounds
