"""Where the keys of an id are: the runs of equal ids, without an array of more than O(length) elements.

Shapes: b batch (1 or B), n table entries, s keys, q queries.
"""

from __future__ import annotations

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
        `max_runs` pairs lo, hi of int32 (b, q), ascending, the empty ones last as (0, 0); and bool (b, q):
        the id has more runs than that.
    """
    if not (arrays.concrete(q_ids) and arrays.concrete(kv_ids)):
        return _look_up(arrays, _table(arrays, kv_ids), q_ids, max_runs)
    if arrays.name == "jax":  # Under jit, what JAX makes of arrays that can be read could not be read.
        return _find_by_numpy(arrays, q_ids, kv_ids, max_runs)
    batch = max(q_ids.shape[0], kv_ids.shape[0])
    rows = [
        _find_in_row(arrays, q_ids[b % len(q_ids)], kv_ids[b % len(kv_ids)], max_runs) for b in range(batch)
    ]
    if batch == 1:
        pairs, broken = rows[0]
        return [(lo[None], hi[None]) for lo, hi in pairs], broken[None]
    pairs = [
        (_rows(arrays, [row[0][r][0] for row in rows]), _rows(arrays, [row[0][r][1] for row in rows]))
        for r in range(max_runs)
    ]
    return pairs, _rows(arrays, [row[1] for row in rows])


def _find_by_numpy(
    arrays: Arrays, q_ids: Array, kv_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    keys = arrays.to_numpy(kv_ids)
    pairs, broken = find_runs(NUMPY, keys if q_ids is kv_ids else arrays.to_numpy(q_ids), keys, max_runs)
    ends = [(arrays.asarray(lo, "int32"), arrays.asarray(hi, "int32")) for lo, hi in pairs]
    return ends, arrays.asarray(broken, "bool")


def _rows(arrays: Arrays, rows: list[Array]) -> Array:
    return arrays.stack(rows).swapaxes(0, 1)


def _find_in_row(
    arrays: Arrays, q_ids: Array, kv_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """The same for one batch row whose values can be read: sorts and looks up runs instead of tokens."""
    start, length = _run_lengths(arrays, kv_ids)
    q_start, q_length = (start, length) if q_ids is kv_ids else _run_lengths(arrays, q_ids)
    ids = kv_ids[start]
    order = arrays.argsort(ids)
    start, end = start[order], (start + length)[order]
    table = (ids[order], arrays.cast(start, "int32"), arrays.cast(end, "int32"))
    pairs, broken = _look_up(arrays, table, q_ids[q_start], max_runs)
    spread = [(arrays.repeat(lo, q_length), arrays.repeat(hi, q_length)) for lo, hi in pairs]
    return spread, arrays.repeat(broken, q_length)


def _run_lengths(arrays: Arrays, ids: Array) -> tuple[Array, Array]:
    """Start and length of each run of equal neighbours in (s,)."""
    zero, whole = arrays.full((1,), 0, "int64"), arrays.full((1,), ids.shape[0], "int64")
    start = arrays.concat([zero, arrays.nonzero(ids[1:] != ids[:-1]) + 1])
    return start, arrays.concat([start[1:], whole]) - start


def _table(arrays: Arrays, kv_ids: Array) -> tuple[Array, Array, Array]:
    """Each key as a piece of its own, by id and then by place: a table of known size."""
    order = arrays.argsort(kv_ids)
    start = arrays.cast(order, "int32")
    return arrays.take_along(kv_ids, order), start, start + 1


def _look_up(
    arrays: Arrays, table: tuple[Array, Array, Array], q_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """Runs by id, from pieces (id, start, end) in order of id and start; pieces that touch make one run."""
    ids, start, end = table
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
