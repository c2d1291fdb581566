"""Booleans to spans: run-length encoding of the rows of a mask, on values and in traced programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnspan.base.arrays import Array, Arrays
from attnspan.errors import expect

__all__ = ["CHUNK_PAIRS", "TRACED_RUNS", "encode", "encode_traced", "register_operator", "table"]

CHUNK_PAIRS = 1 << 22
"""(query, key) pairs that are encoded at once, per batch row and head: it bounds the memory."""

TRACED_RUNS = 8
"""R in a traced program without `max_runs`: there it cannot follow from data."""

_Values = np.ndarray[Any, Any]

_operators: dict[str, Callable[[Any, int], Any]] = {}


def register_operator(framework: str, operator: Callable[[Any, int], Any]) -> None:
    """Set what `encode_traced` calls in the programs of a framework, by its `Arrays.name`."""
    _operators[framework] = operator


def encode_traced(arrays: Arrays, visible: Array, runs: int) -> Array:
    """Encode booleans (B, H, rows, k_len) of a traced program as int32 (B, H, rows, runs, 2).

    A row with more runs raises if the operator runs on the host, and is illegal elsewhere.

    Raises:
        OptionError: if no front end has registered an operator.
    """
    if arrays.name != "torch":
        return _encode_in_passes(arrays, visible, runs)
    expected = f"attnspan.{arrays.name}, which encodes booleans in traced programs, to be imported"
    got, remedy = "a program traced without it", f"Import attnspan.{arrays.name} first"
    expect(arrays.name in _operators, "from_predicate, from_dense, keys", expected, got, remedy)
    return _operators[arrays.name](visible, runs)


def _encode_in_passes(arrays: Arrays, visible: Array, runs: int) -> Array:
    """In plain operations: two reductions per run, which a compiler fuses with those of the booleans."""
    k_len = visible.shape[-1]
    if 0 in visible.shape:
        return arrays.full((*visible.shape[:-1], runs, 2), 0)
    # All operands have the same number of dims: JAX can be told to refuse others.
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
        runs: R. None: the largest number of runs in a row, at least 1.
        what: the caller, for the error.

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
    expected = "rows of at most max_runs={} runs of visible keys"
    remedy = (
        f"Pass max_runs={most} or more (in a traced program it is {TRACED_RUNS} unless given), or lower the "
        "mask outside the compiled function, with mask.prepare(...)"
    )
    expect(runs is None or most <= runs, what, expected, f"one with {most}", remedy, runs)
    row, at = np.nonzero(edges)
    # Edges of a row alternate between starts and stops, and come in pairs.
    bounds = table(row[::2], at[::2], at[1::2], len(flat), runs)
    return bounds.reshape(*lead, -1, 2)


def table(row: _Values, lo: _Values, hi: _Values, rows: int, runs: int | None = None) -> _Values:
    """Spans [lo, hi), sorted by row and place, as int32 bounds (rows, runs, 2); runs: at least the most."""
    count = np.bincount(row, minlength=rows)
    runs = max(int(count.max(initial=0)), 1) if runs is None else runs
    bounds = np.zeros((rows, runs, 2), np.int32)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    bounds[row, slot] = np.stack([lo, hi], axis=-1)
    return bounds
