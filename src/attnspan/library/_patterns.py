"""Masks of one sequence, in closed form: each is lowered in O(q_len * R)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._intervals import Interval, Rows, either_illegal
from .._lowering import Lowering
from .._runs import find_runs
from ..arrays import INT32_MAX, Array
from ..errors import OptionError
from ._leaf import Leaf, RowNumbered, seen_by, sorted_rows, warn_of_size


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Leaf):
    window: int
    dilation: int
    causal: bool = False

    called = "dilated"

    def _lower(self, low: Lowering) -> Rows:
        reach = self.window // self.dilation
        steps = [self.dilation * t for t in range(-reach, 1 if self.causal else reach + 1)]
        warn_of_size(low, len(steps))
        # No key lies where the index must be held back for its neighbours to be int32.
        far = INT32_MAX - self.window - 1
        index = low.arrays.clip(low.q_index, -far, far)
        return Rows(tuple(Interval(index + step, index + step + 1) for step in steps))


@dataclass(frozen=True, eq=False, repr=False)
class GlobalRows(Leaf):
    """The first n rows see everything."""

    n: int

    called = "global_rows"

    def _lower(self, low: Lowering) -> Rows:
        arrays, index = low.arrays, low.q_index
        mine = (index >= 0) & (index < self.n)
        # A row that sees nothing is an empty span at its own index: still anchored.
        lo, hi = arrays.where(mine, 0, index), arrays.where(mine, INT32_MAX, index)
        return Rows((Interval(lo, hi, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Leaf):
    """The marked tokens see everything and are seen by all rows."""

    marked: Array
    rows: bool = True
    max_runs: int = 1

    called = "global_tokens"

    def _key_len(self) -> Any:
        return self.marked.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        marked = low.per_batch("global_sliding: tokens", self.marked, "int64")
        if marked.shape[-1] == 0:
            return Rows((Interval(0, 0),))
        one = arrays.full((marked.shape[0], 1), 1, "int64")
        pairs, broken = find_runs(arrays, one, marked, self.max_runs)
        intervals = [Interval(lo[:, None], hi[:, None]) for lo, hi in pairs]
        illegal = broken[:, None]
        if self.rows:
            own, nowhere, beyond = low.take(marked)
            whole = own == 1 if nowhere is None else (own == 1) & ~nowhere
            whole = whole[:, None]
            first = intervals[0]
            intervals = [
                Interval(
                    arrays.where(whole, 0, x.lo),
                    arrays.where(whole, INT32_MAX if x is first else 0, x.hi),
                )
                for x in intervals
            ]
            illegal = either_illegal(illegal, None if beyond is None else beyond[:, None])
        return Rows(tuple(intervals), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class PrefixOf(Leaf):
    """The keys of another document, which each document names; itself: none."""

    cu_seqlens: Array
    prefix_of: Array

    called = "prefix_of"

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        own = low.documents("shared_prefix: cu_seqlens", self.cu_seqlens)
        low.check_int32("shared_prefix: prefix_of", self.prefix_of)
        table = low.per_batch("shared_prefix: prefix_of", self.prefix_of, "int32")
        cu = low.per_batch("shared_prefix: cu_seqlens", self.cu_seqlens, "int32")
        n = cu.shape[-1] - 1
        illegal = low.broken(
            "shared_prefix: prefix_of",
            arrays.any((table < 0) | (table >= n))[:, None, None],
            self.prefix_of,
            expected=lambda: f"numbers of documents, 0 to {n - 1}",
            remedy="Give a document without a prefix its own number",
        )
        named = arrays.clip(arrays.take_along(table, own.number), 0, n - 1)
        rows = own.inside & (named != own.number)
        lo, hi = arrays.take_along(cu, named)[:, None], arrays.take_along(cu, named + 1)[:, None]
        return Rows((seen_by(low, rows[:, None], lo, hi),), either_illegal(own.illegal, illegal))


@dataclass(frozen=True, eq=False, repr=False)
class BlockCausal(Leaf):
    block: int

    called = "block_causal"

    def _lower(self, low: Lowering) -> Rows:
        # The end of the own block may leave int32 where the index itself nearly does.
        own = low.arrays.minimum(low.q_index, INT32_MAX - self.block) // self.block
        return Rows((Interval(None, (own + 1) * self.block, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class BlockDiffusion(Leaf):
    length: int
    block: int

    called = "block_diffusion"

    def _key_len(self) -> Any:
        return 2 * self.length

    def _lower(self, low: Lowering) -> Rows:
        arrays, index, n = low.arrays, low.q_index, self.length
        noisy = (index >= 0) & (index < n)
        clean = (index >= n) & (index < 2 * n)
        start = index % n // self.block * self.block
        stop = arrays.minimum(start + self.block, n)
        before = arrays.where(noisy, start, arrays.where(clean, stop, 0))
        return Rows((seen_by(low, noisy, start, stop), seen_by(low, noisy | clean, n, n + before)))


@dataclass(frozen=True, eq=False, repr=False)
class DraftBlocks(Leaf):
    prefix: int | Array
    block: int

    called = "draft_blocks"

    def _lower(self, low: Lowering) -> Rows:
        arrays, index = low.arrays, low.q_index
        prefix, illegal = lengths(low, "draft_blocks: prefix", self.prefix)
        drafted = index >= prefix
        start = (index - prefix) // self.block * self.block + prefix
        mine = seen_by(low, drafted, start, index + 1)
        return Rows((Interval(None, arrays.where(drafted, prefix, index + 1)), mine), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class Tree(Leaf):
    parents: Array
    prefix: int | Array = 0
    depth: int = 1

    called = "tree"

    def _anchor(self) -> tuple[Any, ...]:
        return ("tree", self.parents, self.prefix)

    def _anchor_index(self, low: Lowering) -> Array:
        prefix, _ = lengths(low, "tree: prefix", self.prefix)
        return low.arrays.arange(low.q_len)[None, None] + (prefix + self.parents.shape[-1] - low.q_len)

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        parents = low.per_batch("tree: parents", self.parents, "int32")
        n = parents.shape[-1]
        prefix, illegal = lengths(low, "tree: prefix", self.prefix)
        self._check_room(low, prefix, n)
        node = low.q_index - prefix
        inside = (node >= 0) & (node < n)
        # -1 is above the roots, and stays there.
        at, broken, path = arrays.where(inside, node, -1)[:, 0], None, []
        for _ in range(self.depth):
            path.append(at)
            above = arrays.where(at < 0, -1, arrays.take_along(parents, arrays.clip(at, 0, n - 1)))
            broken = either_illegal(broken, (above >= at) & (at >= 0) | (above < -1))
            at = arrays.where(above < at, above, -1)
        broken = either_illegal(broken, at >= 0)
        own = low.q_index + 1
        before = arrays.where(inside, prefix, arrays.where((own <= prefix), own, 0))
        intervals = [Interval(None, before)]
        for place in reversed(path):
            key = place[:, None]
            intervals.append(seen_by(low, key >= 0, key + prefix, key + prefix + 1))
        return Rows(tuple(intervals), either_illegal(illegal, broken[:, None]))  # type: ignore[index]

    def _check_room(self, low: Lowering, prefix: Any, n: int) -> None:
        if low.k_len is None or low.arrays.tracing() or not low.arrays.concrete(prefix):
            return
        most = prefix if isinstance(prefix, int) else int(prefix.max())
        if most + n > low.k_len:
            raise OptionError(
                "tree",
                expected=f"at most {low.k_len} keys, as many as there are",
                got=f"a prefix of {most} and {n} nodes",
                remedy="The nodes' keys follow the prefix: make the cache longer, or the tree smaller",
            )


def lengths(low: Lowering, what: str, value: Any) -> tuple[Any, Array | None]:
    """An int as it is, or (B,) as (B, 1, 1), and the rows whose length is none."""
    from .._leaves import _lengths

    return _lengths(low, what, value, below=None)


@dataclass(frozen=True, eq=False, repr=False)
class Flamingo(RowNumbered):
    positions: Array
    image_length: int
    earlier: bool = False

    called = "flamingo"

    def _key_len(self) -> Any:
        return self.positions.shape[-1] * self.image_length

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        low.check_int32("flamingo: positions", self.positions)
        at = low.per_batch("flamingo: positions", self.positions, "int32")
        bad = low.unordered(at, repeats=False)
        illegal = low.broken(
            "flamingo: positions",
            bad[:, None, None],
            self.positions,
            expected=lambda: "strictly ascending places of the images in the text",
            remedy="Sort the images by their place",
        )
        seen = arrays.searchsorted(at, low.q_index[:, 0], right=True)
        last = arrays.cast(seen, "int32")[:, None] * self.image_length
        lo = 0 if self.earlier else arrays.maximum(last - self.image_length, 0)
        return Rows((Interval(lo, last),), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class VisionIntervals(RowNumbered):
    intervals: Array
    image_length: int

    called = "vision_cross_attention"

    def _key_len(self) -> Any:
        return self.intervals.shape[-2] * self.image_length

    def _lower(self, low: Lowering) -> Rows:
        low.check_int32("vision_cross_attention: intervals", self.intervals)
        ends = low.arrays.to_int32(self.intervals)
        ends = ends[None] if ends.ndim == 2 else ends
        low.check_axis("vision_cross_attention: intervals", "batch", ends.shape[0], low.batch)
        found = []
        for image in range(ends.shape[1]):
            start, stop = ends[:, image, 0, None, None], ends[:, image, 1, None, None]
            rows = (low.q_index >= start) & (low.q_index < stop)
            found.append(seen_by(low, rows, image * self.image_length, (image + 1) * self.image_length))
        return sorted_rows(low, found)


@dataclass(frozen=True, eq=False, repr=False)
class Stripes(Leaf):
    """The tokens at about the same place of every frame, and those of the prompt before them."""

    prompt: int
    frames: int
    frame: int
    reach: int

    called = "temporal_heads"

    def _key_len(self) -> Any:
        return self.prompt + self.frames * self.frame

    def _lower(self, low: Lowering) -> Rows:
        arrays, index, end = low.arrays, low.q_index, self.prompt + self.frames * self.frame
        prompted = (index >= 0) & (index < self.prompt)
        inside = (index >= self.prompt) & (index < end)
        first = arrays.where(prompted, end, arrays.where(inside, self.prompt, 0))
        place = (index - self.prompt) % self.frame
        lo = arrays.clip(place - (self.reach - 1), 0, self.frame)
        hi = arrays.clip(place + self.reach, 0, self.frame)
        starts = [self.prompt + number * self.frame for number in range(self.frames)]
        warn_of_size(low, self.frames + 1)
        stripes = [seen_by(low, inside, start + lo, start + hi) for start in starts]
        return Rows((Interval(None, first), *stripes))


@dataclass(frozen=True, eq=False, repr=False)
class SelectedBlocks(Leaf):
    chosen: Array
    block: int
    sizes: Array | None = None

    called = "selected_blocks"

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        low.check_int32("selected_blocks: chosen", self.chosen)
        chosen = arrays.to_int32(self.chosen)
        low.check_axis("selected_blocks: chosen", "batch", chosen.shape[0], low.batch)
        low.check_axis("selected_blocks: chosen", "heads", chosen.shape[1], low.heads)
        blocks = -(-low.top // self.block) if self.sizes is None else self.sizes.shape[-1]
        illegal = low.broken(
            "selected_blocks: chosen",
            arrays.any(arrays.any(chosen >= blocks))[..., None],
            self.chosen,
            expected=lambda: f"numbers of blocks of keys, below {blocks}, or negative for none",
            remedy="Choose among the blocks that there are",
        )
        # Sorted, and without repeats, while there are few: one row for each block of rows.
        ranked = arrays.sort(chosen)
        n, tile = chosen.shape[2], low.q_index // self.block
        inside = (tile >= 0) & (tile < n)
        found = []
        for rank in range(chosen.shape[3]):
            own = ranked[..., rank]
            own = own if rank == 0 else arrays.where(own == ranked[..., rank - 1], -1, own)
            at = arrays.take_along(own, arrays.clip(tile, 0, n - 1))
            seen = inside & (at >= 0) & (at < blocks)
            start = at * self.block
            found.append(seen_by(low, seen, start, start + self._size(low, at)))
        return Rows(tuple(found), illegal)

    def _size(self, low: Lowering, at: Array) -> Any:
        if self.sizes is None:
            return self.block
        arrays = low.arrays
        table = arrays.clip(arrays.to_int32(self.sizes), 0, self.block)
        return arrays.take_along(table[None, None], arrays.clip(at, 0, table.shape[0] - 1))
