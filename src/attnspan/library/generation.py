"""Masks for generation: block diffusion, drafts, trees of candidates."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, arrays_for
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.intervals import Interval, Rows, either_illegal
from attnspan.masks.lowering import Lowering


class block_causal(Mask):
    """Query i sees its own block and all blocks before it: j // block <= i // block. R = 1.

    Source: the sampling mask of block diffusion (Arriola et al. 2025). It also serves frames of video.

    Args:
        block: Tokens of a block, at least 1.

    Raises:
        DtypeError: If `block` is not an int.
        OptionError: If `block` is below 1.

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
    """The training mask of block diffusion: a noisy sequence, followed by the clean sequence. R = 2.

    Noisy tokens see their own noisy block, in both directions, and the clean blocks before it. Clean tokens
    see their own clean block and the clean blocks before it. They see no noisy token.

    Source: attention-gym's `block_diffusion`. BD3-LM (Arriola et al. 2025, arXiv 2503.09573), section 3.1.

    Args:
        length: Tokens of the clean sequence. There are 2 * length keys.
        block: Tokens of a block, at least 1. The last block may be smaller.

    Raises:
        DtypeError: If an argument is not an int.
        OptionError: If an argument is below 1.
        ShapeError: If there are not 2 * length keys. Lowering checks this.

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
    """A causal prefix, followed by blocks that see the prefix and themselves, causally. R = 2.

    A block sees no other block.

    Source: attention-gym's `generate_jetspec_training_mask_mod` (JetSpec), whose queries are only the blocks.
    With q_len = k_len - prefix, these are the default queries here.

    Args:
        prefix: int or integer (B,), the number of keys before the first block.
        block: Tokens of a block, including its anchor, at least 1.

    Raises:
        DtypeError: If an argument is not of integers.
        ShapeError: If the number of prefixes does not fit the batch. Lowering checks this.
        OptionError: If `block` is below 1 or a prefix is negative.

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

    The keys of the nodes follow the prefix, in the order of `parents`. Keys after the nodes are unused space
    of a cache. The default queries are the last nodes, or all nodes with q_len = n. Queries of the prefix are
    causal. R = 1 + depth for any tree. `prepare` joins spans that touch, so a chain then has R = 1.

    Source: attention-gym's `generate_jetspec_tree_causal_mask_mod`. Tree attention of SpecInfer (Miao et al.
    2023) and Medusa (Cai et al. 2024).

    Args:
        parents: integer (n,) or (B, n), the number of each node's parent, which is less than the node's own
            number. -1 means a root.
        prefix: int or integer (B,), the number of keys before the tree, which are already in the cache.
        depth: Nodes on the longest path from a root. It is static. None reads it from `parents`, whose
            values must be readable.

    Raises:
        DtypeError: If an array is not of integers.
        ShapeError: If there is no node, or if an array does not fit the batch.
        OptionError: If a parent does not precede its node, if `depth` is too small or missing, or if prefix
            and nodes exceed the keys.

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
            expect(depth >= deepest, "tree: depth", "at least {}", depth, "Raise the depth", deepest)
        expected = "the number of nodes on the longest path, because parents cannot be read"
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
        remedy = "The keys of the nodes follow the prefix: make the cache longer, or the tree smaller"
        prefix, illegal = low.lengths("tree: prefix", self.prefix, below=room, remedy=remedy)
        node = low.q_index - prefix
        inside = (node >= 0) & (node < n)
        # -1 is the parent of a root, and its parent is -1 again.
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
    """Number of nodes on the longest path of (n,) or (B, n). Raises if a parent does not precede its node."""
    table = parents.reshape(-1, parents.shape[-1]).astype(np.int64)
    bad = np.argwhere((table >= np.arange(table.shape[1])) | (table < -1))
    if len(bad):
        b, node = (int(x) for x in bad[0])
        where = f"{table[b, node]} for node {node}" + (f" of batch element {b}" if parents.ndim == 2 else "")
        remedy = "Number the nodes so that parents come first"
        expect(False, "tree: parents", "a parent before each node, or -1 for a root", where, remedy)
    depth = np.ones_like(table)
    for node in range(1, table.shape[1]):
        above = table[:, node]
        depth[:, node] = np.where(above >= 0, np.take_along_axis(depth, above[:, None], 1)[:, 0] + 1, 1)
    return int(depth.max())
