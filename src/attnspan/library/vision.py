"""Masks between text and images, of video, and of blocks that are chosen by data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from attnspan import masks
from attnspan.base import checks
from attnspan.base.arrays import Array
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.expression import RowNumbered
from attnspan.masks.intervals import Interval, Rows
from attnspan.masks.lowering import Lowering

from .sequences import global_rows

__all__ = ["flamingo", "selected_blocks", "spatial_heads", "temporal_heads", "vision_cross_attention"]


class flamingo(RowNumbered):
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

    Example:
        >>> flamingo([1, 3], 2).spans(5, 4).bounds[0, 0, :, 0].tolist()
        [[0, 0], [0, 2], [0, 2], [2, 4], [2, 4]]
    """

    positions: Array
    image_length: int
    earlier: bool = False

    def __post_init__(self) -> None:
        self._check(positions=checks.integers, image_length=checks.positive, earlier=checks.flag)

    def _key_len(self) -> Any:
        return self.positions.shape[-1] * self.image_length

    def _lower(self, low: Lowering) -> Rows:
        arrays, what = low.arrays, "flamingo: positions"
        at = low.per_batch(what, self.positions)
        bad = low.unordered(at, repeats=False)[:, None, None]
        expected = "strictly ascending places of the images in the text"
        illegal = low.broken(what, bad, expected, "Sort the images by their place")
        seen = arrays.searchsorted(at, low.q_index[:, 0], right=True)
        last = arrays.cast(seen, "int32")[:, None] * self.image_length
        lo = 0 if self.earlier else arrays.maximum(last - self.image_length, 0)
        return Rows((Interval(lo, last),), illegal)


class vision_cross_attention(RowNumbered):
    """Cross attention from text to images: each image is seen by an interval of the text.

    Rows and keys as for `flamingo`. R = number of images; `prepare` brings it down to the runs that there
    are, 1 if the intervals are in order.

    Source: attention-gym's `flamingo` (`generate_vision_cross_attention_mask_mod`); Llama 3.2 Vision.

    Args:
        intervals: integer (n, 2) or (B, n, 2): image n is seen by the text tokens start <= i < stop.
        image_length: tokens of an image, at least 1.

    Example:
        >>> import numpy as np
        >>> mask = vision_cross_attention(np.array([[0, 3], [1, 3]]), 2)
        >>> mask.prepare(4, 4).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 4], [0, 4], [0, 0]]
    """

    intervals: Array
    image_length: int

    def __post_init__(self) -> None:
        self._check(intervals=partial(checks.integers, ranks=(2, 3)), image_length=checks.positive)
        what, shape = "vision_cross_attention: intervals", tuple(self.intervals.shape)
        expected = "shape (n, 2) or (B, n, 2), n at least 1"
        remedy = "Pass the first text token of each image and the one after its last"
        expect(shape[-1] == 2 and shape[-2] != 0, what, expected, shape, remedy, error=ShapeError)

    def _key_len(self) -> Any:
        return self.intervals.shape[-2] * self.image_length

    def _lower(self, low: Lowering) -> Rows:
        what, n = "vision_cross_attention: intervals", self.image_length
        ends = low.int32(what, self.intervals)
        ends = ends[None] if ends.ndim == 2 else ends
        low.check_axis(what, "batch", ends.shape[0])
        found = []
        for image in range(ends.shape[1]):
            start, stop = ends[:, image, 0, None, None], ends[:, image, 1, None, None]
            rows = (low.q_index >= start) & (low.q_index < stop)
            found.append(low.seen_by(rows, image * n, (image + 1) * n))
        return low.union(found)


def spatial_heads(prompt: int, frame: int, width: float, sink: bool = False, multiple: int = 1) -> Mask:
    """Heads of video that look within and near their own frame: a band, and the prompt. R = 2.

    Query i sees key j iff i or j is of the prompt (with `sink`: or j of the first frame), or |i - j| < w,
    where w is width * frame rounded down to a multiple.

    Source: attention-gym's `svg`, spatial heads; Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: text tokens before the first frame.
        frame: tokens of a frame, at least 1.
        width: frames on either side.
        sink: the first frame is seen by all.
        multiple: attention-gym's `round_width`, 128 there.

    Example:
        >>> spatial_heads(1, 2, 1).spans(5, 5).dense()[0, 0, 1:].astype(int).tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [1, 0, 0, 1, 1]]
    """
    prompt = checks.count("spatial_heads: prompt", prompt)
    frame = checks.positive("spatial_heads: frame", frame)
    multiple = checks.positive("spatial_heads: multiple", multiple)
    sink = checks.flag("spatial_heads: sink", sink)
    _check_width("spatial_heads: width", width)
    band = math.floor(width * frame / multiple) * multiple
    always = masks.global_keys(prompt + frame if sink else prompt) | global_rows(prompt)
    return masks.window(band - 1, band - 1) | always if band else always


