"""Masks of generation: blocks of diffusion, drafts, trees of candidates."""

from __future__ import annotations

import numpy as np

from .. import _arguments as checked
from .._expression import Mask
from ..arrays import Array, arrays_for
from ..errors import OptionError, shown
from ._patterns import BlockCausal, BlockDiffusion, DraftBlocks, Tree

__all__ = ["block_causal", "block_diffusion", "draft_blocks", "tree"]


def block_causal(block: int) -> Mask:
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
    return BlockCausal(checked.count("block_causal: block", block, 1))


def block_diffusion(length: int, block: int) -> Mask:
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
    length = checked.count("block_diffusion: length", length, 1)
    return BlockDiffusion(length, checked.count("block_diffusion: block", block, 1))


def draft_blocks(prefix: int | Array, block: int) -> Mask:
    """A causal prefix, then blocks that each see all of it and, causally, themselves, but no other block. R =
    2.

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
    return DraftBlocks(
        checked.lengths_of("draft_blocks: prefix", prefix, (0, 1)),
        checked.count("draft_blocks: block", block, 1),
    )


def tree(parents: Array, prefix: int | Array = 0, depth: int | None = None) -> Mask:
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
    parents = checked.integers("tree: parents", parents, (1, 2))
    prefix = checked.lengths_of("tree: prefix", prefix, (0, 1))
    if parents.shape[-1] == 0:
        raise OptionError(
            "tree: parents", expected="at least one node", got="none", remedy="Leave the tree out"
        )
    depth = None if depth is None else checked.count("tree: depth", depth, 1)
    arrays = arrays_for([parents])
    if arrays.concrete(parents):
        deepest = _depth(arrays.to_numpy(parents))
        if depth is not None and depth < deepest:
            raise OptionError(
                "tree: depth", expected=f"at least {deepest}", got=shown(depth), remedy="Raise it"
            )
        depth = deepest if depth is None else depth
    if depth is None:
        raise OptionError(
            "tree: depth",
            expected="the number of nodes on the longest path, where parents cannot be read",
            got="None",
            remedy="Pass depth, which decides R",
        )
    return Tree(parents, prefix, depth)


def _depth(parents: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
    """Nodes on the longest path of (n,) or (B, n); raises where a node's parent is not before it."""
    table = parents.reshape(-1, parents.shape[-1]).astype(np.int64)
    bad = np.argwhere((table >= np.arange(table.shape[1])) | (table < -1))
    if len(bad):
        b, node = (int(x) for x in bad[0])
        where = f"{table[b, node]} for node {node}" + (f" of batch row {b}" if parents.ndim == 2 else "")
        raise OptionError(
            "tree: parents",
            expected="a parent before each node, or -1 for a root",
            got=where,
            remedy="Number the nodes so that parents come first",
        )
    depth = np.ones_like(table)
    for node in range(1, table.shape[1]):
        above = table[:, node]
        depth[:, node] = np.where(above >= 0, np.take_along_axis(depth, above[:, None], 1)[:, 0] + 1, 1)
    return int(depth.max())
