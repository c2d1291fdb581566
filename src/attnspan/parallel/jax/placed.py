"""Masks of global arrays, which split batch and heads, or with a plan the sequence. They are pytrees."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from attnspan.base.mistakes import not_a_mask
from attnspan.call import LAYOUTS
from attnspan.errors import DtypeError, expect
from attnspan.jax.front import ShardedMask
from attnspan.masks import Mask, full
from attnspan.masks.bounds import Spans
from attnspan.parallel.plan import Plan
from attnspan.parallel.rows import Evidence

from .attention import attention
from .axes import Axes, AxisNames
from .roll import rolled
from .route import Capacity, Route, make_route
from .rows import Placing, check_placed_rows

#: Name of a dim in `LAYOUTS` -> the part of the problem that mesh axes split with it.
_SPLIT = {"batch": "batch", "heads": "heads", "length": "sequence", "tokens": "sequence", "head_dim": None}


class Sharded(ShardedMask):
    """Mask for attention over the devices of a mesh. `attnspan.jax.shard` returns it.

    It is a pytree: pass it as an argument to compiled functions. A function that closes over it has it as a
    constant.

    Attributes:
        axes: Mesh axes that split the batch, the heads and the sequence.
        mask: The mask. None if a plan has it.

    Example:
        >>> from attnspan import causal
        >>> shard(jax.make_mesh((1,), ("data",)), mask=causal(), batch="data")
        Sharded(batch over 'data' (1))
    """

    route: Route | None = None
    heads: tuple[int, int] | None = None
    piece = 0
    shifts: tuple[int, ...] = ()

    def __init__(self, axes: Axes, mask: Mask | Spans | None) -> None:
        self.axes, self.mask = axes, mask
        self._queries = self._keys = Placing(axes)

    def spec(self, layout: str = "bhsd", split_heads: bool = True) -> PartitionSpec:
        """Make the partition spec of q, k, v or the output.

        Args:
            layout: "bhsd", "bshd" or "thd".
            split_heads: Pass False for k and v if the mesh axis of the heads does not divide their heads.
                Each device then holds all key heads, and uses the ones that it needs.

        Raises:
            OptionError: `layout` is unknown.

        Example:
            >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
            >>> tuple(shard(mesh, batch="data", heads="model").spec("bhsd"))
            ('data', 'model', None, None)
        """
        expect(layout in LAYOUTS, "layout", f"one of {', '.join(LAYOUTS)}", repr(layout), "Name the order")
        dims = (_SPLIT[dim] for dim in LAYOUTS[layout])
        return self.axes.spec(*(None if dim == "heads" and not split_heads else dim for dim in dims))

    def shard(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = None) -> Any:
        """Place whole inputs on the devices, one device's rows after the other, padding included.

        Call it once, at the start of a model, inside or outside of compiled functions. All layers but
        attention work on single rows.

        Args:
            x: Array of the whole problem in its original order, or a mapping of arrays, such as a batch. JAX
                and NumPy arrays work. From a NumPy array, each host takes the rows of its own devices.
            axis: Axis of the rows.
            batch_axis: Axis of the batch, which mesh axes may split too. None if there is none.
            fill: Value of padding rows, as in `attnspan.parallel.Layout.shard`.

        Returns:
            The placed inputs. A mapping becomes `attnspan.parallel.rows.Rows`, which are marked with their
            layout and also hold "q_index", int32 (L, rows).

        Raises:
            ShapeError: `x` has another number of rows, or the mesh axes do not divide its batch.
            OptionError: The mapping has a "q_index", or an array cannot hold its fill.
            DtypeError: `x` or an entry is no array.
        """
        return self._queries.shard(x, axis, batch_axis, fill)

    def shard_keys(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = None) -> Any:
        """Place inputs of the keys in cross attention. In self-attention it is `shard`."""
        return self._keys.shard(x, axis, batch_axis, fill)

    def unshard(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0) -> Array:
        """Undo `shard`: return the whole in its original order, without padding. The batch stays split."""
        return self._queries.unshard(x, axis, batch_axis)  # type: ignore[no-any-return]

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """Compute `attnspan.jax.attention` of global arrays, inside or outside of jit.

        Each device computes its part. q, k and v have the rows of all devices, and the output is split like
        q. Pass seeds, slopes, sinks and tables for the whole batch and all heads. If a plan splits the
        sequence, ``k_index`` and a dense bias raise an error. Pass the "q_index" of `shard` as ``q_index``:
        for rows of another layout the output is NaN. Padding attends to nothing: its output is 0.

        Raises:
            ValueError: Shapes, shardings or options do not fit.
            TypeError: Dtypes do not fit.
        """
        return attention(self, q, k, v, **options)

    def explain(self) -> str:
        """Explain the split of the work and the communication, as text to ``print``."""
        return f"split: {self._split()}\nno keys cross the network: each device has whole sequences"

    def _split(self) -> str:
        axes = self.axes
        dims = [dim for dim in ("batch", "heads", "sequence") if axes.names(dim)]
        return ", ".join(f"{dim} over {axes.words(dim)} ({axes.size(dim)})" for dim in dims) or "nothing"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._split()})"


def shard(
    mesh: Mesh, *, mask: Mask | Spans | None = None, batch: AxisNames = None, heads: AxisNames = None
) -> Sharded:
    """Split attention over the devices of a mesh by batch and heads.

    The mask's bounds, biases, sinks and seeds are split like q, k and v. No key crosses the network. To split
    the sequence, use a plan: `attnspan.parallel.Plan.on`.

    Args:
        mesh: Mesh of the devices, with axes of any type.
        mask: The mask. None for full attention.
        batch: Mesh axis, or a tuple of axes, that splits the batch. None if no axis does.
        heads: Mesh axis, or a tuple of axes, that splits the heads. They must divide the query heads. If they
            do not divide the key heads, all devices hold all key heads, and each uses the ones it needs.

    Returns:
        A ``mask`` for `attnspan.jax.attention`.

    Raises:
        ValueError: Axes do not fit.
        TypeError: ``mesh`` is no JAX mesh, or ``mask`` is no mask.

    Example:
        >>> from attnspan import causal
        >>> sharded = shard(jax.make_mesh((1, 1), ("data", "model")), mask=causal(), batch="data")
        >>> x = jax.numpy.ones((1, 9, 4, 16))
        >>> sharded.attention(x, x[:, :, :2], x[:, :, :2], layout="bshd").shape
        (1, 9, 4, 16)
    """
    axes = Axes.of(mesh, batch=batch, heads=heads)
    mask = full() if mask is None else mask
    if not isinstance(mask, Mask | Spans) or isinstance(mask, ShardedMask):
        raise not_a_mask(mask, "shard: mask")
    return Sharded(axes, mask)


class _Frame(NamedTuple):
    """Static part of a `PlacedPlan`, for which programs are compiled. It is hashable."""

    axes: Axes
    q_len: int
    k_len: int
    heads: tuple[int, int]
    sizes: Capacity
    shifts: tuple[int, ...]


class PlacedPlan(Sharded):
    """Plan on the devices of a mesh. `attnspan.parallel.Plan.on` returns it for a JAX mesh.

    The next step's plan is other data for the same program.

    Attributes:
        frame: Static part, for which programs are compiled.
        route: The plan's arrays.
        shifts: Shifts of a plan of `Layout.plan_roll`. Empty for attention.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.jax import attention
        >>> from attnspan.parallel import Layout
        >>> layout, mesh = Layout.of(causal(), q_len=9, ranks=1), jax.make_mesh((1,), ("context",))
        >>> rows = layout.on(mesh, sequence="context").shard({"x": jax.numpy.ones((1, 9, 4, 16))})
        >>> plan = layout.plan(heads=(4, 2), strategy="exchange")
        >>> placed = plan.on(mesh, sequence="context", rows=rows)
        >>> k = rows["x"][:, :, :2]
        >>> attention(rows["x"], k, k, mask=placed, layout="bshd", q_index=rows["q_index"]).shape
        (1, 9, 4, 16)
    """

    def __init__(self, frame: _Frame, route: Route, plan: Plan | None = None) -> None:
        super().__init__(frame.axes, None)
        self.frame, self.route, self._plan = frame, route, plan
        self.heads, self.piece, self.shifts = frame.heads, frame.sizes.piece, frame.shifts
        layouts = (None, None) if plan is None else (plan.layout, plan.keys)
        self._queries = Placing(frame.axes, route.rows, frame.q_len, layouts[0])
        self._keys = Placing(frame.axes, route.keys, frame.k_len, layouts[1])

    @property
    def plan(self) -> Plan:
        """The plan that was placed.

        Raises:
            OptionError: You call it inside a compiled function, which gets only the plan's arrays.
        """
        remedy = "Call it outside, and pass in the result"
        got = "an argument of a compiled function, which has only arrays"
        expect(self._plan is not None, "plan", "a plan that plan.on(...) returned", got, remedy)
        return self._plan  # type: ignore[return-value]

    def rolled(self, x: Array, axis: int = 1, fill: complex = 0) -> tuple[Array, ...]:
        """Roll the rows of all devices by each of the plan's shifts. See `attnspan.parallel.roll`."""
        return rolled(self, x, axis, fill)

    @property
    def positions(self) -> Array:
        """Index of each row in the whole sequence, in the devices' order, int32 (L, rows), 0 for padding."""
        return jnp.maximum(self._queries.rows, 0)

    @property
    def valid(self) -> Array:
        """Mask of these rows, bool (L, rows): True for tokens, False for padding."""
        return jnp.greater_equal(self._queries.rows, 0)

    def explain(self) -> str:
        """Explain the split of the work and the communication, as text to ``print``.

        Raises:
            OptionError: You call it inside a compiled function.
        """
        sizes, plan = self.frame.sizes, self.plan
        room = f"capacity: {sizes.keys:,} keys that a device attends to, {sizes.rows:,} keys that travel\n"
        return f"split: {self._split()}\n{room if sizes.keys else ''}{plan.explain()}"


