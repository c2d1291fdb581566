"""Masks that are given by values: booleans, a function of indices, a FlexAttention `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _arguments as checked
from ._blocks import BlockLists
from ._expression import Mask
from ._tables import Blocks, Dense, Predicate
from .arrays import Array


def from_dense(visible: Array, max_runs: int | None = None) -> Mask:
    """A mask given by booleans, run-length encoded when it is lowered.

    Args:
        visible: bool (q_len, k_len), (B|1, q_len, k_len) or (B|1, H|1, q_len, k_len); True: may see. Rows as
            they come.
        max_runs: R, the most runs of visible keys that a row has, at least 1. None: as many as the data have;
            8 in a traced program, where R cannot follow from data. A row with more raises when it is encoded
            on the host, and is illegal on a device.

    Raises:
        DtypeError, ShapeError, OptionError: for an array that is not bool or of a wrong rank, or
            max_runs < 1.

    Example:
        >>> import numpy as np
        >>> from_dense(np.array([[True, False, True]])).spans(1, 3).bounds[0, 0, 0].tolist()
        [[0, 1], [2, 3]]
    """
    checked.booleans("from_dense", visible)
    checked.rank("from_dense", visible, (2, 3, 4))
    return Dense(visible, checked.runs("from_dense: max_runs", max_runs))


def from_predicate(fn: Callable[[Any, Any, Any, Any], Any], max_runs: int | None = None) -> Mask:
    """A mask given by FlexAttention's `mask_mod`: fn(b, h, q_index, k_index) -> bool, on global indices.

    It is evaluated when the mask is lowered, on int64 arrays of shapes (B, 1, 1, 1), (1, H, 1, 1),
    (B|1, 1, rows, 1) and (1, 1, 1, k_len), a chunk of rows at a time; O(chunk * k_len) memory. In a traced
    program it becomes part of that program; any function that the compiler can read will do: a closure, a
    lambda, a `functools.partial`, a callable object.

    Args:
        fn: a function of four integer arrays, written with `&`, `|` and `where`; in the framework of the
            other arrays of the expression or of `like`.
        max_runs: R, the most runs of visible keys that a row has, as for `from_dense`.

    Raises:
        DtypeError, OptionError: if `fn` cannot be called, or for max_runs < 1.

    Example:
        >>> from_predicate(lambda b, h, q, k: q >= k).spans(2, 2).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2]]
    """
    return Predicate(
        checked.function("from_predicate", fn), checked.runs("from_predicate: max_runs", max_runs)
    )


def from_block_mask(block_mask: Any, max_runs: int | None = None) -> Mask:
    """The mask of a FlexAttention `BlockMask`: of its blocks, and of its `mask_mod` in those that it masks.

    FlexAttention counts rows and keys from 0, each on its own; so does the default `q_index` of an expression
    with it. The blocks describe rows as they come: a `q_index` of one's own counts the rows of the
    `BlockMask`. `attnspan.torch.to_block_mask` is the way back.

    Args:
        block_mask: an object with a `mask_mod` attribute; without block lists, that alone decides.
        max_runs: R, the most runs of visible keys that a row has, as for `from_dense`.

    Raises:
        DtypeError, OptionError: if it has no `mask_mod`, or for max_runs < 1.

    Example:
        >>> from types import SimpleNamespace
        >>> block_mask = SimpleNamespace(mask_mod=lambda b, h, q, k: q >= k)
        >>> from_block_mask(block_mask).spans(1, 2).bounds.tolist()
        [[[[[0, 1]]]]]
    """
    fn = checked.function("from_block_mask: mask_mod", getattr(block_mask, "mask_mod", None))
    runs = checked.runs("from_block_mask: max_runs", max_runs)
    blocks = getattr(block_mask, "kv_num_blocks", None)
    if blocks is None:
        return Blocks(fn, runs)
    rows, keys = block_mask.seq_lengths
    return Blocks(BlockLists.of(block_mask, fn), runs, blocks, (rows, keys))
