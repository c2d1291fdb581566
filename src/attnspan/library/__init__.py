"""Masks by name: what attention-gym and the papers call them, composed like all others with `&` and `|`.

docs/library.md has a picture of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pytrees import register as _register
from . import _grids, _mixtures, _patterns
from .generation import block_causal, block_diffusion, draft_blocks, tree
from .grids import morton_natten, morton_order, natten, sasa, sta, tile_order, tiled_natten
from .mixtures import batchify, per_document, per_head, per_row, reordered
from .sequences import (
    causal_document,
    dilated,
    document,
    global_sliding,
    left_padding,
    prefix_lm,
    right_padding,
    shared_prefix,
    sliding_window,
    strided_order,
)
from .vision import flamingo, selected_blocks, spatial_heads, temporal_heads, vision_cross_attention

__all__ = [
    "batchify",
    "block_causal",
    "block_diffusion",
    "causal_document",
    "dilated",
    "document",
    "draft_blocks",
    "flamingo",
    "global_sliding",
    "left_padding",
    "morton_natten",
    "morton_order",
    "natten",
    "per_document",
    "per_head",
    "per_row",
    "prefix_lm",
    "register_pytrees",
    "reordered",
    "right_padding",
    "sasa",
    "selected_blocks",
    "shared_prefix",
    "sliding_window",
    "spatial_heads",
    "sta",
    "strided_order",
    "temporal_heads",
    "tile_order",
    "tiled_natten",
    "tree",
    "vision_cross_attention",
]

_LEAVES = (
    *(_grids.Natten, _grids.Sasa, _grids.Sta),
    *(_mixtures.Batchify, _mixtures.PerDocument, _mixtures.PerHead, _mixtures.PerRow, _mixtures.Reordered),
    *(_patterns.BlockCausal, _patterns.BlockDiffusion, _patterns.Dilated, _patterns.DraftBlocks),
    *(_patterns.Flamingo, _patterns.GlobalRows, _patterns.GlobalTokens, _patterns.PrefixOf),
    *(_patterns.SelectedBlocks, _patterns.Stripes, _patterns.Tree, _patterns.VisionIntervals),
)


def register_pytrees(registrar: Callable[[type, Callable[..., Any], Callable[..., Any]], None]) -> None:
    """Register the library's masks as pytrees, as `attnspan.masks.register_pytrees` does for the others.

    Args:
        registrar: as there.

    Example:
        >>> seen = {}
        >>> register_pytrees(lambda cls, flatten, unflatten: seen.update({cls.__name__: flatten}))
        >>> seen["BlockCausal"](block_causal(4))[0]
        ()
    """
    for leaf in _LEAVES:
        _register(registrar, leaf)