def place(
    plan: Plan,
    mesh: Mesh,
    *,
    sequence: AxisNames = None,
    batch: AxisNames = None,
    heads: AxisNames = None,
    rows: Evidence = None,
    like: PlacedPlan | None = None,
) -> PlacedPlan:
    """Put a plan on a JAX mesh. See `attnspan.parallel.Plan.on`. Each host makes the parts of its devices.

    Args:
        plan: Plan of the whole problem, with the heads and the batch of the global arrays.
        mesh: Mesh of the devices, with axes of any type.
        sequence: Mesh axis, or a tuple of axes, that splits queries and keys. Its devices are the ranks of
            the layout.
        batch, heads: Mesh axes that split the batch and the heads, as in `shard`.
        rows: The batch that you use the plan with, from `Layout.on`, or from `Layout.shard` in a data loader,
            its ``marks``, or its ``"q_index"``. "unchecked" compares nothing, which is safe if
            `PlacedPlan.shard` makes all rows.
        like: The placed plan of an earlier step. Sizes that depend on the mask only grow from its sizes, in
            powers of two, so that recompilations soon end.

    Raises:
        ValueError: Axes or sizes do not fit, the strategy needs ranks that share heads, there are no
            ``rows``, or they belong to another layout.
        TypeError: ``mesh`` is no mesh, ``rows`` do not identify their layout, or ``like`` is no placed plan.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> layout, mesh = Layout.of(causal(), q_len=9, ranks=1), jax.make_mesh((1,), ("context",))
        >>> plan = layout.plan(heads=(4, 2), strategy="exchange")
        >>> place(plan, mesh, sequence="context", rows="unchecked")
        PlacedPlan(sequence over 'context' (1))
    """
    # The heads of a roll are its shifts, which no axis splits.
    axes = Axes.of(mesh, batch=batch, heads=None if plan.shifts else heads, sequence=sequence)
    plan = _between_groups(plan)
    axes.check_ranks(plan.layout.ranks)
    axes.check_divides("query heads of the plan", plan.sizes.q_heads, "heads")
    axes.check_divides("batch elements of the plan", plan.sizes.batch, "batch" if plan.planes > 1 else None)
    check_placed_rows(rows, plan.layout)
    wanted, remedy = "a placed plan, or None", "Pass the result of plan.on(...)"
    fits, kind = like is None or isinstance(like, PlacedPlan), type(like).__name__
    expect(fits, "like", wanted, kind, remedy, error=DtypeError)
    route, sizes = make_route(plan, axes, None if like is None else like.frame.sizes)
    frame = _Frame(axes, plan.layout.q_len, plan.k_len, plan.sizes.heads, sizes, plan.shifts)
    return PlacedPlan(frame, route, plan)


