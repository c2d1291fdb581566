"""The start of a lowering: its framework, the length of the key sequence, and the indices of the rows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ._lowering import Lowering
from .arrays import INT32_MAX, Array, Arrays, arrays_for, is_array, is_integer
from .errors import DtypeError, OptionError, ShapeError, shown
from .spans import check_index


def begin(
    mask: Any, q_len: int, k_len: int, batch: int, heads: int, q_index: Any, k_index: Any, like: Any
) -> Lowering:
    """Choose the framework, find the length of the global key sequence, and give the rows their indices."""
    leaves = mask._leaves()
    values = [getattr(leaf, f.name) for leaf in leaves for f in fields(leaf)]
    arrays = arrays_for([*values, *(leaf._example() for leaf in leaves), q_index, k_index], like)
    return begin_in(arrays, leaves, q_len, k_len, batch, heads, q_index, k_index)


def begin_in(
    arrays: Arrays,
    leaves: list[Any],
    q_len: int,
    k_len: int,
    batch: int,
    heads: int,
    q_index: Any = None,
    k_index: Any = None,
) -> Lowering:
    """The same in a framework that is known."""
    tracing = arrays.tracing()
    if not tracing:
        for name, size in (("q_len", q_len), ("k_len", k_len), ("batch", batch), ("heads", heads)):
            if isinstance(size, int) and not 0 <= size <= INT32_MAX:
                raise OptionError(name, expected=f"0 to {INT32_MAX}", got=shown(size), remedy="Use fewer")
    if k_index is not None:
        k_index = check_index(arrays, k_index, "k_index", below=None, ascending=True)
        if k_index.shape[0] != k_len:
            raise ShapeError(
                "k_index",
                expected=f"one index per key, {k_len}",
                got=shown(k_index.shape[0]),
                remedy="Pass the global indices of the keys that are here",
            )
    keys = _key_len(leaves, k_len, k_index is not None, tracing)
    low = Lowering(arrays, q_len, keys, batch, heads)
    _index_rows(low, leaves, q_index, k_index)
    return low


def _key_len(leaves: list[Any], k_len: int, sharded: bool, tracing: bool) -> int | None:
    known = None if sharded else k_len
    for leaf in leaves:
        if tracing and known is not None and leaf._knows_k_len_as_data():
            continue  # It is checked by the program: read here, it would be a constant.
        length = leaf._key_len()
        if length is None:
            continue
        if known is not None and length != known:
            raise ShapeError(
                repr(leaf),
                expected=f"arrays that describe {known} keys",
                got=shown(length),
                remedy="They describe the whole, global sequence; pass k_index if only some keys are here",
            )
        known = length
    return known


def _index_rows(low: Lowering, leaves: list[Any], q_index: Any, k_index: Any) -> None:
    if q_index is not None:
        low.q_index = _checked_q_index(low, q_index)
        return
    anchored = [leaf for leaf in leaves if leaf._anchor() is not None]
    if len(anchored) > 1:
        # A prepared mask compares its rows with those that are chosen, so that it need not be the same array.
        others = [leaf for leaf in anchored if leaf._anchor()[0] != "prepared"]
        anchored = others or anchored[:1]
    for leaf in anchored[1:]:
        if not _same_anchor(leaf, anchored[0]):
            raise OptionError(
                "q_index",
                expected="one default for the rows' indices",
                got=f"one from {anchored[0]!r} and another from {leaf!r}",
                remedy="Pass q_index, or make both from one and the same array",
            )
    if anchored:
        low.q_index = anchored[0]._anchor_index(low)
    elif k_index is not None:
        if low.q_len > k_index.shape[0]:
            raise ShapeError(
                "q_index",
                expected=f"no more rows than keys, {k_index.shape[0]}, where it is left out",
                got=shown(low.q_len),
                remedy="Pass the rows' global indices beside k_index",
            )
        low.q_index = k_index[k_index.shape[0] - low.q_len :][None, None]
    else:
        low.q_index = low.last_rows()
        low.tail, low.counted_back = low.q_len <= low.top, True


def _same_anchor(a: Any, b: Any) -> bool:
    left, right = a._anchor() or (), b._anchor() or ()
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))


def _checked_q_index(low: Lowering, q_index: Any) -> Array:
    if not is_array(q_index) or not is_integer(q_index):
        got = str(q_index.dtype) if is_array(q_index) else type(q_index).__name__
        raise DtypeError(
            "q_index", expected="an integer array", got=got, remedy="Pass int32 or int64 indices"
        )
    if q_index.ndim not in (1, 2) or q_index.shape[-1] != low.q_len:
        raise ShapeError(
            "q_index",
            expected=f"shape ({low.q_len},) or ({low.batch}, {low.q_len})",
            got=shown(q_index.shape),
            remedy="Pass one global index per query row",
        )
    if low.arrays.concrete(q_index) and low.q_len > 0:
        values = low.arrays.to_numpy(q_index)
        if values.min() < -INT32_MAX or values.max() >= INT32_MAX:
            raise OptionError(
                "q_index", expected="int32 indices", got=str(values.max()), remedy="Use smaller ones"
            )
    return low.per_batch("q_index", q_index, "int32")[:, None]
