"""Rows of arrays taken by index, batches marked with their layout, and checks of batches against plans.

Shapes: L batch elements that are partitioned one by one, n rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number, Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnspan.base.arrays import Array, arrays_for, is_array, is_bool, is_integer, kind_of
from attnspan.base.checks import count
from attnspan.errors import DtypeError, ShapeError, expect

from .errors import PlanMismatchError

#: Name of an entry of integers -> value of its padding rows.
_FILLS = {"ids": -1, "segment_ids": -1}


class Marks(NamedTuple):
    """Marks of a batch: the layout and the rank of its rows.

    Attributes:
        layout: Fingerprint of the layout.
        rank: The rank. -1 for the rows of all devices of a JAX mesh.
    """

    layout: int
    rank: int


class Rows(dict[str, Any]):
    """One rank's rows of a batch, as a dict with marks of its layout.

    ``rows["q_index"]`` holds the index of each row in the whole sequence, int64 (L, n), -1 for padding.

    Attributes:
        marks: Layout and rank of the rows. `to`, pinning, pickling and ``copy.copy`` keep the marks. Code
            that builds a new dict of the entries, or collates it, loses them (None). Plans then compare
            "q_index".
    """

    marks: Marks | None = None

    def update(self, *given: Any, **more: Any) -> None:
        """Update as a dict does. Collating updates a copy of the first batch, whose marks are then wrong."""
        before = getattr(self.get("q_index"), "shape", None)
        super().update(*given, **more)
        if getattr(self.get("q_index"), "shape", None) != before:
            self.marks = None

    def to(self, *arguments: Any, **keywords: Any) -> Rows:
        """Call `to` of every tensor and keep the marks, for example ``rows.to("cuda", non_blocking=True)``.

        Example:
            >>> rows = marked({"x": np.zeros(2)}, Marks(layout=7, rank=0))
            >>> rows.to("cuda").marks  # NumPy arrays have no `to`, and stay as they are
            Marks(layout=7, rank=0)
        """
        return self._each("to", arguments, keywords)

    def pin_memory(self) -> Rows:
        """Copy to pinned memory and keep the marks. Data loaders with ``pin_memory=True`` call it."""
        return self._each("pin_memory", (), {})

    def _each(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Rows:
        values = {
            name: getattr(x, method)(*arguments, **keywords) if hasattr(x, method) else x
            for name, x in self.items()
        }
        return marked(values, self.marks)


#: Evidence that rows belong to a plan. See `check_evidence`.
Evidence = Mapping[str, Any] | Marks | Array | Literal["unchecked"] | None


def marked(values: Mapping[str, Any], marks: Marks | None) -> Rows:
    """Make a batch of rows with these marks."""
    rows = Rows(values)
    rows.marks = marks
    return rows


_WAYS = "the batch that layout.shard(...) returned, its batch.marks, or its batch['q_index']"
_OTHERS = "Use the plan with the batch of the layout that made it"


def check_evidence(given: Evidence, mine: NDArray[Any], marks: Marks) -> None:
    """Raise unless `given`, the ``rows`` of `Plan.on`, shows that a model holds the rows of a plan.

    Args:
        given: Batch, `Marks`, indices of the rows on the host, (n,), (L, n) or (B, n), or "unchecked". A
            batch is compared by its marks and, on the host, by its "q_index".
        mine: The rows of the plan, (L, n).
        marks: Marks of the plan.

    Raises:
        OptionError: `given` is None or an unknown text.
        DtypeError: `given` does not identify rows, or its values are on a device.
        ShapeError: `given` has another number of rows.
        PlanMismatchError: The rows differ.
    """
    what = "rows of plan.on(mesh, rows=...)"
    remedy = 'Pass one of these, or rows="unchecked" if you are sure of the order of the rows'
    expect(given is not None, what, _WAYS, "none", remedy)
    if isinstance(given, str):
        expect(given == "unchecked", what, _WAYS, repr(given), remedy)
        return
    theirs = given if isinstance(given, Marks) else getattr(given, "marks", None)
    index = given.get("q_index") if isinstance(given, Mapping) else given
    readable = is_array(index) and is_integer(index) and arrays_for([index]).concrete(index)
    readable = readable and getattr(index, "is_fully_addressable", True)
    if theirs is None and not readable:
        got = type(given).__name__
        if is_array(index):
            got += f" whose q_index, {kind_of(index)}, is not readable on the host"
            remedy = "Take batch.marks before the batch is rebuilt on a device: they stay on the host"
        elif isinstance(given, Mapping):
            got += " without marks and 'q_index', which was rebuilt"
        expect(False, what, _WAYS, got, remedy, error=DtypeError)
    for name, wanted, got in zip(Marks._fields, marks, marks if theirs is None else theirs, strict=True):
        text = f"rows of {name} {wanted}"
        expect(got == wanted, what, text, f"{name} {got}", _OTHERS, error=PlanMismatchError)
    if readable:
        _check_index(what, arrays_for([index]).to_numpy(index), mine)


def _check_index(what: str, index: NDArray[Any], mine: NDArray[Any]) -> None:
    fits, wanted = fits_rows(index, mine), "the rows of the plan's layout"
    remedy = "Pass the batch as layout.shard(...) returned it, not collated with others (batch_size=None)"
    expect(fits, what, "q_index of shape {}", index.shape, remedy, mine.shape, error=ShapeError)
    same = bool((index == mine).all())
    expect(same, what, wanted, "others in q_index", _OTHERS, error=PlanMismatchError)


def fits_rows(index: Any, mine: Any) -> bool:
    """Whether an index has the shape of a rank's rows (L, n), for one or for each batch element."""
    fits = index.ndim in (1, 2) and index.shape[-1] == mine.shape[1]
    return bool(fits and (index.ndim == 1 or mine.shape[0] in (1, index.shape[0])))


