"""Masks by name: what attention-gym and the papers call them, composed like all others with `&` and `|`.

docs/library.md has a picture of each.
"""

from .generation import block_causal as block_causal
from .generation import block_diffusion as block_diffusion
from .generation import draft_blocks as draft_blocks
from .generation import tree as tree
from .grids import morton_natten as morton_natten
from .grids import morton_order as morton_order
from .grids import natten as natten
from .grids import sasa as sasa
from .grids import sta as sta
from .grids import tile_order as tile_order
from .grids import tiled_natten as tiled_natten
from .mixtures import batchify as batchify
from .mixtures import per_document as per_document
from .mixtures import per_head as per_head
from .mixtures import per_row as per_row
from .mixtures import reordered as reordered
from .sequences import dilated as dilated
from .sequences import global_sliding as global_sliding
from .sequences import prefix_lm as prefix_lm
from .sequences import shared_prefix as shared_prefix
from .sequences import strided_order as strided_order
from .vision import flamingo as flamingo
from .vision import selected_blocks as selected_blocks
from .vision import spatial_heads as spatial_heads
from .vision import temporal_heads as temporal_heads
from .vision import vision_cross_attention as vision_cross_attention

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
