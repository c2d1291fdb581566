"""Masks of generation: blocks of diffusion, drafts, trees of candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks
from .._intervals import Interval, Rows, either_illegal
from ..arrays import INT32_MAX, Array, arrays_for
from ..errors import expect
from ..lowering import Lowering
from ..masks import Mask
from ._shared import seen_by

__all__ = ["block_causal", "block_diffusion", "draft_blocks", "tree"]


@dataclass(frozen=True, eq=False, repr=False)
class block_causal(Mask):
    """Query i sees its own block and those before it: j // block <= i // block. R = 1.

    Source: the sampling mask of block diffusion (Arriola et al. 2025), and of frames of video.

    Args:
        block: tokens of a block, at least 1.

    Raises:
        OptionError, DtypeError: for a number out of range.

    Example:
        >>> block_causal(2).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """

    block: int

    def __post_init__(self) -> None:
        self._set(block=checks.count("block_causal: block", self.block, 1))

    def _lower(self, low: Lowering) -> Rows:
        # The end of the own block may leave int32 where the index itself nearly does.
        own = low.arrays.minimum(low.q_index, INT32_MAX - self.block) // self.block
        return Rows((Interval(None, (own + 1) * self.block, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class block_diffusion(Mask):
    """Training by block diffusion, on the noisy sequence followed by the clean one, 2 * length tokens. R = 2.

    Noisy tokens see their own noisy block, both ways, and the clean blocks before it; clean tokens see their
    own clean block and those before it, and no noisy token.

    Source: attention-gym's `block_diffusion`; BD3-LM (Arriola et al. 2025, arXiv 2503.09573), section 3.1.

    Args:
        length: tokens of the clean sequence; there are 2 * length keys.
        block: tokens of a block, at least 1; the last block may be smaller.

    Raises:
        OptionError, DtypeError, ShapeError: for numbers out of range, or another number of keys.

    Example:
        >>> block_diffusion(2, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    length: int
    block: int

    def __post_init__(self) -> None:
        self._set(length=checks.count("block_diffusion: length", self.length, 1))
        self._set(block=checks.count("block_diffusion: block", self.block, 1))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
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
class draft_blocks(Mask):
    """A causal prefix, then blocks that each see it and, causally, themselves, but no other block. R = 2.

    Source: attention-gym's `generate_jetspec_training_mask_mod` (JetSpec), whose rows are the blocks alone:
    those are the default rows here with q_len = k_len - prefix.

    Args:
        prefix: int or integer (B,), number of keys before the first block.
        block: tokens of a block, its anchor included, at least 1.

    Raises:
        OptionError, DtypeError, ShapeError: for numbers out of range.

    Example:
        >>> draft_blocks(1, 2).spans(4, 5).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    """

    prefix: int | Array
    block: int

    def __post_init__(self) -> None:
        prefix = checks.lengths("draft_blocks: prefix", self.prefix)
        self._set(prefix=prefix, block=checks.count("draft_blocks: block", self.block, 1))

    def _lower(self, low: Lowering) -> Rows:
        arrays, index = low.arrays, low.q_index
        prefix, illegal = low.lengths("draft_blocks: prefix", self.prefix, below=None)
        drafted = index >= prefix
        start = (index - prefix) // self.block * self.block + prefix
        mine = seen_by(low, drafted, start, index + 1)
        return Rows((Interval(None, arrays.where(drafted, prefix, index + 1)), mine), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class tree(Mask):
    """A tree of candidate tokens after a prefix: each node sees the prefix, its ancestors and itself.

    The nodes' keys follow the prefix, in the order of `parents`; keys after them are room to spare in a
    cache. The default rows are the last of the nodes: all of them with q_len = n. Rows of the prefix are
    causal. R = 1 + depth, whatever the tree; `prepare` joins what touches, and a chain has R = 1 then.

    Source: attention-gym's `generate_jetspec_tree_causal_mask_mod`; tree attention of SpecInfer (Miao et al.
    2023) and Medusa (Cai et al. 2024).

    Args:
        parents: integer (n,) or (B, n), the number of each node's parent, below the node's own; -1: a root.
        prefix: int or integer (B,), number of keys before the tree, those already in the cache.
        depth: nodes on the longest path from a root; static. None: read from `parents`, which then need
            values.

    Raises:
        OptionError, DtypeError, ShapeError: for parents that are no tree, a depth below theirs, more nodes
            than there are keys for. Data that cannot be read (on a device, in a compiled function) make their
            rows illegal instead.

    Example:
        >>> tree([-1, 0, 0, 2], prefix=1).spans(4, 5).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    """

    parents: Array
    prefix: int | Array = 0
    depth: int | None = None

    def __post_init__(self) -> None:
        parents = checks.integers("tree: parents", self.parents, (1, 2))
        prefix = checks.lengths("tree: prefix", self.prefix)
        expect(parents.shape[-1] > 0, "tree: parents", "at least one node", "none", "Leave the tree out")
        depth = None if self.depth is None else checks.count("tree: depth", self.depth, 1)
        arrays = arrays_for([parents])
        if arrays.concrete(parents):
            deepest = _depth(arrays.to_numpy(parents))
            depth = deepest if depth is None else depth
            expect(depth >= deepest, "tree: depth", "at least {}", depth, "Raise it", deepest)
        expected = "the number of nodes on the longest path, where parents cannot be read"
        expect(depth is not None, "tree: depth", expected, "None", "Pass depth, which decides R")
        self._set(parents=parents, prefix=prefix, depth=depth)

    def _anchor(self) -> tuple[Any, ...]:
        return ("tree", self.parents, self.prefix)

    def _anchor_index(self, low: Lowering) -> Array:
        prefix, _ = low.lengths("tree: prefix", self.prefix, below=None)
        return low.arrays.arange(low.q_len)[None, None] + (prefix + self.parents.shape[-1] - low.q_len)

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        parents = low.per_batch("tree: parents", self.parents, "int32")
        n = parents.shape[-1]
        prefix, illegal = low.lengths("tree: prefix", self.prefix, below=None)
        if low.k_len is not None and not low.arrays.tracing() and low.arrays.concrete(prefix):
            longest = prefix if isinstance(prefix, int) else int(prefix.max())
            got = f"a prefix of {longest} and {n} nodes"
            remedy = "The nodes' keys follow the prefix: make the cache longer, or the tree smaller"
            expect(
                longest + n <= low.k_len,
                "tree",
                "at most {} keys, as many as there are",
                got,
                remedy,
                low.k_len,
            )
        node = low.q_index - prefix
        inside = (node >= 0) & (node < n)
        # -1 is above the roots, and stays there.
        at, broken, path = arrays.where(inside, node, -1)[:, 0], None, []
        for _ in range(self.depth or 1):
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


def _depth(parents: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
    """Nodes on the longest path of (n,) or (B, n); raises where a node's parent is not before it."""
    table = parents.reshape(-1, parents.shape[-1]).astype(np.int64)
    bad = np.argwhere((table >= np.arange(table.shape[1])) | (table < -1))
    if len(bad):
        b, node = (int(x) for x in bad[0])
        where = f"{table[b, node]} for node {node}" + (f" of batch row {b}" if parents.ndim == 2 else "")
        remedy = "Number the nodes so that parents come first"
        expect(False, "tree: parents", "a parent before each node, or -1 for a root", where, remedy)
    depth = np.ones_like(table)
    for node in range(1, table.shape[1]):
        above = table[:, node]
        depth[:, node] = np.where(above >= 0, np.take_along_axis(depth, above[:, None], 1)[:, 0] + 1, 1)
    return int(depth.max())
