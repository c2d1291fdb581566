"""Masks of generation: blocks of diffusion, drafts, trees of candidates."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, arrays_for
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.intervals import Interval, Rows, either_illegal
from attnspan.masks.lowering import Lowering

__all__ = ["block_causal", "block_diffusion", "draft_blocks", "tree"]


class block_causal(Mask):
    """Query i sees its own block and those before it: j // block <= i // block. R = 1.

    Source: the sampling mask of block diffusion (Arriola et al. 2025), and of frames of video.

    Args:
        block: tokens of a block, at least 1.

    Example:
        >>> block_causal(2).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """

    block: int

    def __post_init__(self) -> None:
        self._check(block=checks.positive)

    def _lower(self, low: Lowering) -> Rows:
        return Rows((Interval(None, low.shifted(self.block) // self.block * self.block, anchored=True),))


class block_diffusion(Mask):
    """Training by block diffusion, on the noisy sequence followed by the clean one, 2 * length tokens. R = 2.

    Noisy tokens see their own noisy block, both ways, and the clean blocks before it; clean tokens see their
    own clean block and those before it, and no noisy token.

    Source: attention-gym's `block_diffusion`; BD3-LM (Arriola et al. 2025, arXiv 2503.09573), section 3.1.

    Args:
        length: tokens of the clean sequence; there are 2 * length keys.
        block: tokens of a block, at least 1; the last block may be smaller.

    Example:
        >>> block_diffusion(2, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    length: int
    block: int

    def __post_init__(self) -> None:
        self._check(length=checks.positive, block=checks.positive)

    def _key_len(self) -> Any:
        return 2 * self.length

    def _lower(self, low: Lowering) -> Rows:
        arrays, index, n = low.arrays, low.q_index, self.length
        noisy = (index >= 0) & (index < n)
        clean = (index >= n) & (index < 2 * n)
        start = index % n // self.block * self.block
        stop = arrays.minimum(start + self.block, n)
        before = arrays.where(noisy, start, arrays.where(clean, stop, 0))
        return Rows((low.seen_by(noisy, start, stop), low.seen_by(noisy | clean, n, n + before)))


class draft_blocks(Mask):
    """A causal prefix, then blocks that each see it and, causally, themselves, but no other block. R = 2.

    Source: attention-gym's `generate_jetspec_training_mask_mod` (JetSpec), whose rows are the blocks alone:
    those are the default rows here with q_len = k_len - prefix.

    Args:
        prefix: int or integer (B,), number of keys before the first block.
        block: tokens of a block, its anchor included, at least 1.

    Example:
        >>> draft_blocks(1, 2).spans(4, 5).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    """

    prefix: int | Array
    block: int

    def __post_init__(self) -> None:
        self._check(prefix=checks.lengths, block=checks.positive)

    def _lower(self, low: Lowering) -> Rows:
        arrays, index = low.arrays, low.q_index
        prefix, illegal = low.lengths("draft_blocks: prefix", self.prefix, below=None)
        drafted = index >= prefix
        start = (index - prefix) // self.block * self.block + prefix
        mine = low.seen_by(drafted, start, index + 1)
        return Rows((Interval(None, arrays.where(drafted, prefix, index + 1)), mine), illegal)


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

    Example:
        >>> tree([-1, 0, 0, 2], prefix=1).spans(4, 5).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    """

    parents: Array
    prefix: int | Array = 0
    depth: int | None = None

    def __post_init__(self) -> None:
        self._check(parents=checks.integers, prefix=checks.lengths, depth=checks.optional(checks.positive))
        what, n = "tree: parents", self.parents.shape[-1]
        expect(n > 0, what, "at least one node", "none", "Leave the tree out", error=ShapeError)
        arrays, depth = arrays_for([self.parents]), self.depth
        if arrays.concrete(self.parents):
            deepest = _depth(arrays.to_numpy(self.parents))
            depth = deepest if depth is None else depth
            expect(depth >= deepest, "tree: depth", "at least {}", depth, "Raise it", deepest)
        expected = "the number of nodes on the longest path, where parents cannot be read"
        expect(depth is not None, "tree: depth", expected, "None", "Pass depth, which decides R")
        self._set(depth=depth)

    def _anchor(self) -> tuple[Any, ...]:
        return ("tree", self.parents, self.prefix)

    def _anchor_index(self, low: Lowering) -> Array:
        prefix, _ = low.lengths("tree: prefix", self.prefix, below=None)
        return low.arrays.arange(low.q_len)[None, None] + (prefix + self.parents.shape[-1] - low.q_len)

    def _lower(self, low: Lowering) -> Rows:
        arrays, n = low.arrays, self.parents.shape[-1]
        parents = low.per_batch("tree: parents", self.parents)
        room = None if low.k_len is None else low.k_len - n
        remedy = "The nodes' keys follow the prefix: make the cache longer, or the tree smaller"
        prefix, illegal = low.lengths("tree: prefix", self.prefix, below=room, remedy=remedy)
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
        before = Interval(None, arrays.where(inside, prefix, arrays.where(own <= prefix, own, 0)))
        keys = [place[:, None] for place in reversed(path)]
        seen = [low.seen_by(key >= 0, key + prefix, key + prefix + 1) for key in keys]
        return Rows((before, *seen), either_illegal(illegal, broken[:, None]))  # type: ignore[index]


def _depth(parents: np.ndarray[Any, Any]) -> int:
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
