"""Masks without structure: given as spans, as booleans, or as a function of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._encoding import CHUNK_PAIRS, TRACED_RUNS, encode, encode_traced
from ._encoding import SpansLargerThanMask as SpansLargerThanMask
from ._expression import Mask, _split
from ._intervals import Interval, Rows
from ._lowering import Lowering
from ._predicates import call, call_traced, name_of
from ._runs import find_runs
from .arrays import Array
from .errors import OptionError
from .spans import Spans

_TRACED_CHUNKS = 16
"""Chunks of rows in a traced program, at most: each is a copy of the predicate in it."""


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
            # As NumPy's: in a trace JAX makes a tracer even of an array whose values it knows.
            Spans(low.arrays.to_numpy(self.bounds), low.top).validate()
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
    max_runs: int | None = None

    def _key_len(self) -> Any:
        return self.visible.shape[-1]

    def _row_len(self) -> Any:
        return self.visible.shape[-2]

    def _lower(self, low: Lowering) -> Rows:
        visible = self.visible
        if visible.ndim < 4:
            visible = visible[:, None] if visible.ndim == 3 else visible[None, None]
        low.check_rows("from_dense", visible.shape[2])
        low.check_axis("from_dense", "batch", visible.shape[0], low.batch)
        low.check_axis("from_dense", "heads", visible.shape[1], low.heads)
        if _is_traced(low, visible):
            return _traced_rows(low, [low.arrays.asarray(visible, "bool")], self.max_runs)
        return _rows(low, [encode(low.arrays.to_numpy(visible), self.max_runs, "from_dense")])

    def __repr__(self) -> str:
        return f"from_{super().__repr__()}"


@dataclass(frozen=True, eq=False, repr=False)
class Keys(Mask):
    valid: Array
    max_runs: int | None = None

    def _key_len(self) -> Any:
        return self.valid.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        if self.valid.shape[-1] == 0:
            return Rows((Interval(0, 0),))
        if not _is_traced(low, self.valid):
            values = np.atleast_2d(low.arrays.to_numpy(self.valid))
            low.check_axis("keys: valid", "batch", len(values), low.batch)
            ends = low.arrays.asarray(encode(values[:, None, None], self.max_runs, "keys"), "int32")
            return Rows(_split(ends[..., 0], ends[..., 1]))
        valid = low.per_batch("keys: valid", self.valid, "int64")
        runs = TRACED_RUNS if self.max_runs is None else self.max_runs
        marked = low.arrays.full((valid.shape[0], 1), 1, "int64")
        pairs, broken = find_runs(low.arrays, marked, valid, runs)
        return Rows(tuple([Interval(lo[:, None], hi[:, None]) for lo, hi in pairs]), broken[:, None])


@dataclass(frozen=True, eq=False, repr=False)
class Predicate(Mask):
    fn: Callable[[Any, Any, Any, Any], Any]
    max_runs: int | None = None

    def _lower(self, low: Lowering) -> Rows:
        if low.k_len is None:
            raise OptionError(
                self._what(),
                expected="the length of the global key sequence",
                got="k_index alone",
                remedy="Lower it over all keys, then use Spans.take_keys",
            )
        if _is_traced(low, low.q_index):
            return self._traced(low)
        if low.q_len == 0 or low.k_len == 0:
            return _rows(low, [encode(np.zeros((1, 1, low.q_len, low.k_len), bool), self.max_runs)])
        chunks = []
        for rows in _chunks(low):
            visible = call(self._what(), self.fn, low, rows)
            if _is_traced(low, visible):  # Under vmap over an array that the function holds.
                return self._traced(low)
            chunks.append(encode(low.arrays.to_numpy(visible), self.max_runs, self._what()))
        return _rows(low, chunks)

    def _traced(self, low: Lowering) -> Rows:
        chunks = (call_traced(self._what(), self.fn, low, rows) for rows in _traced_chunks(low))
        return _traced_rows(low, chunks, self.max_runs)

    def _what(self) -> str:
        return f"from_predicate({name_of(self.fn)})"

    def __repr__(self) -> str:
        return self._what()


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Predicate):
    """The predicate of a `BlockMask`, which counts rows from 0."""

    example: Array | None = None
    """Decides the framework that `fn` computes in."""
    lengths: tuple[int, int] | None = None
    """Rows and keys of the `BlockMask`, where it says them."""

    def _key_len(self) -> Any:
        return None if self.lengths is None else self.lengths[1]

    def _row_len(self) -> Any:
        return None if self.lengths is None else self.lengths[0]

    def _anchor(self) -> tuple[Any, ...] | None:
        return ("row numbers",)

    def _anchor_index(self, low: Lowering) -> Array:
        if self.lengths is not None:
            low.check_rows(self._what(), self.lengths[0])
        return low.arrays.arange(low.q_len)[None, None]

    def _lower(self, low: Lowering) -> Rows:
        if self.example is not None and self.example.ndim > 2:
            low.check_axis(self._what(), "batch", self.example.shape[0], low.batch)
            low.check_axis(self._what(), "heads", self.example.shape[1], low.heads)
        return super()._lower(low)

    def _what(self) -> str:
        return f"from_block_mask({name_of(getattr(self.fn, 'mask_mod', self.fn))})"


def _is_traced(low: Lowering, x: Array) -> bool:
    """Whether the values of `x` are not there: what is on a device can be waited for."""
    on_host = getattr(getattr(x, "device", None), "type", "cpu") == "cpu"
    return low.arrays.tracing() or (on_host and not low.arrays.concrete(x))


def _require_values(low: Lowering, what: str, x: Array) -> None:
    if _is_traced(low, x):
        raise OptionError(
            what,
            expected="values: the number of spans of such a mask depends on its data",
            got="a traced array",
            remedy="Lower it once outside the compiled function, with mask.prepare(...)",
        )


def _chunks(low: Lowering) -> Iterator[Array]:
    """The rows' indices, (B|1, 1, rows), a few rows at a time."""
    step = max(CHUNK_PAIRS // low.top, 1)
    for i in range(0, low.q_len, step):
        yield low.q_index[:, :, i : i + step]


def _traced_chunks(low: Lowering) -> list[Array]:
    """The same with few chunks; one where the lengths are symbols."""
    sizes = (low.q_len, low.top)
    if not (low.arrays.tracing() and all(map(low.arrays.is_static, sizes))):
        return [low.q_index]
    wanted = -(-low.q_len * low.top // CHUNK_PAIRS)
    step = max(-(-low.q_len // max(min(wanted, _TRACED_CHUNKS), 1)), 1)
    return [low.q_index[:, :, i : i + step] for i in range(0, max(low.q_len, 1), step)]


def _rows(low: Lowering, chunks: list[np.ndarray[Any, Any]]) -> Rows:
    """Chunks of bounds along the row axis as one set of rows."""
    runs = max(chunk.shape[3] for chunk in chunks)
    chunks = [np.pad(x, ((0, 0),) * 3 + ((0, runs - x.shape[3]), (0, 0))) for x in chunks]
    bounds = low.arrays.asarray(np.concatenate(chunks, axis=2), "int32")
    return Rows(_split(bounds[..., 0], bounds[..., 1]))


def _traced_rows(low: Lowering, chunks: Iterable[Array], max_runs: int | None) -> Rows:
    """The same from chunks of booleans; rows with too many runs are illegal."""
    runs = TRACED_RUNS if max_runs is None else max_runs
    encoded = [encode_traced(low.arrays, chunk, runs) for chunk in chunks]
    ends = [low.arrays.concat([x[..., r, i] for x in encoded]) for r in range(runs) for i in range(2)]
    return Rows(tuple(map(Interval, ends[::2], ends[1::2])), ends[0] > ends[1])
