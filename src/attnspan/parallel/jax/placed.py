"""Masks of global arrays: over batch elements and heads, or a plan of a split sequence; both are pytrees."""

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
from .route import Capacity, Route, make_route
from .rows import Placing, check_placed_rows

__all__ = ["PlacedPlan", "Sharded", "place", "shard"]

#: What splits the dims of q, k and v, by their names in `LAYOUTS`.
_SPLIT = {"batch": "batch", "heads": "heads", "length": "sequence", "tokens": "sequence", "head_dim": None}


class Sharded(ShardedMask):
    """Attention over the devices of a mesh, under one mask: what `attnspan.jax.shard` returns.

    A pytree: an argument of compiled functions. One that closes over it has it as a constant.

    Attributes:
        axes: Which axes of the mesh split what.
        mask: What each query may see; None where a plan has it.
    """

    route: Route | None = None
    heads: tuple[int, int] | None = None
    piece = 0

    def __init__(self, axes: Axes, mask: Mask | Spans | None) -> None:
        self.axes, self.mask = axes, mask
        self._queries = self._keys = Placing(axes)

    def spec(self, layout: str = "bhsd", split_heads: bool = True) -> PartitionSpec:
        """Partition spec of q, k, v or the output.

        Args:
            layout: "bhsd", "bshd" or "thd".
            split_heads: False for k and v of fewer heads than the axis of the heads divides: each device
                holds them all and takes those that it needs.

        Example:
            >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
            >>> tuple(shard(mesh, batch="data", heads="model").spec("bhsd"))
            ('data', 'model', None, None)
        """
        expect(layout in LAYOUTS, "layout", f"one of {', '.join(LAYOUTS)}", repr(layout), "Name the order")
        dims = (_SPLIT[dim] for dim in LAYOUTS[layout])
        return self.axes.spec(*(None if dim == "heads" and not split_heads else dim for dim in dims))

    def shard(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = None) -> Any:
        """Whole inputs as the devices hold them, one device's rows after the other's, padding included.

        Do this once, at the start of a model; everything but attention works on rows one by one. Inside and
        outside of compiled functions.

        Args:
            x: An array of the whole problem in its own order, of NumPy (each host then takes the rows of its
                own devices) or JAX; or a mapping of them, such as a batch of a data loader.
            axis: The axis of the rows.
            batch_axis: The axis of batch elements, which mesh axes split as well; None if there is none.
            fill: Value of padding rows, as of `attnspan.parallel.Layout.shard`.

        Returns:
            The same, placed. A mapping becomes `attnspan.parallel.rows.Rows`, which know their layout and
            also hold "q_index", int32 (L, rows).

        Raises:
            ShapeError: Another number of rows, or a batch that the mesh axes do not divide.
        """
        return self._queries.shard(x, axis, batch_axis, fill)

    def shard_keys(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = None) -> Any:
        """`shard` of what keys are made of in cross attention; `shard` itself in self-attention."""
        return self._keys.shard(x, axis, batch_axis, fill)

    def unshard(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0) -> Array:
        """The inverse of `shard`: the whole in its own order, without padding; batch elements stay split."""
        return self._queries.unshard(x, axis, batch_axis)  # type: ignore[no-any-return]

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """`attnspan.jax.attention` of global arrays, each device with its part; inside or outside of jit.

        q, k and v have the rows of all devices, and the output is split as q is. Seeds, slopes, sinks and
        tables are those of all batch elements and heads. Where a plan splits the sequence, ``k_index`` and a
        dense bias are not taken, and ``q_index`` is that of `shard`: of rows of another layout the output is
        NaN. Padding rows see nothing: their output is 0.
        """
        return attention(self, q, k, v, **options)

    def explain(self) -> str:
        """Explain what each device computes, what crosses the network, and why; ``print`` it."""
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
    """Spread attention over a mesh: batch elements and heads, each over axes of their own.

    Everything that goes with q, k and v is split as they are: the mask's bounds, biases, sinks, seeds. No key
    crosses the network. A sequence is split by a plan: `attnspan.parallel.Plan.on`.

    Args:
        mesh: The devices, with axes of any type.
        mask: What each query may see; everything if None.
        batch: Mesh axis, or a tuple of them, that splits batch elements; None if no axis does.
        heads: Those that split heads. They divide the query heads. Key heads that they do not divide are held
            by all devices, each of which takes those that its query heads read.

    Returns:
        A ``mask`` for `attnspan.jax.attention`.

    Raises:
        ValueError: Axes do not fit.
        TypeError: ``mesh`` is no mesh or ``mask`` no mask.

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
    """Static part of a `PlacedPlan`, for which a program is compiled; hashable."""

    axes: Axes
    q_len: int
    k_len: int
    heads: tuple[int, int]
    sizes: Capacity


class PlacedPlan(Sharded):
    """A plan on the devices of a mesh: what `attnspan.parallel.Plan.on` returns for a JAX mesh.

    The next step's plan is other data for the same program.

    Attributes:
        frame: What programs are compiled for.
        route: The plan's arrays.

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
        self.heads, self.piece = frame.heads, frame.sizes.piece
        layouts = (None, None) if plan is None else (plan.layout, plan.keys)
        self._queries = Placing(frame.axes, route.rows, frame.q_len, layouts[0])
        self._keys = Placing(frame.axes, route.keys, frame.k_len, layouts[1])

    @property
    def plan(self) -> Plan:
        """The plan that was placed; raises inside of compiled functions, which have arrays alone."""
        remedy = "Call it outside, and hand the result in"
        got = "an argument of a compiled function, which has arrays alone"
        expect(self._plan is not None, "plan", "what plan.on(...) returned", got, remedy)
        return self._plan  # type: ignore[return-value]

    @property
    def positions(self) -> Array:
        """Number of each row in the whole sequence, in the devices' order, int32 (L, rows); 0 for padding."""
        return jnp.maximum(self._queries.rows, 0)

    @property
    def valid(self) -> Array:
        """Mask of these rows that is true for no padding, bool (L, rows)."""
        return jnp.greater_equal(self._queries.rows, 0)

    def explain(self) -> str:
        """Explain what each device computes, what crosses the network, and why; ``print`` it."""
        sizes, plan = self.frame.sizes, self.plan
        room = f"room for {sizes.keys:,} keys that a device attends to, {sizes.rows:,} of them on their way\n"
        return f"split: {self._split()}\n{room if sizes.keys else ''}{plan.explain()}"