def check_attends(what: str, shifts: tuple[int, ...]) -> None:
    """Raise if a plan has shifts, because in the plan of a roll each query sees at most one key."""
    got, remedy = f"a plan of a roll by {shifts}", "Use layout.plan(mask, heads=...)"
    expect(not shifts, what, "a plan for attention", got, remedy)


def check_options(given: Any, where: str) -> None:
    """Raise for an option of a call that a plan does not support: the keys' indices, and a dense bias.

    Args:
        given: The options, `attnspan.call.options.Given`.
        where: Description of the plan, for errors.
    """
    kind, remedy = type(given.k_index).__name__, "Leave it out: the plan knows the keys' indices"
    expect(given.k_index is None, f"k_index {where}", "None", kind, remedy)
    by_position = not (hasattr(given.bias, "values") or hasattr(given.bias, "shape"))
    got = "a dense bias, which holds a value for each pair of tokens of all ranks"
    remedy = "Use a bias by position, or put the visibility into the mask"
    expect(by_position, f"bias {where}", "alibi(...) or relative(...)", got, remedy)


def fill_of(name: Any, fill: Any, x: Array) -> Any:
    """Value of an entry's padding rows. Only integers get -1 or -100, and only masks of padding get True.

    Raises:
        OptionError: `x` cannot hold the value.
    """
    marks = is_array(x) and is_integer(x)
    given = fill.get(name) if isinstance(fill, Mapping) else fill
    if given is None:
        ignored = "label" in str(name) or "target" in str(name)
        padded = is_array(x) and is_bool(x) and "padding_mask" in str(name)
        given = _FILLS.get(name, -100 if ignored else 0) if marks else int(padded)
    return checked_fill(f"fill of {name}", given, x)


def checked_fill(what: str, given: Any, x: Any) -> Any:
    """Return a fill as a Python number.

    Raises:
        OptionError: The array `x` cannot hold it.
    """
    kind = kind_of(x).removeprefix("torch.")
    got = repr(given) if isinstance(given, str) else given
    if is_array(x) and is_integer(x):
        fits = isinstance(given, (int, np.integer)) and np.iinfo(kind).min <= given <= np.iinfo(kind).max
        remedy = "Convert it to int64, or pass another fill"
        expect(fits, what, f"a value of {kind}", got, remedy)
    else:
        expect(isinstance(given, Number), what, "a number", got, "Pass one")
        fits = isinstance(given, Real) or "complex" in kind
        expect(fits, what, f"a value of {kind}", got, "Pass a real number")
    return given.item() if isinstance(given, np.generic) else given


def take(x: Array, index: NDArray[Any], dim: int) -> Array:
    """Take rows along `dim` by index, (L, n). With L > 1, dimension 0 of x is the batch."""
    arrays = arrays_for([x])
    if index.shape[0] == 1:
        return arrays.take(x, arrays.asarray(index[0].astype(np.int64), "int64"), dim)
    order = [0, dim % x.ndim, *(i for i in range(1, x.ndim) if i != dim % x.ndim)]
    moved = x.permute(*order) if hasattr(x, "permute") else x.transpose(*order)
    plane = arrays.asarray(np.arange(index.shape[0])[:, None], "int64")
    found = moved[plane, arrays.asarray(index.astype(np.int64), "int64")]
    back = [order.index(i) for i in range(x.ndim)]
    return found.permute(*back) if hasattr(x, "permute") else found.transpose(*back)


def checked_rows(q_len: int, rows: Any) -> NDArray[np.int32]:
    """Return the rows of each rank as int32, checked.

    Raises:
        ShapeError: `rows` has another shape or dtype.
        OptionError: `rows` does not hold each row once in ascending order, which would silently be wrong.
    """
    count("Layout: q_len", q_len)
    fits = isinstance(rows, np.ndarray) and rows.ndim == 3 and rows.dtype.kind == "i"
    what, wanted = "Layout: rows", "a NumPy integer array (ranks, batch elements, rows of a rank)"
    got = f"{kind_of(rows)} of shape {np.shape(rows)}"
    expect(fits, what, wanted, got, "Stack the rows of all ranks, padded by -1", error=ShapeError)
    ends = np.where(rows < 0, q_len, rows)
    ascend = (np.diff(ends, axis=2) > 0) | (ends[:, :, 1:] == q_len)
    expect(
        ascend.all(), what, "ascending rows, -1 behind them", "another order", "Sort the rows of each rank"
    )
    found = np.sort(ends.transpose(1, 0, 2).reshape(rows.shape[1], -1), axis=1)
    each = found.shape[1] >= q_len and (found[:, :q_len] == np.arange(q_len)).all()
    whole = each and (found[:, q_len:] == q_len).all()
    wanted, remedy = f"each of {q_len} rows once", "Give every row one owner, and pad with -1"
    expect(whole, what, wanted, "rows that are missing, repeated or out of range", remedy)
    checked: NDArray[np.int32] = np.maximum(rows, -1).astype(np.int32)
    return checked
