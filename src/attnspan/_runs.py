"""Where the keys of an id are: the runs of equal ids, in O(length) memory.

Shapes: b batch (1 or B), n table entries, s keys, q queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import NUMPY, Array, Arrays


def find_runs(
    arrays: Arrays, q_ids: Array, kv_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """The runs of keys whose id is the query's.

    Args:
        q_ids: int64 (b, q).
        kv_ids: int64 (b, s).
        max_runs: how many runs are returned per query.

    Returns:
        `max_runs` pairs lo, hi of int32 (b, q), ascending, the empty ones last as (0, 0), and bool (b, q):
        the id has more runs.
    """
    if arrays is NUMPY:
        ends, broken = _find_on_host(q_ids, kv_ids, max_runs)
        return list(map(tuple, ends)), broken
    if not (arrays.concrete(q_ids) and arrays.concrete(kv_ids)):
        return _look_up(arrays, kv_ids, q_ids, max_runs)
    keys = arrays.to_numpy(kv_ids)
    ends, broken = _find_on_host(keys if q_ids is kv_ids else arrays.to_numpy(q_ids), keys, max_runs)
    pairs = [(arrays.asarray(lo, "int32"), arrays.asarray(hi, "int32")) for lo, hi in ends]
    return pairs, arrays.asarray(broken, "bool")


_Host = np.ndarray[Any, Any]


def _find_on_host(q_ids: _Host, kv_ids: _Host, max_runs: int) -> tuple[_Host, _Host]:
    """The ends (max_runs, 2, b, q) and the mark, from values: sorts and looks up runs instead of tokens."""
    batch, rows = max(len(q_ids), len(kv_ids)), q_ids.shape[1]
    ends, broken = np.zeros((max_runs, 2, batch, rows), np.int32), np.zeros((batch, rows), bool)
    for b in range(batch):
        keys, queries = kv_ids[b % len(kv_ids)], q_ids[b % len(q_ids)]
        start, length = _run_lengths(keys)
        q_start, q_length = (start, length) if q_ids is kv_ids else _run_lengths(queries)
        order = keys[start].argsort(kind="stable")
        ids, start, length = keys[start][order], start[order], length[order]
        wanted = queries[q_start]
        first = ids.searchsorted(wanted)
        count = ids.searchsorted(wanted, side="right") - first
        broken[b] = (count > max_runs).repeat(q_length)
        for r in range(max_runs):
            run, exists = np.minimum(first + r, len(ids) - 1), count > r
            ends[r, 0, b] = (start[run] * exists).repeat(q_length)
            ends[r, 1, b] = ((start[run] + length[run]) * exists).repeat(q_length)
    return ends, broken


def _run_lengths(ids: _Host) -> tuple[_Host, _Host]:
    """Start and length of each run of equal neighbours in (s,)."""
    changes = np.ones(len(ids) + 1, bool)
    changes[1:-1] = ids[1:] != ids[:-1]
    ends = changes.nonzero()[0] if len(ids) else np.zeros(1, np.intp)
    return ends[:-1], ends[1:] - ends[:-1]


def _look_up(
    arrays: Arrays, kv_ids: Array, q_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """The same without reading values, from the keys in order of id and place."""
    start = arrays.cast(arrays.argsort(kv_ids), "int32")
    ids, end = arrays.take_along(kv_ids, start), start + 1
    n = ids.shape[-1]
    # Not slices of n - 1 pieces: a compiler would tell a single one from several.
    place = arrays.arange(n)
    before = arrays.maximum(place - 1, 0)
    opens = (ids != arrays.take_along(ids, before)) | (start != arrays.take_along(end, before))
    run = arrays.cast(arrays.cumsum(arrays.cast(opens & (place > 0), "int32")), "int32")
    first = arrays.searchsorted(ids, q_ids)
    last = arrays.searchsorted(ids, q_ids, right=True) - 1
    known = last >= first
    first, last = arrays.clip(first, 0, n - 1), arrays.clip(last, 0, n - 1)
    first_run, last_run = arrays.take_along(run, first), arrays.take_along(run, last)
    pairs = []
    for r in range(max_runs):
        wanted = first_run + r
        exists = known & (wanted <= last_run)
        opening = first if r == 0 else arrays.clip(arrays.searchsorted(run, wanted), 0, n - 1)
        # A legal row's only run ends with the id's last piece; no search is needed for it.
        closing = last if max_runs == 1 else arrays.searchsorted(run, wanted, right=True) - 1
        lo, hi = arrays.take_along(start, opening), arrays.take_along(end, arrays.clip(closing, 0, n - 1))
        pairs.append((arrays.where(exists, lo, 0), arrays.where(exists, hi, 0)))
    return pairs, known & (last_run - first_run >= max_runs)