def place(
    plan: Plan,
    mesh: Mesh,
    *,
    sequence: AxisNames,
    batch: AxisNames = None,
    heads: AxisNames = None,
    rows: Evidence = None,
    like: PlacedPlan | None = None,
) -> PlacedPlan:
    """Put a plan on a JAX mesh; see `attnspan.parallel.Plan.on`. Each host builds what its devices hold.

    Args:
        plan: Of the whole problem; its heads and batch elements are those of the global arrays.
        mesh: The devices, with axes of any type.
        sequence: Mesh axis, or a tuple of them, that splits rows and keys: the ranks of the layout.
        batch, heads: Those that split batch elements and heads, as in `shard`.
        rows: The batch that the plan is used with, of `Layout.on` or of `Layout.shard` in a data loader, its
            ``marks``, or its ``"q_index"``. "unchecked" compares nothing: right where `PlacedPlan.shard`
            makes all rows.
        like: The placed plan of an earlier step. Sizes that depend on the mask only grow from it, in powers
            of two: compiled functions soon have met them all.

    Raises:
        ValueError: Axes or sizes do not fit; the strategy needs ranks that share heads; no ``rows``, or those
            of another layout.
        TypeError: ``mesh`` is no mesh, ``rows`` say nothing of their layout, or ``like`` is no placed plan.
    """
    axes = Axes.of(mesh, batch=batch, heads=heads, sequence=sequence)
    plan = _between_groups(plan)
    axes.check_ranks(plan.layout.ranks)
    axes.check_divides("query heads of the plan", plan.sizes.q_heads, "heads")
    axes.check_divides("batch elements of the plan", plan.sizes.batch, "batch" if plan.planes > 1 else None)
    check_placed_rows(rows, plan.layout)
    wanted, remedy = "a placed plan, or None", "Pass what plan.on(...) returned"
    fits, kind = like is None or isinstance(like, PlacedPlan), type(like).__name__
    expect(fits, "like", wanted, kind, remedy, error=DtypeError)
    route, sizes = make_route(plan, axes, None if like is None else like.frame.sizes)
    return PlacedPlan(_Frame(axes, plan.layout.q_len, plan.k_len, plan.sizes.heads, sizes), route, plan)


def _between_groups(plan: Plan) -> Plan:
    """The plan, if its groups have one member; of what "auto" considered, the best such plan."""
    strategy, choice = plan.strategy, plan.choice
    considered = () if choice is None else choice.considered
    limit = None if choice is None else choice.memory
    fitting = (x.strategy for x in considered if limit is None or x.memory.max() <= limit)
    found = strategy if strategy.members == 1 else next((x for x in fitting if x.members == 1), None)
    remedy = "Plan with one of these; devices that share out heads are a mesh axis, plan.on(mesh, heads=...)"
    expect(found is not None, "strategy on a JAX mesh", '"exchange" or "ring"', repr(strategy.name), remedy)
    return plan.with_strategy(found or strategy, choice)


jax.tree_util.register_pytree_node(
    Sharded, lambda x: ((x.mask,), x.axes), lambda axes, children: Sharded(axes, *children)
)
jax.tree_util.register_pytree_node(
    PlacedPlan, lambda x: ((x.route,), x.frame), lambda frame, children: PlacedPlan(frame, *children)
)
