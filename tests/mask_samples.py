"""One sample or more of each mask whose rows are known by global index, with its definition pair by pair."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnspan as a

KEYS = 24
BATCH = 2

_BLOCKS = np.repeat([3, 1, 4, 7], [5, 1, 10, 8])
_TWO_ROWS = np.stack([_BLOCKS, np.repeat([0, 5, 2], [12, 4, 8])])
_SCATTERED = np.array([0, 0, 1, 1, 0, 2, 2, 2, 1, 0, 0, 3] + [4] * 12)
_CU = np.array([0, 5, 5, 16, 22])
_CU_TWO_ROWS = np.array([[0, 5, 24], [0, 20, 21]])
_GROUPS = np.array([-1] * 4 + [2] * 6 + [-1] * 2 + [0] * 3 + [-2] + [9] * 8)
_LENGTHS = np.array([9, 24])
_PART = np.array([8, 0])
_VALID = np.stack([np.isin(np.arange(24), x) for x in ([0, 1, 9, 10, 11, 23], [2, 3, 5, 17, 18, 20])])
_PREFIXES = np.array([2, 1, 0, 30])


def document(cu: np.ndarray, i: int) -> int | None:
    inside = [d for d in range(len(cu) - 1) if cu[d] <= i < cu[d + 1]]
    return inside[0] if inside else None


def _same_document(cu: np.ndarray, i: int, j: int) -> bool:
    return document(cu, i) is not None and document(cu, i) == document(cu, j)


def _prefix_of_document(lengths: np.ndarray, cu: np.ndarray, i: int, j: int) -> bool:
    return _same_document(cu, i, j) and j - cu[document(cu, j)] < lengths[document(cu, j)]


def _same(ids: np.ndarray, i: int, j: int) -> bool:
    return i >= 0 and ids[i] == ids[j]


@dataclass(frozen=True, eq=False)
class Sample:
    """`build(*arrays)` is the mask; `sees(b, h, i, j)`: index i of batch row b and head h sees key j.

    `runs` is R, None where it follows from data; `rows` is the number of rows of a mask of cross attention.
    """

    name: str
    arrays: tuple[np.ndarray, ...]
    build: Callable[..., a.Mask]
    sees: Callable[[int, int, int, int], Any]
    runs: int | None = 1
    keys: int = KEYS
    rows: int | None = None
    heads: int = 1

    @property
    def function(self) -> str:
        return self.name.partition(",")[0]

    @property
    def q_len(self) -> int:
        return self.keys if self.rows is None else self.rows

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": BATCH, "heads": self.heads}

    def mask(self, convert: Callable[[np.ndarray], Any] = np.asarray) -> a.Mask:
        return self.build(*map(convert, self.arrays))

    def dense(self, q_index: np.ndarray, k_index: np.ndarray) -> np.ndarray:
        """Bool (B, heads, q_len, k_len), by a loop over all pairs; q_index (B, q_len) or (q_len,)."""
        q_index = np.broadcast_to(q_index, (BATCH, np.shape(q_index)[-1])).tolist()
        pairs = [
            [
                [[_sees(self, b, h, i, j) for j in k_index.tolist()] for i in q_index[b]]
                for h in range(self.heads)
            ]
            for b in range(BATCH)
        ]
        return np.array(pairs, bool).reshape(BATCH, self.heads, len(q_index[0]), len(k_index))

    def default_q_index(self, q_len: int) -> np.ndarray:
        ends = _LENGTHS if "cache" in self.name else np.array([KEYS, KEYS])
        return ends[:, None] - q_len + np.arange(q_len)


@functools.cache
def _sees(sample: Sample, b: int, h: int, i: int, j: int) -> bool:
    return bool(sample.sees(b, h, i, j))


SAMPLES = [
    Sample("full", (), a.full, lambda b, h, i, j: True),
    Sample("causal", (), a.causal, lambda b, h, i, j: j <= i),
    Sample("window", (), lambda: a.window(3), lambda b, h, i, j: i - 3 <= j <= i),
    Sample("window, both sides", (), lambda: a.window(2, 4), lambda b, h, i, j: i - 2 <= j <= i + 4),
    Sample("window, all before", (), lambda: a.window(None, 1), lambda b, h, i, j: j <= i + 1),
    Sample("window, all after", (), lambda: a.window(0, None), lambda b, h, i, j: j >= i),
    Sample("window, huge", (), lambda: a.window(2**31 - 1, 2**31 - 1), lambda b, h, i, j: True),
    Sample("segments", (_BLOCKS,), a.segments, lambda b, h, i, j: _same(_BLOCKS, i, j)),
    Sample(
        "segments, int16", (_BLOCKS.astype(np.int16),), a.segments, lambda b, h, i, j: _same(_BLOCKS, i, j)
    ),
    Sample("segments, per batch row", (_TWO_ROWS,), a.segments, lambda b, h, i, j: _same(_TWO_ROWS[b], i, j)),
    Sample(
        "segments, padding",
        (_BLOCKS,),
        lambda ids: a.segments(ids, padding_id=4),
        lambda b, h, i, j: _same(_BLOCKS, i, j) and _BLOCKS[j] != 4,
    ),
    Sample(
        "segments, padding in many runs",
        (_SCATTERED,),
        lambda ids: a.segments(ids, padding_id=0, max_runs=2),
        lambda b, h, i, j: _same(_SCATTERED, i, j) and _SCATTERED[j] != 0,
        runs=2,
    ),
    Sample(
        "segments, three runs",
        (_SCATTERED,),
        lambda ids: a.segments(ids, max_runs=3),
        lambda b, h, i, j: _same(_SCATTERED, i, j),
        runs=3,
    ),
    Sample("documents", (_CU,), a.documents, lambda b, h, i, j: _same_document(_CU, i, j)),
    Sample(
        "documents, per batch row",
        (_CU_TWO_ROWS,),
        a.documents,
        lambda b, h, i, j: _same_document(_CU_TWO_ROWS[b], i, j),
    ),
    Sample("prefix, int", (), lambda: a.prefix(7), lambda b, h, i, j: j < 7),
    Sample("prefix, beyond the keys", (), lambda: a.prefix(KEYS + 5), lambda b, h, i, j: True),
    Sample("prefix, per batch row", (_LENGTHS,), a.prefix, lambda b, h, i, j: j < _LENGTHS[b]),
    Sample(
        "prefix, per document",
        (_PREFIXES, _CU),
        a.prefix,
        lambda b, h, i, j: _prefix_of_document(_PREFIXES, _CU, i, j),
    ),
    Sample(
        "prefix, one for all documents",
        (_CU,),
        lambda cu: a.prefix(2, cu),
        lambda b, h, i, j: _prefix_of_document(np.full(4, 2), _CU, i, j),
    ),
    Sample("groups", (_GROUPS,), a.groups, lambda b, h, i, j: _same(_GROUPS, i, j) and _GROUPS[i] >= 0),
    Sample("key_padding", (_LENGTHS,), a.key_padding, lambda b, h, i, j: j < _LENGTHS[b]),
    Sample("key_padding, int", (), lambda: a.key_padding(8), lambda b, h, i, j: j < 8),
    Sample(
        "key_padding, left",
        (_LENGTHS,),
        lambda lengths: a.key_padding(lengths, side="left"),
        lambda b, h, i, j: j >= KEYS - _LENGTHS[b],
    ),
    Sample(
        "key_padding, of a part",
        (_PART,),
        lambda lengths: a.key_padding(lengths, start=3, stop=11),
        lambda b, h, i, j: not 3 + _PART[b] <= j < 11,
        runs=2,
    ),
    Sample(
        "key_padding, before the end of a part",
        (_PART,),
        lambda lengths: a.key_padding(lengths, "left", start=3, stop=11),
        lambda b, h, i, j: not 3 <= j < 11 - _PART[b],
        runs=2,
    ),
    Sample(
        "key_padding, of the first keys",
        (_PART,),
        lambda lengths: a.key_padding(lengths, side="left", stop=11),
        lambda b, h, i, j: j >= 11 - _PART[b],
    ),
    Sample(
        "key_padding, of the last keys",
        (_PART,),
        lambda lengths: a.key_padding(lengths, start=5),
        lambda b, h, i, j: j < 5 + _PART[b],
    ),
    Sample("keys", (_VALID[0],), lambda valid: a.keys(valid, 3), lambda b, h, i, j: _VALID[0, j], runs=3),
    Sample(
        "keys, per batch row",
        (_VALID,),
        lambda valid: a.keys(valid, 4),
        lambda b, h, i, j: _VALID[b, j],
        runs=4,
    ),
    Sample("cache", (_LENGTHS,), a.cache, lambda b, h, i, j: j < _LENGTHS[b]),
    Sample(
        "causal cache",
        (_LENGTHS,),
        lambda lengths: a.causal() & a.cache(lengths),
        lambda b, h, i, j: j <= i and j < _LENGTHS[b],
    ),
    Sample("global_keys", (), lambda: a.global_keys(4), lambda b, h, i, j: j < 4),
    Sample(
        "causal documents",
        (_CU,),
        lambda cu: a.causal() & a.documents(cu),
        lambda b, h, i, j: j <= i and _same_document(_CU, i, j),
    ),
    Sample(
        "prefix-LM",
        (_LENGTHS,),
        lambda n: a.causal() | a.prefix(n),
        lambda b, h, i, j: j <= i or j < _LENGTHS[b],
    ),
    Sample(
        "prefix-LM in documents",
        (_PREFIXES, _CU),
        lambda n, cu: (a.causal() | a.prefix(n, cu)) & a.documents(cu),
        lambda b, h, i, j: (
            (j <= i and _same_document(_CU, i, j)) or _prefix_of_document(_PREFIXES, _CU, i, j)
        ),
    ),
    Sample(
        "images in text",
        (_GROUPS, _BLOCKS),
        lambda groups, ids: (a.causal() | a.groups(groups)) & a.segments(ids),
        lambda b, h, i, j: (j <= i or (_same(_GROUPS, i, j) and _GROUPS[i] >= 0)) and _same(_BLOCKS, i, j),
    ),
    Sample(
        "images in padded text",
        (_GROUPS, _LENGTHS),
        lambda groups, n: (a.causal() | a.groups(groups)) & a.key_padding(n),
        lambda b, h, i, j: (j <= i or (_same(_GROUPS, i, j) and _GROUPS[i] >= 0)) and j < _LENGTHS[b],
    ),
    Sample(
        "window and sinks",
        (),
        lambda: a.causal() & (a.window(3) | a.global_keys(2)),
        lambda b, h, i, j: j <= i and (j >= i - 3 or j < 2),
        runs=2,
    ),
    Sample(
        "shared prefix",
        (_BLOCKS,),
        lambda ids: a.causal() & (a.segments(ids) | a.prefix(5)),
        lambda b, h, i, j: j <= i and (_same(_BLOCKS, i, j) or j < 5),
        runs=2,
    ),
    Sample(
        "window and two prefixes",
        (),
        lambda: a.window(1) | a.prefix(2) | a.global_keys(3),
        lambda b, h, i, j: i - 1 <= j <= i or j < 3,
        runs=2,
    ),
    Sample(
        "window and scattered segments",
        (_SCATTERED,),
        lambda ids: a.window(1) | a.segments(ids, max_runs=3),
        lambda b, h, i, j: i - 1 <= j <= i or _same(_SCATTERED, i, j),
        runs=4,
    ),
    Sample(
        "two unions",
        (_BLOCKS, _SCATTERED),
        lambda ids, scattered: (
            a.segments(scattered, max_runs=3) & (a.segments(ids) | a.window(4) | a.prefix(3))
        ),
        lambda b, h, i, j: _same(_SCATTERED, i, j) and (_same(_BLOCKS, i, j) or i - 4 <= j <= i or j < 3),
        runs=4,
    ),
]
IDS = [sample.name for sample in SAMPLES]
