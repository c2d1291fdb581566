"""Masks between text and images, of video, and of blocks that are chosen by data."""

from __future__ import annotations

import math

from .. import _arguments as checked
from .. import masks
from .._expression import Mask
from ..arrays import Array
from ..errors import ShapeError, shown
from ._patterns import Flamingo, GlobalRows, SelectedBlocks, Stripes, VisionIntervals

__all__ = ["flamingo", "selected_blocks", "spatial_heads", "temporal_heads", "vision_cross_attention"]


def flamingo(positions: Array, image_length: int, earlier: bool = False) -> Mask:
    """Cross attention from text to images: each text token sees the last image at or before it. R = 1.

    Rows are text, counted from 0 unless `q_index` is given; keys are the images' tokens, one image after the
    other. Tokens before the first image see nothing.

    Source: Flamingo (Alayrac et al. 2022), section 2.1 and equation (1): the function phi. attention-gym's
    `flamingo` is `vision_cross_attention` here.

    Args:
        positions: integer (n,) or (B, n), the place in the text of each image, strictly ascending. Put places
            of missing images beyond the text.
        image_length: tokens of an image, at least 1.
        earlier: see all images at or before the token, as OpenFlamingo's `only_attend_immediate_media=False`.

    Raises:
        OptionError, DtypeError, ShapeError: for places that do not ascend, or keys that are not the images'
            tokens.

    Example:
        >>> flamingo([1, 3], 2).spans(5, 4).bounds[0, 0, :, 0].tolist()
        [[0, 0], [0, 2], [0, 2], [2, 4], [2, 4]]
    """
    positions = checked.integers("flamingo: positions", positions, (1, 2))
    return Flamingo(positions, checked.count("flamingo: image_length", image_length, 1), bool(earlier))


def vision_cross_attention(intervals: Array, image_length: int) -> Mask:
    """Cross attention from text to images: each image is seen by an interval of the text.

    Rows and keys as for `flamingo`. R = number of images; `prepare` brings it down to the runs that there
    are, 1 if the intervals are in order.

    Source: attention-gym's `flamingo` (`generate_vision_cross_attention_mask_mod`); Llama 3.2 Vision.

    Args:
        intervals: integer (n, 2) or (B, n, 2): image n is seen by the text tokens start <= i < stop.
        image_length: tokens of an image, at least 1.

    Raises:
        OptionError, DtypeError, ShapeError: for arrays that do not fit, or keys that are not the images'
            tokens.

    Example:
        >>> import numpy as np
        >>> mask = vision_cross_attention(np.array([[0, 3], [1, 3]]), 2)
        >>> mask.prepare(4, 4).lowered.bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 4], [0, 4], [0, 0]]
    """
    intervals = checked.integers("vision_cross_attention: intervals", intervals, (2, 3))
    if intervals.shape[-1] != 2 or intervals.shape[-2] == 0:
        raise ShapeError(
            "vision_cross_attention: intervals",
            expected="shape (n, 2) or (B, n, 2), n at least 1",
            got=shown(intervals.shape),
            remedy="Pass the first text token of each image and the one after its last",
        )
    length = checked.count("vision_cross_attention: image_length", image_length, 1)
    return VisionIntervals(intervals, length)


def spatial_heads(prompt: int, frame: int, width: float, sink: bool = False, multiple: int = 1) -> Mask:
    """Heads of video that look within and near their own frame: a band, beside the prompt. R = 2.

    Query i sees key j iff i or j is of the prompt (with `sink`: or j of the first frame), or |i - j| < w,
    where w is width * frame rounded down to a multiple.

    Source: attention-gym's `svg`, spatial heads; Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: text tokens before the first frame.
        frame: tokens of a frame, at least 1.
        width: frames on either side.
        sink: the first frame is seen by all.
        multiple: attention-gym's `round_width`, 128 there.

    Raises:
        OptionError, DtypeError: for numbers out of range.

    Example:
        >>> spatial_heads(1, 2, 1).spans(5, 5).dense()[0, 0, 1:].astype(int).tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [1, 0, 0, 1, 1]]
    """
    prompt, frame = (
        checked.count("spatial_heads: prompt", prompt),
        checked.count("spatial_heads: frame", frame, 1),
    )
    multiple = checked.count("spatial_heads: multiple", multiple, 1)
    band = math.floor(width * frame / multiple) * multiple
    band = checked.count("spatial_heads: width * frame", band)
    always = masks.global_keys(prompt + frame if sink else prompt) | GlobalRows(prompt)
    return masks.window(band - 1, band - 1) | always if band else always


def temporal_heads(prompt: int, frames: int, frame: int, width: float) -> Mask:
    """Heads of video that look at the same place of every frame, beside the prompt. R = frames + 1.

    Query i sees key j iff i or j is of the prompt, or their places within their frames differ by less than w
    = width * frame // frames. A span for each frame: with tokens in an order that puts the frames of a place
    side by side, Sparse VideoGen's own remedy, the same mask is a band (`spatial_heads`).

    Source: attention-gym's `svg`, temporal heads; Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: text tokens before the first frame.
        frames: number of frames, at least 1.
        frame: tokens of a frame, at least 1.
        width: frames' worth of keys that a row sees on either side.

    Raises:
        OptionError, DtypeError, ShapeError: for numbers out of range, or another number of keys.

    Example:
        >>> temporal_heads(0, 2, 2, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    prompt, frame = (
        checked.count("temporal_heads: prompt", prompt),
        checked.count("temporal_heads: frame", frame, 1),
    )
    frames = checked.count("temporal_heads: frames", frames, 1)
    reach = checked.count("temporal_heads: width * frame", math.floor(width * frame / frames))
    return Stripes(prompt, frames, frame, reach)


def selected_blocks(chosen: Array, block: int, sizes: Array | None = None) -> Mask:
    """Each block of rows sees the blocks of keys chosen for it: top-k block sparsity. R = k.

    Query i sees key j iff j // block is among chosen[b, h, i // block]. Heads that share keys share their
    choice only if the array says so.

    Source: attention-gym's `vsa` (Video Sparse Attention, Zhang et al. 2025, arXiv 2505.13389); MoBA; the
    selected branch of NSA.

    Args:
        chosen: integer (B|1, H|1, row blocks, k), numbers of blocks of keys; negative: none. Order does not
            matter, nor do repeats.
        block: tokens of a block, at least 1; the last may be smaller.
        sizes: integer (key blocks,), how many keys at the start of each block are valid: VSA's padded tiles.

    Raises:
        OptionError, DtypeError, ShapeError: for arrays that do not fit, or numbers of no block.

    Example:
        >>> import numpy as np
        >>> chosen = np.array([[0, -1], [1, 0]]).reshape(1, 1, 2, 2)
        >>> selected_blocks(chosen, 2).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    chosen = checked.integers("selected_blocks: chosen", chosen, (4,))
    if 0 in chosen.shape:
        raise ShapeError(
            "selected_blocks: chosen",
            expected="(B|1, H|1, row blocks, k), none of them 0",
            got=shown(chosen.shape),
            remedy="Choose at least one block; a negative number means none",
        )
    table = None if sizes is None else checked.integers("selected_blocks: sizes", sizes, (1,))
    return SelectedBlocks(chosen, checked.count("selected_blocks: block", block, 1), table)
