"""Plans of `roll`. A roll is an exchange in which each query sees one key: the row that it gets.

Shapes: B batch elements, H shifts, S rows of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspan.base.arrays import arrays_for
from attnspan.base.checks import integers, number
from attnspan.errors import ShapeError, expect
from attnspan.masks.bounds import Spans

from .intervals import Ints, read_only
from .lowered import digest
from .plan import Plan, make_plan

if TYPE_CHECKING:  # A layout imports this module when it plans.
    from .layout import Layout

_ONE_OR_MORE = "Pass an int, or a tuple of ints for several shifts at once"


def checked_shifts(shifts: Any) -> tuple[int, ...]:
    """Return the shifts as a tuple.

    Raises:
        DtypeError: A shift is no int.
        OptionError: There is no shift.
    """
    several = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    found = tuple([number("roll: shifts", x, _ONE_OR_MORE) for x in several])
    expect(len(found) > 0, "roll: shifts", "at least one shift", "none", _ONE_OR_MORE)
    return found


def maker(layout: Layout, shifts: Any, within: Any) -> tuple[Hashable, Callable[[], Plan]]:
    """Return the key under which `Layout.plan_roll` caches its plan, and a function that makes the plan."""
    numbers, ids = checked_shifts(shifts), None if within is None else _ids(layout, within)

    def make() -> Plan:
        spans = roll_spans(layout.q_len, numbers, ids)
        batch, heads = max(layout.planes, spans.bounds.shape[0]), (len(numbers), len(numbers))
        plan = make_plan(layout, spans, heads=heads, batch=batch, strategy="exchange")
        return replace(plan, shifts=numbers)

    return ("roll", numbers, None if ids is None else digest(ids)), make


def _ids(layout: Layout, within: Any) -> Ints:
    """Check the ids of the whole sequence, and return them as (B|1, S)."""
    given = integers("roll: within", within)
    readable, remedy = arrays_for([given]).readable(given), "Make the plan outside of the compiled function"
    expect(readable, "roll: within", "ids whose values can be read", "a traced array", remedy)
    got, remedy = tuple(given.shape), "Pass the ids of the whole sequence, not the ids of a rank's rows"
    ids = np.atleast_2d(arrays_for([given]).to_numpy(given))
    fits = ids.shape[1] == layout.q_len
    expect(fits, "roll: within", "ids of {} rows", got, remedy, layout.q_len, error=ShapeError)
    fits = layout.planes == 1 or ids.shape[0] in (1, layout.planes)
    remedy = "Pass the ids of the batch that the layout was made for"
    wanted = "ids of {} batch elements, as the layout has"
    expect(fits, "roll: within", wanted, got, remedy, layout.planes, error=ShapeError)
    return ids


def roll_spans(q_len: int, shifts: tuple[int, ...], ids: Ints | None) -> Spans:
    """Return spans with which row i of head h sees only its source, the row i - shifts[h], or nothing.

    Example:
        >>> roll_spans(3, (-1,), None).bounds[0, 0, :, 0].tolist()
        [[1, 2], [2, 3], [0, 1]]
        >>> roll_spans(3, (-1,), np.array([[4, 4, 5]])).bounds[0, 0, :, 0].tolist()
        [[1, 2], [0, 0], [0, 0]]
    """
    rows, least = np.arange(q_len), max(q_len, 1)
    if ids is None:
        source = (rows - np.array([[x % least] for x in shifts])) % least
        seen = np.ones((1, *source.shape), bool)
    else:
        source = rows - np.array([[min(max(x, -q_len), q_len)] for x in shifts])
        inside = (source >= 0) & (source < q_len)
        source = np.where(inside, source, 0)
        seen = inside & (ids[:, source] == ids[:, None]) & (ids[:, None] >= 0)
    lo = np.where(seen, source, 0)
    bounds = np.stack([lo, lo + seen], axis=-1)[..., None, :].astype(np.int32)
    return Spans(read_only(bounds), q_len)
