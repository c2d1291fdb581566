"""One attention over the devices of a mesh: its plan as a pytree, and what a model needs of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from ...call import LAYOUTS
from ...errors import OptionError
from ...jax.front import ShardedMask
from ...masks import Mask
from ...spans import Spans
from ..choose import Choice
from ..explain import explain
from ..partition import Partition
from ..plan import Plan
from ..planning import Request, lower, make_plan
from ..strategy import Strategy
from ._arguments import check_mask
from ._attend import attention
from ._axes import Axes
from ._deal import Deal
from ._deal import shard as shard_rows
from ._deal import unshard as unshard_rows
from ._route import Route, make_route

#: The dims of q, k and v in each layout, by what splits them.
_DIMS = {
    layout: tuple(
        {"length": "sequence", "tokens": "sequence", "head_dim": None}.get(dim, dim) for dim in dims
    )
    for layout, dims in LAYOUTS.items()
}


@dataclass(frozen=True)
class Frame:
    """What of a `Sharded` a program is compiled for; hashable.

    Attributes:
        axes: Which axes of the mesh split what.
        q_len: Rows of the whole problem; None where the sequence is not split.
        k_len: Its keys.
        num_heads: (Hq, Hkv), or None where the sequence is not split.
    """

    axes: Axes
    q_len: int | None
    k_len: int | None
    num_heads: tuple[int, int] | None


class _Made(NamedTuple):
    """What only the host knows of a plan."""

    plan: Plan
    request: Request
    choice: Choice | None


class Sharded(ShardedMask):
    """Attention over the devices of a mesh, under one mask: what `attnspan.jax.shard` returns.

    A pytree: hand it to a compiled function as an argument, and the next step's mask (`with_mask`) is other
    data for the same program. A function that closes over it has it as a constant.

    Attributes:
        frame: What programs are compiled for.
        mask: The mask where the sequence is not split; else None, as the plan has it.
        route: The plan's arrays where it is split.
        rows: Who owns which rows.
        keys: Who owns which keys, where they do not lie like the rows.
    """

    frame: Frame
    mask: Mask | Spans | None
    route: Route | None
    rows: Deal | None
    keys: Deal | None
    _made: _Made | None

    def __init__(self, frame: Frame, *children: Any, made: _Made | None = None) -> None:
        self.frame, self._made = frame, made
        self.mask, self.route, self.rows, self.keys = children

    @property
    def axes(self) -> Axes:
        """Which axes of the mesh split what."""
        return self.frame.axes

    @property
    def mesh(self) -> Mesh:
        """All devices."""
        return self.axes.mesh

    @property
    def plan(self) -> Plan:
        """Who attends to what, where the sequence is split.

        Raises:
            OptionError: It is not, or this is an argument of a compiled function, which has arrays alone.
        """
        return self._on_host("plan").plan

    @property
    def partition(self) -> Partition:
        """Who owns which rows."""
        return self.plan.rows

    @property
    def strategy(self) -> Strategy:
        """How the parts of the sequence work together."""
        return self.plan.strategy

    @property
    def rows_per_device(self) -> int:
        """Rows of a part of the sequence, padding included, whatever the mask."""
        return int(self._dealt("rows_per_device").rows.shape[0]) // self.axes.size("sequence")

    @property
    def positions(self) -> Array:
        """Global row numbers in the order in which devices hold rows, int32 (all rows,); 0 for padding."""
        return self._dealt("positions").positions

    @property
    def valid(self) -> Array:
        """Which of these rows are no padding, bool (all rows,)."""
        return self._dealt("valid").valid

    def spec(self, layout: str = "bhsd", split_heads: bool = True) -> PartitionSpec:
        """How q, k, v or the output are split.

        Args:
            layout: "bhsd", "bshd" or "thd".
            split_heads: False for k and v of fewer heads than the axis of the heads divides: each device
                holds them all and takes those that it needs.

        Example:
            >>> from attnspan.jax import shard
            >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
            >>> tuple(shard(mesh, batch="data", heads="model").spec("bshd"))
            ('data', None, 'model', None)
        """
        if layout not in _DIMS:
            raise OptionError(
                "layout", expected=f"one of {', '.join(_DIMS)}", got=repr(layout), remedy="Name the order"
            )
        return self.axes.spec(*(None if dim == "heads" and not split_heads else dim for dim in _DIMS[layout]))

    def shard(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = 0) -> Any:
        """Whole inputs as the devices hold them: rows in the plan's order, each device with its own.

        Do this once, at the start of a model; everything but attention works on rows one by one. Inside and
        outside of compiled functions.

        Args:
            x: An array of the whole problem in its own order, of NumPy (rows are then taken on the host) or
                JAX; or a mapping of them, such as a batch of a data loader.
            axis: The axis of the rows.
            batch_axis: The axis of batch rows, which mesh axes split as well; None if there is none.
            fill: Value of padding rows. For mappings a number or a mapping by name; ids get -1 and labels
                -100 where it is 0.

        Returns:
            The same with `rows_per_device` times the parts of the sequence as rows.

        Raises:
            ShapeError: Another number of rows, or a batch that the mesh axes do not divide.
        """
        return shard_rows(self.rows, self.axes, x, axis, batch_axis, fill)

    def shard_keys(self, x: Any, axis: int = 1, *, batch_axis: int | None = 0, fill: Any = 0) -> Any:
        """The same for what keys are made of: `shard` itself in self-attention.

        Args:
            x: As for `shard`, with k_len rows.
            axis: The axis of the rows.
            batch_axis: The axis of batch rows.
            fill: Value of padding rows.
        """
        deal = self.rows if self.keys is None else self.keys
        return shard_rows(deal, self.axes, x, axis, batch_axis, fill)

    def unshard(self, x: Array, axis: int = 1, *, batch_axis: int | None = 0) -> Array:
        """The whole in its own order, without padding, from what the devices hold.

        Args:
            x: What `shard` or attention gave.
            axis: The axis of the rows.
            batch_axis: The axis of batch rows, which stay split.

        Raises:
            ShapeError: Another number of rows.
        """
        return unshard_rows(self.rows, self.axes, x, axis, batch_axis)

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """`attnspan.jax.attention` of global arrays, each device with its part; inside or outside of jit.

        Args:
            q: Shape (B, Hq, rows of all devices, D) in layout "bhsd".
            k: Shape (B, Hkv, keys of all devices, D).
            v: Shape (B, Hkv, keys of all devices, Dv).
            **options: Keywords of `attnspan.jax.attention`, without ``mask``. Seeds, slopes, sinks and tables
                are those of all batch rows and heads. Where the sequence is split, the plan knows where rows
                are: ``q_index`` and ``k_index`` are not taken, nor is a dense bias.

        Returns:
            The output, split as q is; with ``return_lse=True`` also the lse (B, Hq, rows). Padding rows see
            nothing: their output is 0.

        Raises:
            ValueError: Shapes, options or shardings do not fit.
            TypeError: Element types do not fit.
        """
        return attention(self, q, k, v, **options)

    def with_mask(self, mask: Mask | Spans, *, keep_rows: bool = False) -> Sharded:
        """The same for another mask of the same length: that of the next step, or of other layers.

        Each mask deals the rows out anew, so that what `shard` of one gave must not meet another, unless that
        keeps its rows. Sizes of the plan's arrays only ever grow, in powers of two: a compiled function that
        takes this as an argument soon has met them all.

        Args:
            mask: What each query may see, of the whole problem.
            keep_rows: Leave the rows where this plan has them, as layers with different masks need it.
        """
        check_mask(mask, bool(self.axes.sequence))
        if self.axes.sequence == ():
            return Sharded(self.frame, mask, None, None, None)
        made = self._on_host("with_mask")
        rows = made.plan.rows if keep_rows else made.request.rows
        # "auto" has been decided.
        request = replace(made.request, strategy=made.plan.strategy, rows=rows)
        return planned(self.frame, mask, request, self.route)

    def explain(self) -> str:
        """What each device computes and what crosses the network, and why; ``print`` it."""
        axes = self.axes
        split = [dim for dim in ("batch", "heads", "sequence") if axes.names(dim)]
        sizes = [f"{dim} over {axes.words(dim)} ({axes.size(dim)})" for dim in split]
        lines = [f"split: {', '.join(sizes) or 'nothing'}"]
        if self.route is None:
            return "\n".join([*lines, "no keys cross the network: each device has all of its rows and heads"])
        made = self._on_host("explain")
        if self.route.exchange is not None:
            width, keys = self.route.exchange.send.shape[3], self.route.exchange.keys.shape[1]
            lines.append(
                f"pieces of {width:,} keys between any two parts of the sequence, each of which attends to "
                f"{keys // axes.size('sequence'):,} (both with room for other masks)"
            )
        return "\n".join([*lines, str(explain(*made))])

    def __repr__(self) -> str:
        axes = self.axes
        split = ", ".join(
            f"{dim}={axes.words(dim)}" for dim in ("batch", "heads", "sequence") if axes.names(dim)
        )
        length = "" if self.frame.q_len is None else f", q_len={self.frame.q_len}, k_len={self.frame.k_len}"
        return f"Sharded({split or 'nothing split'}{length})"

    def _dealt(self, what: str) -> Deal:
        if self.rows is None:
            raise _needs_sequence(what, "rows stay where they are")
        return self.rows

    def _on_host(self, what: str) -> _Made:
        if self.axes.sequence == ():
            raise _needs_sequence(what, "there is nothing to plan")
        if self._made is None:
            raise OptionError(
                f"{what} of a sharded attention",
                expected="the one that shard(...) or with_mask(...) returned",
                got="an argument of a compiled function, which has arrays alone",
                remedy="Call it outside, and hand the result in",
            )
        return self._made


def _needs_sequence(what: str, why: str) -> OptionError:
    return OptionError(
        f"{what} of a sharded attention",
        expected="one whose sequence is split",
        got=f"sequence=None: {why}",
        remedy="Pass the mesh axis that splits rows, shard(mesh, sequence=...)",
    )


def _flatten(x: Sharded) -> tuple[tuple[Any, ...], Frame]:
    return (x.mask, x.route, x.rows, x.keys), x.frame


jax.tree_util.register_pytree_node(Sharded, _flatten, lambda frame, children: Sharded(frame, *children))


def planned(frame: Frame, mask: Mask | Spans, request: Request, before: Route | None) -> Sharded:
    """Make a plan, and put its arrays on the devices.

    Args:
        frame: Of the result; its sequence is split.
        mask: What each query may see.
        request: How the plan is to be made.
        before: The arrays of another step, whose sizes are kept where they suffice.
    """
    assert frame.q_len is not None
    assert frame.k_len is not None
    call, axes = request.call, frame.axes
    lowered = lower(mask, frame.q_len, frame.k_len, call.batch, call.q_heads)
    if request.strategy == "auto" and request.rows is None:
        # Both strategies deal the rows out alike.
        first, _ = make_plan(lowered, replace(request, strategy=Strategy("exchange", 1, request.ranks)))
        plan, choice = make_plan(lowered, replace(request, rows=first.rows))
    else:
        plan, choice = make_plan(lowered, request)
    if plan.planes > 1:
        axes.check_divides("batch_size", plan.planes, "batch")
    route = make_route(plan, axes.size("batch"), before).placed(axes)
    rows = Deal.of(plan.rows, axes)
    keys = None if plan.keys is plan.rows else Deal.of(plan.keys, axes)
    return Sharded(frame, None, route, rows, keys, made=_Made(plan, request, choice))
