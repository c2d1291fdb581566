"""Plans: the keys that layers of one kind need from other ranks, computed in NumPy for any framework.

Keys that travel have flat numbers: plane * k_len + key, where a plane is a batch element of the mask.
`layout.py` and `partition.py` decide which rank has which rows. docs/parallel.md describes context
parallelism. Shapes: P ranks, r groups of u members, L planes, N rows and S
keys of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnspan.base.checks import count
from attnspan.base.forks import without_locks
from attnspan.errors import DtypeError, OptionError, ShapeError, expect
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans

from .auto import Rates, StrategyChoice, choose
from .chunks import Chunks
from .cost import Cost, Sizes, cost_of
from .intervals import expand, read_only
from .local import LocalPlan, Numbers, Stage, Tables, Transfer, encode
from .lowered import digest, lower
from .needs import Holders, Needs, Traffic, needs_of, pieces, traffic
from .places import Kept, Places, Slots, ascending, check_places, key_order, padding_last, take_rows
from .rows import check_attends
from .step import step
from .strategy import Strategy

if TYPE_CHECKING:  # A layout imports this module when it plans.
    from .layout import Layout


def make_plan(
    layout: Layout,
    mask: Mask | Spans,
    *,
    heads: tuple[int, int],
    strategy: str | Strategy = "auto",
    keys: Layout | None = None,
    k_len: int | None = None,
    batch: int | None = None,
    head_dim: int = 128,
    v_dim: int | None = None,
    itemsize: int = 2,
    node_size: int | None = None,
    machine: Rates | None = None,
    memory: int | None = None,
) -> Plan:
    """Plan an attention. The same arguments give the same plan in every process. See `Layout.plan`.

    Args:
        layout: Layout of the queries.
        mask: Mask of the whole problem.
        heads: (Hq, Hkv) of a rank's q and k.
        strategy: One of these, which may differ between layers of one layout:

            - "exchange": only keys that the receiver needs cross the network.
            - "ring": all keys go from neighbour to neighbour.
            - "ulysses": each rank gets all rows of some heads.
            - "hybrid(u, r)": Ulysses among u neighbours, an exchange between r groups of them.
            - "hybrid(u, r, ring)": Ulysses among u neighbours, a ring between r groups of them.
            - "auto" (default): the strategy with the fewest bytes, or with `machine` the shortest time.

        keys: Layout of the keys in cross attention. None for self-attention, or if you pass `k_len`.
        k_len: Keys of the whole problem in cross attention. Without `keys`, their layout is
            ``Layout.contiguous(k_len, ranks)``.
        batch: Batch size of a rank's q. None for the layout's number of batch elements.
        head_dim, v_dim: Head dims of q and k, and of v. Only "auto" and `explain` use them.
        itemsize: Bytes of an element. Only "auto" and `explain` use it.
        node_size: Ranks of a node. With "auto", as many ranks of a node as possible share heads, and ranks of
            different nodes never do. Few keys then cross between nodes twice.
        machine: Measured rates, with which "auto" predicts times.
        memory: Limit for the buffers of one call, in bytes. "auto" leaves out strategies that need more.

    Raises:
        OptionError: An option is illegal, or no strategy fits into `memory`.
        ShapeError: Sizes of the mask, the layouts or the batch do not fit.
        DtypeError: An argument has another type.
    """
    _check_sizes(heads, batch, head_dim, v_dim, itemsize, node_size)
    kinds = ("keys", keys, type(layout), "a Layout"), ("machine", machine, Rates, "measured rates")
    for what, x, kind, wanted in (*kinds, ("memory", memory, Real, "a number of bytes")):
        remedy = "Pass one, or leave it out"
        expect(x is None or isinstance(x, kind), what, wanted, repr(x), remedy, error=DtypeError)
    keys = _keys_of(layout, keys, k_len)
    batch = max(layout.planes, 1 if keys is None else keys.planes) if batch is None else batch
    known, given = layout.source_of(mask) is not None, layout if keys is None else keys
    prepared = lower(mask, layout.q_len, given.q_len, batch, heads[0], known)
    sizes = Sizes(*heads, head_dim, head_dim if v_dim is None else v_dim, itemsize, batch)
    plan = Plan(layout, given, prepared, Strategy("exchange", 1, layout.ranks), sizes)
    what, remedy = "batch elements of a plan", "Pass batch=..., and layouts and a mask of the same batch"
    for got in (layout.planes, plan.keys.planes):
        expect(got in (1, batch), what, f"1 or {batch}", got, remedy, error=ShapeError)
    if isinstance(strategy, str) and strategy == "auto":
        choice = choose(plan, node_size=node_size, machine=machine, memory=memory)
        return plan.with_strategy(choice.best.strategy, choice)
    return plan.with_strategy(Strategy.parse(strategy, layout.ranks))


def _keys_of(layout: Layout, keys: Layout | None, k_len: int | None) -> Layout | None:
    if keys is None:
        return None if k_len is None else layout.contiguous(k_len, layout.ranks)
    remedy = "Make both layouts for the same ranks"
    expect(keys.ranks == layout.ranks, "keys", f"a layout of {layout.ranks} ranks", keys.ranks, remedy)
    fits = k_len is None or keys.q_len == k_len
    expect(fits, "keys", f"{k_len} rows, as k_len says", keys.q_len, remedy, error=ShapeError)
    return keys


def _check_sizes(heads: Any, *sizes: Any) -> None:
    for name, size in zip(("batch", "head_dim", "v_dim", "itemsize", "node_size"), sizes, strict=True):
        if size is not None:
            count(name, size, least=1)
    whole = isinstance(heads, tuple) and len(heads) == 2 and all(type(x) is int and x > 0 for x in heads)
    remedy = "Pass the numbers of heads of a rank's q and k"
    wanted = "(query heads, key heads), the second a divisor of the first"
    expect(whole and heads[0] % heads[1] == 0, "heads", wanted, repr(heads), remedy, error=OptionError)


@without_locks
@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of one attention over ranks: its mask, and the keys that cross the network. Plans are picklable.

    Attributes:
        layout: Layout of the queries.
        keys: Layout of the keys. In self-attention it is `layout` itself.
        mask: The mask, lowered for the whole problem with bounds in NumPy.
        strategy: Strategy of the ranks.
        sizes: Sizes of a call.
        choice: Strategies that "auto" compared. None if you named the strategy.
        shifts: Shifts of a plan of `Layout.plan_roll`. Empty for attention.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> plan = Layout.contiguous(8, ranks=2).plan(causal(), heads=(4, 2), strategy="exchange")
        >>> plan.tables(1).transfer.receive_counts.tolist()
        [4, 0]
    """

    layout: Layout
    keys: Layout
    mask: Prepared
    strategy: Strategy
    sizes: Sizes
    choice: StrategyChoice | None = field(default=None, repr=False)
    shifts: tuple[int, ...] = ()

    def __repr__(self) -> str:
        sizes = f"q_len={self.layout.q_len}, k_len={self.k_len}, heads={self.sizes.heads}"
        if self.shifts:
            return f"Plan(roll by {self.shifts} on {self.strategy.ranks} ranks, q_len={self.layout.q_len})"
        return f"Plan({self.strategy.name} on {self.strategy.ranks} ranks, {sizes})"

    def with_strategy(self, strategy: Strategy, choice: StrategyChoice | None = None) -> Plan:
        """Copy the plan with another strategy, and the choice that led to it."""
        return replace(self, strategy=strategy, choice=choice)

    @property
    def bounds(self) -> Any:
        """Bounds of the mask for the whole problem, int32 (L|1, H|1, q_len, R, 2)."""
        return self.mask.lowered.bounds

    @property
    def k_len(self) -> int:
        """Number of keys."""
        return int(self.mask.lowered.k_len)

    @cached_property
    def planes(self) -> int:
        """Number of batch elements that have plans of their own, L. It is 1 if they share one."""
        return max(self.layout.planes, self.keys.planes, int(self.bounds.shape[0]))

    @cached_property
    def _cut(self) -> tuple[Chunks, NDArray[Any]]:
        """Chunks of the rows, and the rank of each chunk."""
        runs = self.layout.runs(self.planes)
        return Chunks.of(self.mask.lowered, runs.edges, self.planes), runs.rank

    def _chunks(self, strategy: Strategy) -> tuple[Chunks, NDArray[Any]]:
        """Chunks of the rows, and the group of each chunk."""
        source, u = self.layout.source_of(self.mask), strategy.members
        if source is not None and source.chunks.planes == self.planes and u % source.members == 0:
            return source.chunks, source.owner // (u // source.members)
        chunks, rank = self._cut
        return chunks, rank // u

    def needs(self, strategy: Strategy) -> Needs:
        """The keys that each group of a strategy needs."""
        return needs_of(*self._chunks(strategy), strategy.groups)

    def holders(self, strategy: Strategy) -> Holders:
        """Keys that each group of a strategy holds."""
        return Holders.of(self.keys, self.planes, strategy.members)

    def pairs(self, strategy: Strategy) -> NDArray[np.float64]:
        """Visible pairs of each group, summed over the mask's batch elements and heads."""
        chunks, owner = self._chunks(strategy)
        return np.bincount(owner, chunks.pairs, strategy.groups).astype(np.float64)

    def cost(self, strategy: str | Strategy | None = None, node_size: int | None = None) -> Cost:
        """Predict pairs, bytes and memory of each rank.

        Args:
            strategy: Another strategy than the plan's.
            node_size: Ranks of a node. None if all ranks are in one node.

        Raises:
            OptionError: An argument is illegal, or it is the plan of a roll. `traffic` counts its rows.

        Example:
            >>> from attnspan import causal
            >>> from attnspan.parallel import Layout
            >>> plan = Layout.contiguous(8, ranks=2).plan(causal(), heads=(4, 2), strategy="exchange")
            >>> plan.cost().fetched.tolist(), plan.cost("ring").fetched.tolist()
            ([0, 4], [4, 4])
        """
        check_attends("Plan.cost", self.shifts)
        if node_size is not None:
            count("node_size", node_size, least=1)
        found = self.strategy if strategy is None else Strategy.parse(strategy, self.layout.ranks)
        return cost_of(self, found, node_size)

    @cached_property
    def facts(self) -> dict[str, int]:
        """Named fingerprints, which ranks compare to detect different plans."""
        index = np.zeros(0) if self.mask.q_index is None else np.asarray(self.mask.q_index)
        words = f"{self.strategy.name} {self.sizes.heads}".encode()
        return {
            "mask": digest(self.bounds, index, np.array([self.k_len])),
            "layout": self.layout.fingerprint,
            "layout of the keys": self.keys.fingerprint,
            "strategy and heads": digest(np.frombuffer(words, np.uint8)),
        }

    def explain(self) -> str:
        """Explain pairs and bytes of each rank, the lower bounds, and the comparison by "auto".

        ``print`` the text.

        Example:
            >>> from attnspan import causal
            >>> from attnspan.parallel import Layout
            >>> plan = Layout.contiguous(8, ranks=2).plan(causal(), heads=(4, 2), strategy="exchange")
            >>> print(plan.explain())  # doctest: +ELLIPSIS
            exchange on 2 ranks: 8 rows, 8 keys, 4/2 heads
            ...
        """
        from .explain import explain

        return explain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Cached tables are large. They stay in the process that made them.
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def _parts(self) -> dict[int, LocalPlan]:
        return {}

    def local(self, rank: int) -> LocalPlan:
        """Make one rank's part of the plan.

        Raises:
            OptionError: There is no such rank.
            ShapeError: The batch size times the keys that a group needs is not below 2^31.
        """
        if rank in self._parts:
            return self._parts[rank]
        tables, facts = self.tables(rank), np.array(list(self.facts.values()))
        data, numbers = encode(tables._replace(numbers=tables.numbers._replace(plan=digest(facts))))
        self._parts[rank] = LocalPlan(
            strategy=self.strategy,
            rank=rank,
            heads=self.sizes.heads,
            q_len=self.layout.q_len,
            k_len=self.k_len,
            rows=self.layout.rows[rank],
            keys_per_rank=self.keys.rows_per_rank,
            planes=self.planes,
            natural=self.layout.is_natural and self.keys.is_natural,
            layout=self.layout.fingerprint,
            facts=self.facts,
            data=data,
            numbers=numbers,
            shifts=self.shifts,
        )
        return self._parts[rank]

    def on(self, mesh: Any, **options: Any) -> Any:
        """Put the plan on a mesh. The result is a mask for `attention`.

        A DeviceMesh gives a mask for torch, a JAX mesh gives a mask for JAX.

        Args:
            mesh: A JAX mesh, or a DeviceMesh of one dimension or of two (nodes, ranks of a node).
            **options: You must pass ``rows``: the batch from `Layout.shard` that you use the plan with, its
                ``marks``, or its ``"q_index"``. ``rows="unchecked"`` compares nothing. Use it only if you are
                sure of the order, because equal shapes hide wrong rows.

                Other options for torch: ``check`` compares the ranks' plans and calls (default True), and
                ``dtensor_rows``, see `MeshPlan.of`. Other options for JAX: the mesh axes ``sequence``,
                ``batch`` and ``heads``, and ``like``, see `attnspan.parallel.jax.place`.

        Raises:
            OptionError: There are no ``rows``, or the mesh does not fit.
            PlanMismatchError: ``rows`` belong to another layout or rank.
            DtypeError: ``rows`` do not identify their layout.
            ShapeError: ``rows`` have another length.

        Example:
            >>> import jax
            >>> from attnspan import causal
            >>> from attnspan.parallel import Layout
            >>> layout, mesh = Layout.of(causal(), q_len=9, ranks=1), jax.make_mesh((1,), ("context",))
            >>> plan = layout.plan(heads=(4, 2), strategy="exchange")
            >>> plan.on(mesh, sequence="context", rows=layout.shard({"x": np.zeros((1, 9))}, rank=0))
            PlacedPlan(sequence over 'context' (1))
        """
        return step("plan", framework_of(mesh))(self, mesh, **options)

    def of_planes(self, part: int, parts: int) -> Plan:
        """Make the plan of one of `parts` equal parts of the batch elements."""
        if parts == 1:
            return self
        each = self.planes // parts
        at = slice(part * each, (part + 1) * each)

        def some(x: Any, axis: int = 0) -> Any:
            whole = x is None or x.shape[axis] == 1
            return x if whole else x[(slice(None),) * axis + (at,)]

        layouts = {x: type(x)(x.q_len, some(x.rows, 1)) for x in {self.layout, self.keys}}
        mask = Prepared(Spans(some(self.bounds), self.k_len), some(self.mask.q_index))
        sizes = self.sizes._replace(batch=self.sizes.batch // parts)
        return Plan(layouts[self.layout], layouts[self.keys], mask, self.strategy, sizes)

    def traffic(self, parts: int = 1) -> Traffic:
        """Count the keys that an exchange moves, for each part of the batch elements."""
        return traffic(*self._needs_and_holders, self.planes, self.k_len, parts)

    def tables(self, rank: int) -> Tables:
        """Make the tables that the operator of one rank reads. Ranks of a group differ only in `rank`."""
        strategy, rank = self.strategy, self.layout.checked_rank(rank)
        group = rank // strategy.members
        rows = self._rows(self.layout, group)
        taken = take_rows(self.bounds, rows, self.planes)
        slots = self._rows(self.keys, group)
        order, transfer = np.zeros(0, np.int32), None
        if strategy.kind == "ring" or strategy.groups == 1:
            stages = self._ring(group, taken)
            order = np.zeros(0, np.int32) if self._keys_ascend else key_order(slots, self.planes)
        else:
            stages, transfer = self._exchange(group, taken, slots)
        numbers = Numbers(strategy, rank, self.planes, slots.shape[1])
        return Tables(numbers, self._q_index(rows), order, stages, transfer)

    @cached_property
    def _keys_ascend(self) -> bool:
        """Whether the keys of all groups lie in ascending order. If not, all groups sort their keys."""
        every = np.concatenate([self._rows(self.keys, group) for group in range(self.strategy.groups)])
        return bool((np.diff(padding_last(every), axis=1) >= 0).all())

    def _rows(self, layout: Layout, group: int) -> Places:
        """Rows of a group in the order of its members, (L of the layout, u * n), -1 for padding."""
        u = self.strategy.members
        part = layout.rows[group * u : (group + 1) * u]
        rows: Places = part.transpose(1, 0, 2).reshape(layout.planes, -1)
        return rows

    def _q_index(self, rows: Places) -> Places:
        found, index = rows + (self.k_len - self.layout.q_len), self.mask.q_index
        if index is not None:
            planes = np.arange(max(len(index), len(rows)))[:, None]
            found = index[planes % len(index), np.maximum(rows, 0)]
        placed: Places = np.where(rows < 0, 0, found).astype(np.int32)
        return placed

    def _ring(self, group: int, bounds: Places) -> tuple[Stage, ...]:
        stages = []
        for hop in range(self.strategy.groups):
            keys = ascending(self._rows(self.keys, (group - hop) % self.strategy.groups))
            ranks = np.empty_like(bounds)
            for plane in range(len(bounds)):
                held = keys[plane % len(keys)]
                ranks[plane] = np.searchsorted(held[held >= 0], bounds[plane])
            visible = bool((ranks[..., 1] > ranks[..., 0]).any())
            stages.append(Stage(np.maximum(keys, 0), ranks, visible))
        return tuple(stages)

    def _exchange(self, group: int, bounds: Places, slots: Places) -> tuple[tuple[Stage, ...], Transfer]:
        check_places(self.planes, slots.shape[1])
        needs, holders = self._needs_and_holders
        kept = Kept.of(needs, group, self.planes, self.k_len)
        planes = np.arange(self.planes, dtype=np.int64)[:, None, None, None, None]
        ranks = kept.count(bounds + planes * self.k_len) - kept.before[planes]
        stage = Stage(kept.keys, ranks.astype(np.int32))
        leaving = pieces(needs, holders, source=group)
        coming = pieces(needs, holders, group=group)
        order = np.argsort(coming.source, kind="stable")
        slot_of = Slots(slots, self.planes, self.k_len)
        own = slot_of.keys[kept.has(slot_of.keys)]
        counts: Any = [
            np.bincount(peer, x.hi - x.lo, self.strategy.groups).astype(np.int64)
            for peer, x in ((leaving.group, leaving), (coming.source, coming))
        ]
        send, place = expand(leaving.lo, leaving.hi), expand(coming.lo[order], coming.hi[order])
        return (stage,), Transfer(slot_of(send), kept.place(place), slot_of(own), kept.place(own), *counts)

    @cached_property
    def _needs_and_holders(self) -> tuple[Needs, Holders]:
        return read_only((self.needs(self.strategy), self.holders(self.strategy)))


def framework_of(mesh: Any) -> str:
    """Name of a mesh's framework."""
    return "jax" if type(mesh).__module__.startswith("jax") else "torch"
