"""The blocks of a FlexAttention `BlockMask`, as a part of its predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arrays import Array, arrays_for


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The predicate of a `BlockMask`: full blocks are seen, `mask_mod` decides in the other listed ones."""

    mask_mod: Callable[[Any, Any, Any, Any], Any]
    full: Array  # bool (B|1, H|1, q blocks, k blocks)
    listed: Array  # of that shape, the full blocks too
    q_block: int  # rows and keys of a block
    k_block: int

    @classmethod
    def of(cls, block_mask: Any, mask_mod: Callable[[Any, Any, Any, Any], Any]) -> BlockLists:
        """Read the lists of a `BlockMask`, whose order is free and whose tail is undefined."""
        q_block, k_block = block_mask.BLOCK_SIZE
        blocks = -(-block_mask.seq_lengths[1] // k_block)
        partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        if block_mask.full_kv_num_blocks is None:
            return cls(mask_mod, partial & ~partial, partial, q_block, k_block)
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks)
        return cls(mask_mod, full, full | partial, q_block, k_block)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        batch, heads = self.full.shape[:2]
        at = (b if batch > 1 else 0, h if heads > 1 else 0, q // self.q_block, k // self.k_block)
        # Rows before the first one would count from the end of the lists.
        return (q >= 0) & (self.full[at] | (self.listed[at] & self.mask_mod(b, h, q, k)))


def _table(counts: Array, indices: Array, blocks: int) -> Array:
    """Bool (B|1, H|1, q blocks, blocks) of counts (..., q blocks) and indices (..., q blocks, n)."""
    arrays, width = arrays_for([counts]), indices.shape[-1]
    lead = (1,) * (3 - counts.ndim)
    used = arrays.arange(width) < counts[..., None]
    row = arrays.arange(counts.numel())[:, None]
    # Unused entries may hold anything: they go to a column of their own.
    column = arrays.where(used, indices, blocks).reshape(-1, width)
    hits = arrays.scatter_add(
        counts.numel() * (blocks + 1),
        arrays.cast(row * (blocks + 1) + column, "int64").reshape(-1),
        arrays.full((counts.numel() * width,), 1, "int64"),
    )
    return hits.reshape(*lead, *counts.shape, blocks + 1)[..., :blocks] > 0
