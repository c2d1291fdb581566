"""Rolls: rows of the whole sequence move by a shift. A roll is an exchange in which each query sees one key.

So a roll has a plan like attention has. Only rows that change their owner travel.
Shapes: B batch elements, H shifts, S rows of the whole problem.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from attnspan.base.arrays import arrays_for, is_array
from attnspan.base.checks import integers, number
from attnspan.errors import ShapeError, expect
from attnspan.masks.bounds import Spans

from .intervals import Ints, read_only
from .layout import Layout
from .lowered import digest
from .plan import Plan, make_plan
from .step import step

_ONE_OR_MORE = "Pass an int, or a tuple of ints for several shifts at once"


def roll(
    x: Any,
    shifts: int | tuple[int, ...],
    where: Any,
    *,
    dim: int = 1,
    within: Any = None,
    fill: complex = 0,
    mesh: Any = None,
    **axes: Any,
) -> Any:
    """Move the rows of the whole sequence by a shift, as `torch.roll` does with the gathered tensor.

    It works with every layout, is differentiable, and sends only rows that change their owner. All ranks
    must call it alike. ``roll(labels, -1, ...)`` gives each token the label of the next token.

    Args:
        x: This rank's rows, as `Layout.shard` returned them, of any dtype: labels, hidden states. In JAX, the
            rows of all devices.
        shifts: Row i of the result is row ``i - shifts`` of `x`. With a tuple, one collective serves all of
            its shifts, and the result is a tuple.
        where: The plan ``layout.plan_roll(shifts).on(mesh, rows=rows)``. Compiled torch code requires such a
            plan. Elsewhere you may pass a `Layout` together with ``mesh``. The layout caches its plans.
        dim: Dimension of the rows. If batch elements have layouts or ids of their own, they are dimension 0.
        within: See `Layout.plan_roll`. Only with a layout, because a plan knows it.
        fill: Value of padding, and of rows without a source if there is ``within``, for example -100 for
            labels.
        mesh: The mesh, if you pass a layout.
        **axes: Mesh axes ``sequence`` and ``batch`` of a JAX mesh, if you pass a layout. See `Plan.on`.

    Returns:
        The rolled rows, in the shape and dtype of `x`.

    Raises:
        ShapeError: `x` has another number of rows or batch elements.
        OptionError: `shifts` are not the plan's, a mesh or a plan is missing, or `x` cannot hold `fill`.
        DtypeError: `x` is no array, or a shift is no int.
        PlanMismatchError: The calls differ between ranks.
        CommunicationError: A rank did not answer.

    Example:
        >>> import jax
        >>> layout, mesh = Layout.contiguous(5, ranks=1), jax.make_mesh((1,), ("context",))
        >>> x = np.array([[10, 11, 20, 21, 22]])
        >>> roll(x, -1, layout, mesh=mesh, sequence="context").tolist()
        [[11, 20, 21, 22, 10]]
        >>> plan = layout.plan_roll((-1, -2), within=np.array([0, 0, 1, 1, 1]))
        >>> placed = plan.on(mesh, rows="unchecked", sequence="context")
        >>> [y.tolist() for y in roll(x, (-1, -2), placed, fill=-100)]
        [[[11, -100, 21, 22, -100]], [[-100, -100, 22, -100, -100]]]
    """
    numbers = checked_shifts(shifts)
    if isinstance(where, Layout):
        traced = is_array(x) and arrays_for([x]).name == "torch" and arrays_for([x]).tracing()
        remedy = "Make the plan outside: layout.plan_roll(shifts).on(mesh, rows=rows)"
        expect(not traced, "roll in compiled code", "a plan, which is data", "a layout", remedy)
        expect(mesh is not None, "roll: mesh", "the mesh of the layout's ranks", "None", "Pass mesh=")
        framework = "jax" if type(mesh).__module__.startswith("jax") else "torch"
        where = step("roll", framework)(where.plan_roll(numbers, within=within), mesh, **axes)
    else:
        _check_plan(where, numbers, within is None and mesh is None and not axes)
    found = where.rolled(x, dim, fill)
    return found if isinstance(shifts, (tuple, list)) else found[0]


def _check_plan(where: Any, shifts: tuple[int, ...], alone: bool) -> None:
    remedy = "Leave them out: layout.plan_roll(shifts, within=ids).on(mesh, rows=rows) knows them"
    expect(alone, "roll with a plan", "no within, mesh and axes", "some", remedy)
    mine = where.shifts if hasattr(where, "rolled") else ()
    got = f"one for shifts {mine}" if mine else f"a {type(where).__name__} that rolls nothing"
    remedy = "Pass layout.plan_roll(shifts).on(mesh, rows=rows), or a layout and its mesh"
    expect(mine == shifts, "roll: plan", f"a plan for shifts {shifts}", got, remedy)


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
    """Key of the plan of `Layout.plan_roll`, and a function that makes the plan."""
    numbers, ids = checked_shifts(shifts), None if within is None else _ids(layout, within)

    def make() -> Plan:
        spans = roll_spans(layout.q_len, numbers, ids)
        batch, heads = max(layout.planes, spans.bounds.shape[0]), (len(numbers), len(numbers))
        plan = make_plan(layout, spans, heads=heads, batch=batch, strategy="exchange")
        return replace(plan, shifts=numbers)

    return ("roll", numbers, None if ids is None else digest(ids)), make


def _ids(layout: Layout, within: Any) -> Ints:
    """Check ids of the whole sequence, (B|1, S)."""
    given = integers("roll: within", within)
    ids = np.atleast_2d(arrays_for([given]).to_numpy(given))
    got, remedy = tuple(given.shape), "Pass the ids of the whole sequence, not the ids of a rank's rows"
    fits = ids.shape[1] == layout.q_len
    expect(fits, "roll: within", "ids of {} rows", got, remedy, layout.q_len, error=ShapeError)
    fits = layout.planes == 1 or ids.shape[0] in (1, layout.planes)
    remedy = "Pass the ids of the batch that the layout was made for"
    wanted = "ids of {} batch elements, as the layout has"
    expect(fits, "roll: within", wanted, got, remedy, layout.planes, error=ShapeError)
    return ids


def roll_spans(q_len: int, shifts: tuple[int, ...], ids: Ints | None) -> Spans:
    """Spans by which row i of head h sees its source, the row i - shifts[h], or nothing.

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
