"""Masks without structure: given as spans, as booleans, or as a function of indices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._expression import Mask, _split
from ._intervals import Rows
from ._lowering import Lowering
from .arrays import Array
from .errors import OptionError
from .spans import Spans

_CHUNK_PAIRS = 1 << 22
"""(query, key) pairs that a predicate is evaluated on at once, per batch row and head."""

_SMALL = 1 << 20
"""Bytes below which the size of spans is nobody's concern."""


class SpansLargerThanMask(UserWarning):
    """The spans of a mask take more memory than its booleans would: its rows alternate too often.

    Example:
        >>> issubclass(SpansLargerThanMask, UserWarning)
        True
    """


@dataclass(frozen=True, eq=False, repr=False)
class Explicit(Mask):
    bounds: Array

    def _row_len(self) -> Any:
        return self.bounds.shape[2]

    def _lower(self, low: Lowering) -> Rows:
        low.check_rows("spans: bounds", self.bounds.shape[2])
        low.check_axis("spans: bounds", "batch", self.bounds.shape[0], low.batch)
        low.check_axis("spans: bounds", "heads", self.bounds.shape[1], low.heads)
        given = Spans(low.arrays.asarray(self.bounds, "int64"), low.top)
        if low.arrays.concrete(self.bounds):
            given.validate()
            illegal = None
        else:
            illegal = given._illegal_rows()
        bounds = low.arrays.cast(given.bounds, "int32")
        return Rows(_split(bounds[..., 0], bounds[..., 1]), illegal)

    def __repr__(self) -> str:
        return f"spans{super().__repr__().removeprefix('explicit')}"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    visible: Array

    def _key_len(self) -> Any:
        return self.visible.shape[-1]

    def _row_len(self) -> Any:
        return self.visible.shape[-2]

    def _lower(self, low: Lowering) -> Rows:
        _require_values(low, "from_dense", self.visible)
        visible = low.arrays.to_numpy(self.visible)
        if visible.ndim < 4:
            batch = 1 if visible.ndim == 2 else visible.shape[0]
            visible = visible.reshape(batch, 1, *visible.shape[-2:])
        low.check_rows("from_dense", visible.shape[2])
        low.check_axis("from_dense", "batch", visible.shape[0], low.batch)
        low.check_axis("from_dense", "heads", visible.shape[1], low.heads)
        return _rows(low, [encode(visible)])

    def __repr__(self) -> str:
        return f"from_{super().__repr__()}"


