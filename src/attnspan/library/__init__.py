"""Masks of papers and of attention-gym, which you combine with other masks by `&` and `|`.

docs/library.md has a picture of each. Arguments of a wrong type raise a DtypeError, and sizes that do not fit
raise a ShapeError. Other values that a mask does not accept raise an OptionError.
"""

from .generation import block_causal, block_diffusion, draft_blocks, tree
from .grids import morton_natten, morton_order, natten, sasa, sta, tile_order, tiled_natten
from .mixtures import batchify, per_document, per_head, per_row, reordered
from .sequences import dilated, global_sliding, prefix_lm, shared_prefix, strided_order
from .vision import flamingo, selected_blocks, spatial_heads, temporal_heads, vision_cross_attention

__all__ = [
    "batchify",
    "block_causal",
    "block_diffusion",
    "dilated",
    "draft_blocks",
    "flamingo",
    "global_sliding",
    "morton_natten",
    "morton_order",
    "natten",
    "per_document",
    "per_head",
    "per_row",
    "prefix_lm",
    "reordered",
    "sasa",
    "selected_blocks",
    "shared_prefix",
    "spatial_heads",
    "sta",
    "strided_order",
    "temporal_heads",
    "tile_order",
    "tiled_natten",
    "tree",
    "vision_cross_attention",
]
