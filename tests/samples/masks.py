"""One sample or more of each mask whose rows are known by global index, with its definition pair by pair."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import functools
import operator
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


def _joined(name: str, sign: str, *parts: Sample, runs: int = 1) -> Sample:
    """Masks that are combined, and so their definitions; an array that they share stays one."""
    arrays = list({id(x): x for part in parts for x in part.arrays}.values())
    order = {id(x): n for n, x in enumerate(arrays)}
    join, test = (operator.and_, all) if sign == "&" else (operator.or_, any)

    def build(*given: Any) -> a.Mask:
        return functools.reduce(join, [x.build(*(given[order[id(y)]] for y in x.arrays)) for x in parts])

    return Sample(name, tuple(arrays), build, lambda *at: test(x.sees(*at) for x in parts), runs)


def _segments(name: str, ids: np.ndarray, runs: int = 1, padding: int | None = None) -> Sample:
    def sees(b: int, h: int, i: int, j: int) -> bool:
        own = ids if ids.ndim == 1 else ids[b]
        return i >= 0 and own[i] == own[j] and own[j] != padding

    return Sample(name, (ids,), lambda x: a.segments(x, padding_id=padding, max_runs=runs), sees, runs)


def _padding(name: str, sees: Callable[..., Any], runs: int = 1, **options: Any) -> Sample:
    return Sample(f"key_padding{name}", (_PART,), lambda n: a.key_padding(n, **options), sees, runs)


CAUSAL = Sample("causal", (), a.causal, lambda b, h, i, j: j <= i)
WINDOW = Sample("window", (), lambda: a.window(3), lambda b, h, i, j: i - 3 <= j <= i)
FIRST = Sample("global_keys", (), lambda: a.global_keys(4), lambda b, h, i, j: j < 4)
PREFIX = Sample("prefix, int", (), lambda: a.prefix(7), lambda b, h, i, j: j < 7)
PREFIXES = Sample("prefix, per batch row", (_LENGTHS,), a.prefix, lambda b, h, i, j: j < _LENGTHS[b])
PADDING = Sample("key_padding", (_LENGTHS,), a.key_padding, lambda b, h, i, j: j < _LENGTHS[b])
CACHE = Sample("cache", (_LENGTHS,), a.cache, lambda b, h, i, j: j < _LENGTHS[b])
BLOCKS, SCATTERED = _segments("segments", _BLOCKS), _segments("segments, three runs", _SCATTERED, 3)
GROUPS = Sample(
    "groups", (_GROUPS,), a.groups, lambda b, h, i, j: i >= 0 and _GROUPS[i] == _GROUPS[j] and _GROUPS[i] >= 0
)
DOCUMENTS = Sample("documents", (_CU,), a.documents, lambda b, h, i, j: _same_document(_CU, i, j))
PREFIX_OF_DOCUMENT = Sample(
    "prefix, per document",
    (_PREFIXES, _CU),
    a.prefix,
    lambda b, h, i, j: _prefix_of_document(_PREFIXES, _CU, i, j),
)

SAMPLES = [
    Sample("full", (), a.full, lambda b, h, i, j: True),
    CAUSAL,
    WINDOW,
    Sample("window, both sides", (), lambda: a.window(2, 4), lambda b, h, i, j: i - 2 <= j <= i + 4),
    Sample("window, all before", (), lambda: a.window(None, 1), lambda b, h, i, j: j <= i + 1),
    Sample("window, all after", (), lambda: a.window(0, None), lambda b, h, i, j: j >= i),
    Sample("window, huge", (), lambda: a.window(2**31 - 1, 2**31 - 1), lambda b, h, i, j: True),
    BLOCKS,
    _segments("segments, int16", _BLOCKS.astype(np.int16)),
    _segments("segments, per batch row", _TWO_ROWS),
    _segments("segments, padding", _BLOCKS, padding=4),
    _segments("segments, padding in many runs", _SCATTERED, 2, padding=0),
    SCATTERED,
    DOCUMENTS,
    Sample(
        "documents, per batch row",
        (_CU_TWO_ROWS,),
        a.documents,
        lambda b, h, i, j: _same_document(_CU_TWO_ROWS[b], i, j),
    ),
    PREFIX,
    Sample("prefix, beyond the keys", (), lambda: a.prefix(KEYS + 5), lambda b, h, i, j: True),
    PREFIXES,
    PREFIX_OF_DOCUMENT,
    Sample(
        "prefix, one for all documents",
        (_CU,),
        lambda cu: a.prefix(2, cu),
        lambda b, h, i, j: _prefix_of_document(np.full(4, 2), _CU, i, j),
    ),
    GROUPS,
    PADDING,
    Sample("key_padding, int", (), lambda: a.key_padding(8), lambda b, h, i, j: j < 8),
    Sample(
        "key_padding, left",
        (_LENGTHS,),
        lambda lengths: a.key_padding(lengths, side="left"),
        lambda b, h, i, j: j >= KEYS - _LENGTHS[b],
    ),
    _padding(", of a part", lambda b, h, i, j: not 3 + _PART[b] <= j < 11, 2, start=3, stop=11),
    _padding(
        ", before the end of a part",
        lambda b, h, i, j: not 3 <= j < 11 - _PART[b],
        2,
        side="left",
        start=3,
        stop=11,
    ),
    _padding(", of the first keys", lambda b, h, i, j: j >= 11 - _PART[b], side="left", stop=11),
    _padding(", of the last keys", lambda b, h, i, j: j < 5 + _PART[b], start=5),
    Sample("keys", (_VALID[0],), lambda valid: a.keys(valid, 3), lambda b, h, i, j: _VALID[0, j], runs=3),
    Sample(
        "keys, per batch row", (_VALID,), lambda valid: a.keys(valid, 4), lambda b, h, i, j: _VALID[b, j], 4
    ),
    CACHE,
    _joined("causal cache", "&", CAUSAL, CACHE),
    FIRST,
    _joined("causal documents", "&", CAUSAL, DOCUMENTS),
    _joined("prefix-LM", "|", CAUSAL, PREFIXES),
    _joined("prefix-LM in documents", "&", _joined("", "|", CAUSAL, PREFIX_OF_DOCUMENT), DOCUMENTS),
    _joined("images in text", "&", _joined("", "|", CAUSAL, GROUPS), BLOCKS),
    _joined("images in padded text", "&", _joined("", "|", CAUSAL, GROUPS), PADDING),
    _joined("window and sinks", "&", CAUSAL, _joined("", "|", WINDOW, FIRST), runs=2),
    _joined("shared prefix", "&", CAUSAL, _joined("", "|", BLOCKS, PREFIX), runs=2),
    _joined("window and two prefixes", "|", WINDOW, PREFIX, FIRST, runs=2),
    _joined("window and scattered segments", "|", WINDOW, SCATTERED, runs=4),
    _joined("two unions", "&", SCATTERED, _joined("", "|", BLOCKS, WINDOW, PREFIX), runs=4),
]
IDS = [sample.name for sample in SAMPLES]
