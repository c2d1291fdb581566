"""Layouts of tokens over ranks. A data loader makes them from a mask, without a process group.

Shapes: P ranks, L batch elements that are partitioned one by one (1 if they share a mask), S rows of the
whole problem, n rows of a rank, padding included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from attnspan.base.arrays import Array, arrays_for, is_array
from attnspan.base.checks import count, number
from attnspan.base.forks import without_locks
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bounds import Spans
from attnspan.masks.memory import Memory

from .chunks import Chunks
from .intervals import Ints, read_only
from .lowered import digest, lower
from .partition import Method, chunk_size, owners, rows_of
from .rows import Marks, checked_rows, fill_of, marked, take
from .step import step

if TYPE_CHECKING:
    from .plan import Plan


#: Layouts of masks without data, such as `causal()`, which never change.
_memory = Memory()


class Source(NamedTuple):
    """Mask that a layout was made from, with its chunks, which plans for the same mask reuse.

    Attributes:
        mask: The lowered mask.
        chunks: Chunks of its rows.
        owner: int32 (planes * n_chunks,), the group of each chunk.
        members: Ranks of a group.
    """

    mask: Prepared
    chunks: Chunks
    owner: NDArray[np.int32]
    members: int


@dataclass(frozen=True)
class Runs:
    """Runs of neighbouring rows with one owner, in ascending flat order. Row i of plane p is p * S + i.

    Attributes:
        edges: int64 (m + 1,), run r has the rows edges[r]:edges[r + 1].
        rank: int64 (m,), the owner of each run.
    """

    edges: Ints
    rank: Ints


@without_locks
@dataclass(frozen=True, eq=False)
class Layout:
    """Partition of a sequence: the rows that each rank owns.

    Attributes:
        q_len: Rows of the whole problem, S.
        rows: int32 (P, L, n), read-only. The rows of each rank, ascending, then -1 for padding.

    Raises:
        ShapeError: `rows` has another shape or dtype.
        OptionError: `rows` does not hold each row once in ascending order, or `q_len` is negative.

    Example:
        >>> from attnspan import causal
        >>> layout = Layout.of(causal(), q_len=8, ranks=2, method="zigzag", rows_per_chunk=2)
        >>> layout.rows.tolist()
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
        >>> layout.shard({"tokens": np.arange(8)[None]}, rank=1)
        {'tokens': array([[2, 3, 4, 5]]), 'q_index': array([[2, 3, 4, 5]])}
    """

    q_len: int
    rows: NDArray[np.int32]
    _source: Source | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._source is None:  # Rows that a search found are right already.
            object.__setattr__(self, "rows", checked_rows(self.q_len, self.rows))
        read_only(self.rows)

    @classmethod
    def of(
        cls,
        mask: Mask | Spans | None = None,
        *,
        q_len: int,
        ranks: int,
        k_len: int | None = None,
        batch: int = 1,
        heads: int = 1,
        members: int = 1,
        method: Method = "balanced",
        rows_per_chunk: int | None = None,
        tolerance: float = 1.01,
    ) -> Layout:
        """Partition a sequence over ranks.

        The same arguments give the same layout in every process. The rows per rank depend only on `q_len`,
        `ranks`, `members` and `rows_per_chunk`, so shapes stay when the mask changes.

        Args:
            mask: Mask of the whole problem. If a model has several kinds of layers, pass the mask of the most
                expensive kind. None is ``full()``.
            q_len: Rows of the whole problem, S.
            ranks: Number of ranks, P.
            k_len: Keys of the mask in cross attention. None for self-attention.
            batch: Batch size. If batch elements have different masks, each element is partitioned, and their
                work is balanced together.
            heads: Number of query heads, for masks that differ between heads.
            members: Ranks that share heads in the plans of this layout (Ulysses). Work is balanced over
                groups of this many neighbours.
            method: "balanced" makes visible pairs equal within `tolerance`, then fetches as few keys as
                possible. "contiguous" keeps rows in order. "zigzag" gives each group one part from the front
                and one from the back.
            rows_per_chunk: Neighbouring rows that stay together. None for 24 to 48 chunks per group.
            tolerance: Goal of "balanced": visible pairs of the busiest group over the mean, at least 1.

        Raises:
            OptionError: A size is less than 1, `members` does not divide `ranks`, `tolerance` is less than 1,
                `method` is unknown, or the mask's data are illegal.
            ShapeError: The mask was lowered for another problem.
            DtypeError: `mask` is no mask, or a size is no int.

        Example:
            >>> from attnspan import causal, documents
            >>> mask = causal() & documents([0, 3, 8])
            >>> Layout.of(mask, q_len=8, ranks=2, rows_per_chunk=2).rows_per_rank
            4
        """
        sizes = {"q_len": q_len, "ranks": ranks, "batch": batch, "heads": heads, "members": members}
        for name, size in sizes.items():
            count(f"Layout.of: {name}", size, least=1)
        what, remedy = "Layout.of: members", "Every group has the same number of ranks"
        expect(ranks % members == 0, what, f"a divisor of {ranks} ranks", members, remedy)
        fits, remedy = isinstance(tolerance, Real) and tolerance >= 1, "Pass largest over mean work"
        expect(fits, "Layout.of: tolerance", "a number of at least 1", repr(tolerance), remedy)
        names = "'balanced', 'contiguous' or 'zigzag'"
        expect(method in get_args(Method), "method", names, repr(method), "Pass one of them")
        mask, groups = full() if mask is None else mask, ranks // members
        k_len = q_len if k_len is None else k_len
        if rows_per_chunk is None:
            rows_per_chunk = chunk_size(q_len, groups)
        count("Layout.of: rows_per_chunk", rows_per_chunk, least=1)
        given = q_len, k_len, ranks, members, method, rows_per_chunk, tolerance
        key = mask.static_key() if isinstance(mask, Mask) else None

        def make() -> Layout:
            prepared = lower(mask, q_len, k_len, batch, heads)
            planes = prepared.lowered.bounds.shape[0]
            edges = Chunks.even_edges(q_len, planes, rows_per_chunk)
            chunks = Chunks.of(prepared.lowered, edges)
            owner = owners(chunks, groups, method, tolerance)
            table = rows_of(owner.reshape(planes, -1), q_len, groups, members, rows_per_chunk)
            return cls(q_len, table, Source(prepared, chunks, read_only(owner), members))

        found = None if key is None else _memory.without_arrays((key, given), make)
        return make() if found is None else found

    @classmethod
    def contiguous(cls, q_len: int, ranks: int) -> Layout:
        """Partition the rows in order: ceil(q_len / ranks) rows to each rank, until none are left.

        Raises:
            OptionError: `q_len` is negative, or `ranks` is less than 1.

        Example:
            >>> Layout.contiguous(5, ranks=2).rows.tolist()
            [[[0, 1, 2]], [[3, 4, -1]]]
        """
        count("Layout.contiguous: q_len", q_len)
        count("Layout.contiguous: ranks", ranks, least=1)
        each = -(-q_len // ranks)
        rows = np.arange(ranks * each, dtype=np.int32)
        return cls(q_len, np.where(rows < q_len, rows, -1).astype(np.int32).reshape(ranks, 1, each))

    def __getstate__(self) -> dict[str, Any]:
        # The mask and its chunks are large. They stay in the process that plans.
        return {"q_len": self.q_len, "rows": self.rows, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        read_only(self.rows)

    def __repr__(self) -> str:
        planes = f", batch={self.planes}" if self.planes > 1 else ""
        return f"Layout(q_len={self.q_len}, ranks={self.ranks}{planes}, rows_per_rank={self.rows_per_rank})"

    @property
    def ranks(self) -> int:
        """Number of ranks, P."""
        return int(self.rows.shape[0])

    @property
    def planes(self) -> int:
        """Number of batch elements that are partitioned one by one, L. It is 1 if they share a mask."""
        return int(self.rows.shape[1])

    @property
    def rows_per_rank(self) -> int:
        """Rows of each rank, n, padding included. It is the same on all ranks."""
        return int(self.rows.shape[2])

    @cached_property
    def fingerprint(self) -> int:
        """Hash of the layout with 60 bits."""
        return digest(np.array([self.q_len]), self.rows)

    @cached_property
    def is_natural(self) -> bool:
        """Whether the ranks hold the rows in their original order, one rank after the other."""
        flat = self.rows.transpose(1, 0, 2).reshape(self.planes, -1)[:, : self.q_len]
        return bool((flat == np.arange(self.q_len)).all())

    def runs(self, planes: int) -> Runs:
        """Runs of neighbouring rows with one owner, for at least as many planes as the layout has."""
        one = self._runs
        if self.planes == planes:
            return one
        base = np.arange(planes, dtype=np.int64)[:, None] * self.q_len
        edges = np.append((base + one.edges[:-1]).reshape(-1), planes * self.q_len)
        return Runs(edges, np.tile(one.rank, planes))

    @cached_property
    def _runs(self) -> Runs:
        ranks, planes, _ = self.rows.shape
        flat = np.arange(planes)[:, None] * self.q_len + self.rows.astype(np.int64)
        begins = np.ones(self.rows.shape, bool)
        begins[:, :, 1:] = np.diff(self.rows, axis=2) != 1
        begins &= self.rows >= 0
        starts = flat[begins]
        owner = np.broadcast_to(np.arange(ranks)[:, None, None], self.rows.shape)[begins]
        order = np.argsort(starts, kind="stable")
        return read_only(Runs(np.append(starts[order], planes * self.q_len), owner[order]))

    def valid(self, rank: int) -> NDArray[np.bool_]:
        """Mask of a rank's rows, bool (L, n): True for tokens, False for padding.

        Raises:
            OptionError: There is no such rank.
        """
        return np.asarray(self.rows[self.checked_rank(rank)] >= 0)

    def shard(self, x: Any, rank: int, dim: int = 1, fill: Any = None) -> Any:
        """Take one rank's rows of whole inputs.

        Args:
            x: Array or tensor with S rows along `dim`, or a mapping of them, such as a batch. If batch
                elements are partitioned one by one, they must be dimension 0.
            rank: The rank within the context-parallel mesh, 0 to P - 1.
            dim: Dimension of the rows.
            fill: Value of padding, default 0. For a mapping: one number for all entries, or a mapping from
                names to numbers. Its default for integers is -1 for the names "ids" and "segment_ids", -100
                for names that contain "label" or "target", and 0 for others. Its default for bools is True
                for names that contain "padding_mask", else False.

        Returns:
            A copy with n rows along `dim`. A mapping becomes `Rows`, which also holds "q_index".

        Raises:
            ShapeError: `x` has another number of rows.
            OptionError: There is no such rank, the mapping has a "q_index", or an array cannot hold its fill.
            DtypeError: `x` or an entry is no array.

        Example:
            >>> layout = Layout.contiguous(5, ranks=2)
            >>> layout.shard(np.arange(5)[None], rank=1, fill=-1).tolist()
            [[3, 4, -1]]
        """
        self.checked_rank(rank)
        if not isinstance(x, Mapping):
            return self._shard("x", x, rank, dim, fill)
        remedy = "Rename it, because shard stores the q_index of these rows for attention there"
        expect("q_index" not in x, "Layout.shard: x", "no entry 'q_index'", "one", remedy)
        unknown = set(fill) - set(x) if isinstance(fill, Mapping) else set()
        expect(not unknown, "Layout.shard: fill", f"names of {list(x)}", f"{list(unknown)}", "Fix the names")
        parts = {name: self._shard(name, part, rank, dim, fill) for name, part in x.items()}
        arrays = arrays_for(list(x.values())[:1])
        parts["q_index"] = arrays.asarray(self.rows[rank].astype(np.int64), "int64")
        return marked(parts, Marks(self.fingerprint, rank))

    def on(self, mesh: Any, **axes: Any) -> Any:
        """Put the layout on a JAX mesh.

        Args:
            mesh: Mesh of the devices.
            **axes: Mesh axes ``sequence``, ``batch`` and ``heads``, as in `Plan.on`.

        Returns:
            An `attnspan.parallel.jax.rows.Placing`. Its `shard` places whole inputs on the devices, and its
            `unshard` undoes it. Pass a batch that it sharded as ``rows`` to `Plan.on`.

        Raises:
            ValueError: Axes do not fit the mesh or the layout.
            TypeError: ``mesh`` is no JAX mesh.

        Example:
            >>> import jax
            >>> mesh, layout = jax.make_mesh((1,), ("context",)), Layout.contiguous(5, ranks=1)
            >>> layout.on(mesh, sequence="context").shard({"x": np.ones((2, 5))})["q_index"].tolist()
            [[0, 1, 2, 3, 4]]
        """
        return step("layout", "jax")(self, mesh, **axes)

    def _shard(self, name: str, x: Array, rank: int, dim: int, fill: Any) -> Array:
        xp = self.check_rows(f"Layout.shard: {name}", x, dim, self.q_len)
        rows = self.rows[rank]
        found = take(x, np.maximum(rows, 0), dim)
        if self.rows_per_rank * self.ranks == self.q_len:
            return found
        value = fill_of(name, fill, x)  # also on ranks without padding, so that all ranks raise alike
        if (rows >= 0).all():
            return found
        shape = [1] * x.ndim
        shape[dim] = self.rows_per_rank
        if self.planes > 1:
            shape[0] = self.planes
        valid = arrays_for([x]).asarray((rows >= 0).reshape(shape), "bool")
        return xp.where(valid, found, xp.full_like(found[:1], value))  # type: ignore[no-any-return]

    def unshard(self, parts: Sequence[Array], dim: int = 1) -> Array:
        """Join the rows of all ranks, in the order of the ranks, and drop padding.

        Args:
            parts: The rows of each rank, as `shard` gave them.
            dim: Dimension of the rows.

        Raises:
            ShapeError: The number of parts or rows does not fit.
            DtypeError: A part is no array.

        Example:
            >>> layout = Layout.contiguous(3, ranks=2)
            >>> layout.unshard([layout.shard(np.array([5, 6, 7]), rank, dim=0) for rank in range(2)], dim=0)
            array([5, 6, 7])
        """
        parts = list(parts)
        what, remedy = "Layout.unshard: parts", "Gather the parts of all ranks, in their order"
        expect(len(parts) == self.ranks, what, f"{self.ranks} parts", len(parts), remedy, error=ShapeError)
        for part in parts:
            xp = self.check_rows(what, part, dim, self.rows_per_rank)
        joined = xp.cat(parts, dim) if hasattr(xp, "cat") else xp.concatenate(parts, axis=dim)
        return take(joined, self.places, dim)

    def gather(self, x: Any, mesh: Any, dim: int = 1) -> Any:
        """Gather the rows of all ranks on every rank, differentiably.

        The backward pass sums the ranks' gradients, and each rank takes its rows of the sum. As for
        parameters, this assumes that the loss is the sum of the ranks' losses.

        Args:
            x: Tensor with this rank's n rows along `dim`.
            mesh: The DeviceMesh of the plans.
            dim: Dimension of the rows.

        Returns:
            Tensor with S rows along `dim`, without padding.

        Raises:
            OptionError: The mesh has another number of ranks.
            ShapeError: `x` has another number of rows.
            PlanMismatchError: The calls differ between ranks.
            CommunicationError: A rank did not answer.
        """
        return step("rows", "torch")(x, self, mesh, dim)

    @cached_property
    def places(self) -> Ints:
        """Place of each row among the concatenated rows of all ranks, int64 (L, S)."""
        flat = self.rows.transpose(1, 0, 2).reshape(self.planes, -1)
        place = np.empty((self.planes, self.q_len), np.int64)
        plane, at = np.nonzero(flat >= 0)
        place[plane, flat[plane, at]] = at
        return read_only(place)

    def plan(self, mask: Mask | Spans | None = None, *, heads: tuple[int, int], **options: Any) -> Plan:
        """Plan the communication of one kind of layers. Make one plan for each kind of layers in a model.

        Args:
            mask: Mask of these layers for the whole problem. None for the layout's own mask.
            heads: Query heads and key heads of a rank's q and k, (Hq, Hkv). Hkv must divide Hq.
            **options: ``strategy``, ``batch``, ``keys`` and the other options of
                `attnspan.parallel.plan.make_plan`.

        Raises:
            OptionError: An option is illegal, or a pickled layout has no mask and you pass none.
            ShapeError: Sizes of the mask, the layouts or the batch do not fit.
            DtypeError: An argument has another type.

        Example:
            >>> from attnspan import causal, window
            >>> layout = Layout.of(causal(), q_len=64, ranks=2)
            >>> layout.plan(causal() & window(8), heads=(4, 2), strategy="exchange")
            Plan(exchange on 2 ranks, q_len=64, k_len=64, heads=(4, 2))
        """
        from .plan import make_plan

        # Only plans of the layout's own mask, or of masks without data, are cached: arrays may change.
        same = "own" if mask is None else mask.static_key() if isinstance(mask, Mask) else None
        key = None if same is None else (same, heads, *options.items())

        def make() -> Plan:
            source, remedy = self._source, "Pass the layers' mask, because a pickled layout has none"
            expect(mask is not None or source is not None, "Layout.plan: mask", "a mask", "None", remedy)
            return make_plan(self, source.mask if mask is None else mask, heads=heads, **options)  # type: ignore[union-attr]

        found = None
        with contextlib.suppress(TypeError):  # An option that cannot be hashed is illegal, and make() raises.
            found = None if key is None else self._plans.without_arrays(key, make)
        return make() if found is None else found

    def plan_roll(self, shifts: int | tuple[int, ...], *, within: Any = None) -> Plan:
        """Plan a `roll` of the rows of the whole sequence, for example by -1 to the next token.

        Args:
            shifts: Row i gets row ``i - shifts``, modulo S. A tuple plans several rolls with one collective.
            within: Ids of the documents of the *whole* sequence, integers (S,) or (B, S). A row then gets
                only rows with its own id, and nothing wraps around. Negative ids are padding. Rows without a
                source get the `fill` of `roll`.

        Returns:
            A plan. Put it on the mesh like the plans of layers: ``.on(mesh, rows=rows)``.

        Raises:
            DtypeError: A shift is no int, or `within` are no integers.
            OptionError: There is no shift.
            ShapeError: `within` has another number of rows or batch elements.

        Example:
            >>> plan = Layout.contiguous(8, ranks=2).plan_roll(-1)
            >>> plan.shifts, plan.traffic().counts.tolist()  # row 4 goes to rank 0, and row 0 to rank 1
            ((-1,), [[[0, 1], [1, 0]]])
        """
        from .shifts import maker

        key, make = maker(self, shifts, within)
        found = self._plans.without_arrays(key, make)
        return make() if found is None else found

    @cached_property
    def _plans(self) -> Memory:
        return Memory()

    def source_of(self, mask: Any) -> Source | None:
        """Return the source of this layout if `mask` is its lowered mask, else None."""
        return self._source if self._source is not None and mask is self._source.mask else None

    def checked_rank(self, rank: int) -> int:
        """Return the rank as an int.

        Raises:
            OptionError: There is no such rank.
        """
        rank, remedy = number("Layout: rank", rank), "Pass the rank within the context-parallel mesh"
        expect(0 <= rank < self.ranks, "Layout: rank", f"0 to {self.ranks - 1}", rank, remedy)
        return rank

    def check_rows(self, what: str, x: Any, dim: int, rows: int, whose: str = "") -> Any:
        """Check an array with rows along a dimension. Return its framework's functions."""
        remedy = "Leave it out of the batch"
        expect(is_array(x), what, "an array or a tensor", type(x).__name__, remedy, error=DtypeError)
        fits = -x.ndim <= dim < x.ndim and x.shape[dim] == rows
        remedy = "Pass the dimension of the rows as `dim`, or leave out tensors without rows"
        got, wanted = tuple(x.shape), f"{whose}{rows} rows along dimension {dim}"
        expect(fits, what, wanted, got, remedy, error=ShapeError)
        alone = self.planes == 1 or (dim % x.ndim > 0 and x.shape[0] == self.planes)
        remedy = "This layout partitions each batch element differently: pass all of them, as dimension 0"
        expect(alone, what, f"{self.planes} batch elements as dimension 0", got, remedy, error=ShapeError)
        return arrays_for([x]).xp