def place_roll(plan: Plan, mesh: Mesh, **axes: Any) -> PlacedPlan:
    """Put the plan of a roll on a mesh. See `attnspan.parallel.roll`."""
    return place(plan, mesh, rows="unchecked", **axes)


def _between_groups(plan: Plan) -> Plan:
    """Return the plan if its groups have one member, else the best such plan that "auto" considered."""
    strategy, choice = plan.strategy, plan.choice
    considered = () if choice is None else choice.considered
    limit = None if choice is None else choice.memory
    fitting = (x.strategy for x in considered if limit is None or x.memory.max() <= limit)
    found = strategy if strategy.members == 1 else next((x for x in fitting if x.members == 1), None)
    remedy = "Plan with one of these. To split heads, pass their mesh axis: plan.on(mesh, heads=...)"
    expect(found is not None, "strategy on a JAX mesh", '"exchange" or "ring"', repr(strategy.name), remedy)
    return plan.with_strategy(found or strategy, choice)


jax.tree_util.register_pytree_node(
    Sharded, lambda x: ((x.mask,), x.axes), lambda axes, children: Sharded(axes, *children)
)
jax.tree_util.register_pytree_node(
    PlacedPlan, lambda x: ((x.route,), x.frame), lambda frame, children: PlacedPlan(frame, *children)
)