def _check_width(what: str, width: Any) -> None:
    fits = isinstance(width, (int, float)) and not isinstance(width, bool) and 0 <= width < 2**31
    expect(fits, what, "a number of at least 0, below 2^31", repr(width), "Pass how many frames a row sees")


class temporal_heads(Mask):
    """Heads of video that look at the same place of every frame, and at the prompt. R = frames + 1.

    Query i sees key j iff i or j is of the prompt, or their places within their frames differ by less than w
    = width * frame // frames. A span for each frame: with tokens in an order that puts the frames of a place
    next to each other, Sparse VideoGen's own remedy, the same mask is a band (`spatial_heads`).

    Source: attention-gym's `svg`, temporal heads; Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: text tokens before the first frame.
        frames: number of frames, at least 1.
        frame: tokens of a frame, at least 1.
        width: frames' worth of keys that a row sees on either side.

    Example:
        >>> temporal_heads(0, 2, 2, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    prompt: int
    frames: int
    frame: int
    width: float

    def __post_init__(self) -> None:
        self._check(prompt=checks.count, frame=checks.positive, frames=checks.positive)
        _check_width("temporal_heads: width", self.width)

    def _reach(self) -> int:
        return min(math.floor(self.width * self.frame / self.frames), self.frame)

    def _key_len(self) -> Any:
        return self.prompt + self.frames * self.frame

    def _lower(self, low: Lowering) -> Rows:
        arrays, index, end = low.arrays, low.q_index, self.prompt + self.frames * self.frame
        prompted = (index >= 0) & (index < self.prompt)
        inside = (index >= self.prompt) & (index < end)
        first = arrays.where(prompted, end, arrays.where(inside, self.prompt, 0))
        place, reach = (index - self.prompt) % self.frame, self._reach()
        lo = arrays.clip(place - (reach - 1), 0, self.frame)
        hi = arrays.clip(place + reach, 0, self.frame)
        starts = [self.prompt + number * self.frame for number in range(self.frames)]
        stripes = [low.seen_by(inside, start + lo, start + hi) for start in starts]
        return Rows((Interval(None, first), *stripes))


class selected_blocks(Mask):
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

    Example:
        >>> import numpy as np
        >>> chosen = np.array([[0, -1], [1, 0]]).reshape(1, 1, 2, 2)
        >>> selected_blocks(chosen, 2).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """

    chosen: Array
    block: int
    sizes: Array | None = None

    def __post_init__(self) -> None:
        what, remedy = "selected_blocks: chosen", "Choose at least one block; a negative number means none"
        sizes = checks.optional(partial(checks.integers, ranks=(1,)))
        self._check(chosen=partial(checks.integers, ranks=(4,)), block=checks.positive, sizes=sizes)
        expected, shape = "(B|1, H|1, row blocks, k), none of them 0", tuple(self.chosen.shape)
        expect(0 not in shape, what, expected, shape, remedy, error=ShapeError)

    def _lower(self, low: Lowering) -> Rows:
        arrays, what = low.arrays, "selected_blocks: chosen"
        chosen = low.int32(what, self.chosen)
        low.check_planes(what, chosen)
        blocks = -(-low.top // self.block) if self.sizes is None else self.sizes.shape[-1]
        bad = arrays.any(arrays.any(chosen >= blocks))[..., None]
        expected = "numbers of blocks of keys, below {}, or negative for none"
        illegal = low.broken(what, bad, expected, "Choose among the blocks that there are", blocks)
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
            found.append(low.seen_by(seen, start, start + self._size(low, at)))
        return Rows(tuple(found), illegal)

    def _size(self, low: Lowering, at: Array) -> Any:
        if self.sizes is None:
            return self.block
        arrays = low.arrays
        table = arrays.clip(arrays.to_int32(self.sizes), 0, self.block)
        return arrays.take_along(table[None, None], arrays.clip(at, 0, table.shape[0] - 1))
