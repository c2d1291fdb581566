"""`roll` shifts the whole sequence over ranks. It sends only rows that move to another rank."""

from __future__ import annotations

from typing import Any

from attnspan.base.arrays import arrays_for, is_array
from attnspan.errors import expect

from .layout import Layout
from .plan import framework_of
from .shifts import checked_shifts
from .step import step


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
    """Shift the whole sequence, as `torch.roll` shifts the gathered tensor.

    `roll` works with every layout, is differentiable, and sends only rows that move to another rank. All
    ranks must call it with the same arguments. ``roll(labels, -1, ...)`` gives each token the label of the
    next token.

    Args:
        x: This rank's rows, as `Layout.shard` returned them, of any dtype, for example labels or hidden
            states. In JAX, the rows of all devices.
        shifts: Row i of the result is row ``i - shifts`` of the whole sequence. If you pass a tuple, `roll`
            uses one collective for all shifts, and returns a tuple.
        where: The plan ``layout.plan_roll(shifts).on(mesh, rows=rows)``. Compiled torch code requires such a
            plan. Elsewhere you may pass a `Layout` together with ``mesh``. The layout caches its plans.
        dim: Dimension of the rows. If each batch element has its own layout or ids, dimension 0 is the batch.
        within: Document ids, see `Layout.plan_roll`. Pass them only with a layout, because a plan already
            contains them.
        fill: Value of padding, for example -100 for labels. With ``within``, also the value of rows whose
            source is outside of their document.
        mesh: The mesh, if you pass a layout.
        **axes: Mesh axes ``sequence`` and ``batch`` of a JAX mesh, if you pass a layout. See `Plan.on`.

    Returns:
        The rolled rows, in the shape and dtype of `x`.

    Raises:
        ShapeError: `x` has another number of rows or batch elements.
        OptionError: `shifts` differ from the plan's shifts, a mesh or a plan is missing, or `x` cannot hold
            `fill`.
        DtypeError: `x` is no array, or a shift is no int.
        PlanMismatchError: The calls differ between ranks.
        CommunicationError: A rank did not answer.

    Example:
        >>> import jax
        >>> import numpy as np
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
        where = step("roll", framework_of(mesh))(where.plan_roll(numbers, within=within), mesh, **axes)
    else:
        _check_plan(where, numbers, within is None and mesh is None and not axes)
    found = where.rolled(x, dim, fill)
    return found if isinstance(shifts, (tuple, list)) else found[0]


def _check_plan(where: Any, shifts: tuple[int, ...], alone: bool) -> None:
    remedy = "Leave them out: the plan layout.plan_roll(shifts, within=ids).on(mesh, rows=rows) contains them"
    expect(alone, "roll with a plan", "no within, mesh or axes", "at least one of them", remedy)
    mine = where.shifts if hasattr(where, "rolled") else ()
    got = f"one for shifts {mine}" if mine else f"a {type(where).__name__} that rolls nothing"
    remedy = "Pass layout.plan_roll(shifts).on(mesh, rows=rows), or a layout and its mesh"
    expect(mine == shifts, "roll: plan", f"a plan for shifts {shifts}", got, remedy)
