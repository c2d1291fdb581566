"""Masks between text and images, for video, and for blocks that data choose."""

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


class flamingo(RowNumbered):
    """Cross attention from text to images: each text token sees the last image at or before it. R = 1.

    Queries are text tokens, counted from 0 unless you pass `q_index`. Keys are the tokens of the images, one
    image after the other. Text tokens before the first image see nothing.

    Source: Flamingo (Alayrac et al. 2022), section 2.1 and equation (1): the function phi. attention-gym's
    `flamingo` is `vision_cross_attention` here.

    Args:
        positions: integer (n,) or (B, n), strictly ascending, the place of each image in the text. Put the
            places of missing images beyond the text.
        image_length: Tokens of an image, at least 1.
        earlier: See all images at or before the token, as with OpenFlamingo's
            `only_attend_immediate_media=False`.

    Raises:
        DtypeError: If an argument has another type.
        ShapeError: If the keys are not the tokens of the images. Lowering checks this.
        OptionError: If the places do not ascend, or if `image_length` is below 1. Lowering checks places
            that can be read on the host.

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
    """Cross attention from text to images: an interval of the text sees each image.

    Queries and keys are as for `flamingo`. R is the number of images. `prepare` reduces it to the actual
    number of runs, which is 1 if the intervals are in order.

    Source: attention-gym's `flamingo` (`generate_vision_cross_attention_mask_mod`). Llama 3.2 Vision.

    Args:
        intervals: integer (n, 2) or (B, n, 2). The text tokens start <= i < stop of entry n see image n.
        image_length: Tokens of an image, at least 1.

    Raises:
        DtypeError: If an argument is not of integers.
        ShapeError: If `intervals` has another shape, or if the keys are not the tokens of the images.
        OptionError: If `image_length` is below 1.

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
        remedy = "Pass start and stop: text tokens start <= i < stop see the image"
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
    """Video heads that see keys within and near their own frame: a band, and the prompt. R = 2.

    Query i sees key j iff |i - j| < w, or i or j is in the prompt. With `sink`, all queries also see the
    first frame. w is width * frame, rounded down to a multiple of `multiple`.

    Source: attention-gym's `svg`, spatial heads. Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: Text tokens before the first frame.
        frame: Tokens of a frame, at least 1.
        width: Number of frames on each side.
        sink: Whether all queries see the first frame.
        multiple: Granularity of the band, at least 1. attention-gym calls it `round_width` and uses 128.

    Raises:
        DtypeError: If `prompt`, `frame` or `multiple` is not an int, or `sink` is not a bool.
        OptionError: If `width` is no number, or if a number is out of range.

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
    expect(fits, what, "a number of at least 0, below 2^31", repr(width), "Pass how many frames a query sees")


class temporal_heads(Mask):
    """Video heads that see the same place of every frame, and the prompt. R = frames + 1.

    Query i sees key j iff i or j is in the prompt, or if their places within their frames differ by less than
    w = width * frame // frames. A query needs a span for each frame. Sparse VideoGen therefore reorders the
    tokens, so that the frames of a place are neighbours. In that order, the mask is a band (`spatial_heads`).

    Source: attention-gym's `svg`, temporal heads. Sparse VideoGen (Xi et al. 2025, arXiv 2502.01776).

    Args:
        prompt: Text tokens before the first frame.
        frames: Number of frames, at least 1.
        frame: Tokens of a frame, at least 1.
        width: Number of keys that a query sees on each side, in frames.

    Raises:
        DtypeError: If `prompt`, `frames` or `frame` is not an int.
        ShapeError: If the keys are not the tokens of the prompt and the frames. Lowering checks this.
        OptionError: If `width` is no number, or if a number is out of range.

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
    """Top-k block sparsity: each block of queries sees the blocks of keys that are chosen for it. R = k.

    Query i sees key j iff j // block is among chosen[b, h, i // block]. Query heads of one key head (GQA)
    may have different choices.

    Source: attention-gym's `vsa` (Video Sparse Attention, Zhang et al. 2025, arXiv 2505.13389). It also
    serves MoBA and the selected branch of NSA.

    Args:
        chosen: integer (B|1, H|1, query blocks, k), numbers of key blocks. A negative number chooses no
            block. Order and repeats do not matter.
        block: Tokens of a block, at least 1. The last block may be smaller.
        sizes: integer (key blocks,), the number of valid keys at the start of each block, for VSA's padded
            tiles. None means that all keys are valid.

    Raises:
        DtypeError: If an array is not of integers.
        ShapeError: If `chosen` has other axes or an axis of length 0, or does not fit batch and heads.
        OptionError: If `block` is below 1, or if a number is beyond the key blocks. Lowering checks numbers
            that can be read on the host.

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
        what, remedy = "selected_blocks: chosen", "Choose at least one block. A negative number means none"
        sizes = checks.optional(partial(checks.integers, ranks=(1,)))
        self._check(chosen=partial(checks.integers, ranks=(4,)), block=checks.positive, sizes=sizes)
        expected, shape = "(B|1, H|1, query blocks, k), none of them 0", tuple(self.chosen.shape)
        expect(0 not in shape, what, expected, shape, remedy, error=ShapeError)

    def _lower(self, low: Lowering) -> Rows:
        arrays, what = low.arrays, "selected_blocks: chosen"
        chosen = low.int32(what, self.chosen)
        low.check_planes(what, chosen)
        blocks = -(-low.top // self.block) if self.sizes is None else self.sizes.shape[-1]
        bad = arrays.any(arrays.any(chosen >= blocks))[..., None]
        expected = "numbers of blocks of keys, below {}, or negative for none"
        illegal = low.broken(what, bad, expected, "Choose existing blocks", blocks)
        # Sorted and without repeats, while there is only one row for each block of queries.
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