@dataclass(frozen=True, eq=False, repr=False)
class Predicate(Mask):
    fn: Callable[[Any, Any, Any, Any], Any]
    example: Array | None = None
    """Decides the framework that `fn` computes in, where it is known."""
    top_left: bool = False

    def _anchor(self) -> tuple[Any, ...] | None:
        return ("row numbers",) if self.top_left else None

    def _anchor_index(self, low: Lowering) -> Array:
        return low.arrays.arange(low.q_len)[None, None]

    def _lower(self, low: Lowering) -> Rows:
        _require_values(low, "from_predicate", low.q_index)
        if low.k_len is None:
            raise OptionError(
                "from_predicate",
                expected="the length of the global key sequence",
                got="k_index alone",
                remedy="Lower it over all keys, then use Spans.take_keys",
            )
        arrays, k_len = low.arrays, low.k_len
        if low.q_len == 0 or k_len == 0:
            return _rows(low, [encode(np.zeros((1, 1, low.q_len, k_len), bool))])
        b = arrays.asarray(np.arange(low.batch), "int64").reshape(-1, 1, 1, 1)
        h = arrays.asarray(np.arange(low.heads), "int64").reshape(1, -1, 1, 1)
        keys = arrays.asarray(np.arange(k_len), "int64")[None, None, None]
        q_index = arrays.cast(low.q_index, "int64")[..., None]
        step = max(_CHUNK_PAIRS // k_len, 1)
        chunks = (
            self._evaluate(low, b, h, q_index[:, :, i : i + step], keys) for i in range(0, low.q_len, step)
        )
        return _rows(low, [encode(chunk) for chunk in chunks])

    def _evaluate(
        self, low: Lowering, b: Array, h: Array, q_index: Array, keys: Array
    ) -> np.ndarray[Any, Any]:
        """Bool (B|1, H|1, rows, k_len)."""
        try:
            visible = low.arrays.to_numpy(low.arrays.asarray(self.fn(b, h, q_index, keys), "bool"))
        except (ValueError, RuntimeError, TypeError) as error:
            raise OptionError(
                "from_predicate",
                expected="a function of index arrays that broadcast",
                got=f"one that raised {type(error).__name__}: {error}",
                remedy="Write it with &, | and where instead of and, or and if",
            ) from error
        lead = (1,) * (4 - visible.ndim) + visible.shape[:-2] if visible.ndim >= 2 else (1, 1)
        return np.broadcast_to(visible, (*lead[:2], q_index.shape[2], keys.shape[-1]))

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", "fn")
        return f"from_block_mask({name})" if self.top_left else f"from_predicate({name})"


def _require_values(low: Lowering, what: str, x: Array) -> None:
    fake = low.arrays.tracing() or (
        getattr(getattr(x, "device", None), "type", "cpu") == "cpu" and not low.arrays.concrete(x)
    )
    if fake:
        raise OptionError(
            what,
            expected="values: the number of spans of such a mask depends on its data",
            got="a traced array",
            remedy="Lower it once outside the compiled function, with mask.prepare(...)",
        )


def _rows(low: Lowering, chunks: list[np.ndarray[Any, Any]]) -> Rows:
    """Chunks of bounds along the row axis as one set of rows."""
    runs = max(chunk.shape[3] for chunk in chunks)
    chunks = [np.pad(x, ((0, 0),) * 3 + ((0, runs - x.shape[3]), (0, 0))) for x in chunks]
    bounds = low.arrays.asarray(np.concatenate(chunks, axis=2), "int32")
    return Rows(_split(bounds[..., 0], bounds[..., 1]))


def encode(visible: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Run-length encode the rows of a boolean mask.

    Args:
        visible: bool (B, H, rows, k_len).

    Returns:
        int32 (B, H, rows, R, 2), R the largest number of runs in a row, at least 1; empty spans last, as (0,
        0).

    Example:
        >>> encode(np.array([[[[True, False, True]]]]))[0, 0, 0].tolist()
        [[0, 1], [2, 3]]
    """
    *lead, k_len = visible.shape
    if visible.size == 0:
        return np.zeros((*lead, 1, 2), np.int32)
    flat = np.ascontiguousarray(visible).reshape(-1, k_len)
    edges = np.zeros((len(flat), k_len + 1), bool)
    edges[:, 0:1] = flat[:, 0:1]
    edges[:, 1:-1] = flat[:, 1:] != flat[:, :-1]
    edges[:, -1:] = flat[:, -1:]
    count = edges.sum(axis=1) // 2
    runs = max(int(count.max(initial=0)), 1)
    row, at = np.nonzero(edges)
    bounds = np.zeros((len(flat), runs, 2), np.int32)
    # Edges of a row alternate between starts and stops, and come in pairs.
    slot = np.arange(len(row) // 2) - np.repeat(np.cumsum(count) - count, count)
    bounds[row[::2], slot] = np.stack([at[::2], at[1::2]], axis=-1)
    if bounds.nbytes > max(flat.nbytes, _SMALL):
        warnings.warn(
            f"mask: its rows have up to {runs} runs, so its spans take {bounds.nbytes >> 20} MiB where "
            f"booleans would take {flat.nbytes >> 20} MiB. Spans are meant for masks with few runs per row.",
            SpansLargerThanMask,
            stacklevel=2,
        )
    return bounds.reshape(*lead, runs, 2)
