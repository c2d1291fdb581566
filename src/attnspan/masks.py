"""What a query may see: masks as immutable expressions, composed with `&` and `|`, lowered to spans.

An argument described as an array may come from NumPy, torch or JAX; lists of integers become NumPy arrays.
Where values can be read at no cost (on the host, not under a tracer) broken promises raise; elsewhere their
rows become illegal spans, which kernels report. Key-side arrays always describe the whole, global key
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _arguments as checked
from ._encoding import SpansLargerThanMask
from ._expression import And, Mask, Or, Prepared
from ._given import from_block_mask, from_dense, from_predicate
from ._leaves import Cache, Causal, Documents, Full, GlobalKeys, Groups, KeyPadding, Prefix, Segments, Window
from ._parse import parse_with
from ._pytrees import register
from ._tables import Blocks, Dense, Explicit, Keys, Predicate
from .arrays import Array
from .errors import OptionError, ShapeError, shown
from .spans import Spans

__all__ = [
    "Mask",
    "Prepared",
    "SpansLargerThanMask",
    "cache",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_predicate",
    "full",
    "global_keys",
    "groups",
    "key_padding",
    "keys",
    "names",
    "parse",
    "prefix",
    "register_pytrees",
    "segments",
    "spans",
    "window",
]


def full() -> Mask:
    """Every query sees every key.

    Example:
        >>> full().spans(1, 3).bounds.tolist()
        [[[[[0, 3]]]]]
    """
    return Full()


def causal() -> Mask:
    """Query i sees key j iff j <= i, in global indices.

    Example:
        >>> causal().spans(2, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 3]]
    """
    return Causal()


def window(left: int | None, right: int | None = 0) -> Mask:
    """Hugging Face's sliding_window=W is window(W - 1); flash-attn's (l, r) is window(l, r), None for -1.

    Query i sees key j iff i - left <= j <= i + right, in global indices.

    Args:
        left: keys before the query that it sees; None for all.
        right: keys after it; None for all.

    Raises:
        OptionError: for a negative width or one beyond int32.

    Example:
        >>> window(1).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [1, 3]]
    """
    sides = [
        None if x is None else checked.count(f"window: {name}", x)
        for name, x in (("left", left), ("right", right))
    ]
    return Window(*sides)


def segments(
    q_ids: Array, kv_ids: Array | None = None, padding_id: int | None = None, max_runs: int = 1
) -> Mask:
    """A query sees the keys with its own segment id.

    Ids need not be sorted, but the keys of each id form at most `max_runs` contiguous runs, and R = max_runs.
    An id in more runs than that makes the rows of that id illegal: never a plausible wrong mask.

    Args:
        q_ids: integer (S,) or (B, S). Alone, it describes the keys, and query i has the id at its global
            index.
        kv_ids: integer (S,) or (B, S), the ids of the keys; then `q_ids` is (q_len,) or (B, q_len), per row
            as it comes.
        padding_id: rows with this id see nothing, and so nothing sees keys with it.
        max_runs: at least 1, static.

    Raises:
        DtypeError, ShapeError, OptionError: for ids that are not integers, of a wrong rank, or max_runs < 1.

    Example:
        >>> segments([7, 7, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """
    q_ids = checked.integers("segments: q_ids", q_ids, (1, 2))
    kv_ids = None if kv_ids is None else checked.integers("segments: kv_ids", kv_ids, (1, 2))
    padding_id = None if padding_id is None else checked.number("segments: padding_id", padding_id)
    return Segments(q_ids, kv_ids, padding_id, checked.count("segments: max_runs", max_runs, least=1))


def documents(cu_seqlens_q: Array, cu_seqlens_k: Array | None = None) -> Mask:
    """Documents packed one after the other: a query sees the keys of its document.

    Rows and keys at or beyond the last offset are padding: they see nothing and are seen by none.

    Args:
        cu_seqlens_q: integer (n + 1,) or (B, n + 1), ascending from 0: where each document starts, and where
            the last one ends. Alone, it describes the keys, and query i is in the document of its global
            index.
        cu_seqlens_k: the same for the keys; then `cu_seqlens_q` describes the rows as they come, and the
            default `q_index` aligns the last row of each document with its last key.

    Raises:
        DtypeError, ShapeError, OptionError: for offsets that are not integers, of a wrong rank, or not
            ascending.

    Example:
        >>> documents([0, 2, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """
    cu_q = checked.offsets("documents: cu_seqlens_q", cu_seqlens_q)
    cu_k = None if cu_seqlens_k is None else checked.offsets("documents: cu_seqlens_k", cu_seqlens_k)
    if cu_k is not None and cu_q.shape[-1] != cu_k.shape[-1]:
        raise ShapeError(
            "documents",
            expected=f"as many documents for keys as for queries, {cu_q.shape[-1] - 1}",
            got=shown(cu_k.shape[-1] - 1),
            remedy="Give a document without queries or keys an empty range",
        )
    return Documents(cu_q, cu_k)


def prefix(lengths: int | Array, cu_seqlens: Array | None = None) -> Mask:
    """Every query sees the first keys: `causal() | prefix(n)` is the prefix-LM mask.

    Args:
        lengths: int or integer (B,), keys of each batch row; with `cu_seqlens`, int or (n,) or (B, n), of
            each document. More than there are keys means all of them.
        cu_seqlens: integer (n + 1,) or (B, n + 1), as for `documents`: a query sees the first keys of its
            document. Pass the very array that `documents` gets: then `(causal() | prefix(n, cu)) &
            documents(cu)` has R = 1, else 2.

    Raises:
        DtypeError, ShapeError, OptionError: for lengths that are not integers, of a wrong rank, or negative.

    Example:
        >>> (causal() | prefix(2)).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """
    if cu_seqlens is None:
        return Prefix(checked.lengths_of("prefix: lengths", lengths, (0, 1)), None)
    offsets = checked.offsets("prefix: cu_seqlens", cu_seqlens)
    table = checked.lengths_of("prefix: lengths", lengths, (1, 2))
    if not isinstance(table, int) and table.shape[-1] != offsets.shape[-1] - 1:
        raise ShapeError(
            "prefix: lengths",
            expected=f"one length per document, {offsets.shape[-1] - 1}",
            got=shown(table.shape[-1]),
            remedy="Pass an int for one length that all documents share",
        )
    return Prefix(table, offsets)


def groups(ids: Array) -> Mask:
    """Tokens of a group see each other both ways: `causal() | groups(ids)` for image tokens within text.

    Args:
        ids: integer (S,) or (B, S), of the keys; negative: in no group, such rows see nothing. The keys of a
            group are contiguous; rows of one that is not are illegal.

    Raises:
        DtypeError, ShapeError: for ids that are not integers or of a wrong rank.

    Example:
        >>> (causal() | groups([-1, 4, 4])).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 3], [0, 3]]
    """
    return Groups(checked.integers("groups: ids", ids, (1, 2)))


def key_padding(lengths: int | Array, side: str = "right", start: int = 0, stop: int | None = None) -> Mask:
    """Only the valid keys of each batch row are seen.

    With `start` or `stop`, the padding is in a part of the keys, as where padded text stands next to image
    tokens; the other keys are seen by all rows.

    Args:
        lengths: int or integer (B,), number of valid keys, at most k_len, or as many as the part has.
        side: where the padding is: "right" (valid keys come first) or "left".
        start: first key of the part that may be padded.
        stop: the key after its last; None for k_len.

    Returns:
        A mask with R = 1, or 2 where valid keys stand on both sides of the padding.

    Raises:
        DtypeError, ShapeError, OptionError: for lengths that are not integers, of a wrong rank or negative,
            an unknown side, or a part that the keys do not have.

    Example:
        >>> key_padding(2, side="left").spans(1, 3).bounds.tolist()
        [[[[[1, 3]]]]]
        >>> key_padding(2, stop=4).spans(1, 7).bounds.tolist()  # 4 text tokens, 2 of them real, then an image
        [[[[[0, 2], [4, 7]]]]]
    """
    if side not in ("right", "left"):
        raise OptionError(
            "key_padding: side",
            expected='"right" or "left"',
            got=repr(side),
            remedy="Name the side the padding is on",
        )
    start = checked.count("key_padding: start", start)
    stop = None if stop is None else checked.count("key_padding: stop", stop, least=start)
    return KeyPadding(checked.lengths_of("key_padding: lengths", lengths, (0, 1)), side, start, stop)


def keys(valid: Array, max_runs: int | None = None) -> Mask:
    """Only the marked keys of each batch row are seen, wherever they stand.

    Args:
        valid: bool (k_len,) or (B, k_len); True: may be seen. An `attention_mask` of Hugging Face is `!= 0`.
        max_runs: R, the most runs of marked keys that a row has, at least 1. None: as many as the data have;
            8 in a traced program, where R cannot follow from data. A row with more raises when values can be
            read, and is illegal elsewhere.

    Raises:
        DtypeError, ShapeError, OptionError: for an array that is not bool or of a wrong rank, or
            max_runs < 1.

    Example:
        >>> import numpy as np
        >>> keys(np.array([True, False, True, True])).spans(1, 4).bounds.tolist()
        [[[[[0, 1], [2, 4]]]]]
    """
    checked.booleans("keys", valid)
    checked.rank("keys", valid, (1, 2))
    return Keys(valid, checked.runs("keys: max_runs", max_runs))


def cache(lengths: int | Array) -> Mask:
    """A key-value cache with room to spare: the first keys are valid, and the queries are the last of those.

    The default `q_index` of an expression with `cache` is the last q_len valid indices of each batch row, so
    that `causal() & cache(lengths)` decodes and prefills in chunks.

    Args:
        lengths: int or integer (B,), number of valid keys including those of the queries, at most k_len.

    Raises:
        DtypeError, ShapeError, OptionError: for lengths that are not integers, of a wrong rank, or negative.

    Example:
        >>> (causal() & cache([2, 4])).spans(2, 5, batch=2).bounds[:, 0, :, 0].tolist()
        [[[0, 1], [0, 2]], [[0, 3], [0, 4]]]
    """
    return Cache(checked.lengths_of("cache: lengths", lengths, (0, 1)))


def global_keys(n: int) -> Mask:
    """Every query sees the first n keys: sinks, as `causal() & (window(w) | global_keys(4))`.

    Args:
        n: number of keys; more than there are means all of them.

    Raises:
        OptionError: for a negative number.

    Example:
        >>> (causal() & (window(0) | global_keys(1))).spans(3, 3).bounds[0, 0, 2].tolist()
        [[0, 1], [2, 3]]
    """
    return GlobalKeys(checked.count("global_keys", n))


def spans(bounds: Array) -> Mask:
    """A mask given by its spans.

    Args:
        bounds: integer (B|1, H|1, q_len, R, 2), rows as they come, keys the global ones; see
            `attnspan.Spans`.

    Raises:
        DtypeError, ShapeError: for bounds that are not integers or of a wrong rank.

    Example:
        >>> import numpy as np
        >>> bounds = np.array([[0, 1], [0, 2]]).reshape(1, 1, 2, 1, 2)
        >>> spans(bounds).spans(2, 2).dense()[0, 0].tolist()
        [[True, False], [True, True]]
    """
    if isinstance(bounds, Spans):
        return Prepared(bounds, bare=True)
    return Explicit(Spans(bounds, 0).bounds)


_BY_NAME: dict[str, Callable[..., Mask]] = {
    "full": full,
    "causal": causal,
    "window": window,
    "segments": segments,
    "documents": documents,
    "prefix": prefix,
    "groups": groups,
    "key_padding": key_padding,
    "keys": keys,
    "cache": cache,
    "global_keys": global_keys,
    "spans": spans,
    "from_dense": from_dense,
}


def names() -> dict[str, Callable[..., Any]]:
    """What text may name: the masks of this module and those of `attnspan.library`.

    Example:
        >>> names()["window"](2)
        window(2)
    """
    from . import library  # It stands above this module, and is looked up when it is asked for.

    others = {name: getattr(library, name) for name in library.__all__ if name != "register_pytrees"}
    return {**_BY_NAME, **others}


def parse(text: str) -> Mask:
    """Read a mask from text, as the command line gives it. Nothing is evaluated but the masks by name.

    Args:
        text: functions of this module and of `attnspan.library`, called with numbers, strings, None, masks,
            or lists of those (lists of numbers are arrays), composed with `&`, `|` and parentheses; a mask
            without arguments may leave its parentheses out.

    Raises:
        OptionError: naming the part that is not understood.

    Example:
        >>> parse("causal & (window(128) | global_keys(4))")
        causal() & (window(128) | global_keys(4))
    """
    return parse_with(text, names())


def register_pytrees(registrar: Callable[[type, Callable[..., Any], Callable[..., Any]], None]) -> None:
    """Register all masks, and `Spans`, as pytrees: arrays and sub-masks are children, the rest is static.

    Args:
        registrar: called as registrar(cls, flatten, unflatten) for each class, with flatten(x) -> (children,
            context) and unflatten(children, context) -> x; the context is hashable.

    Example:
        >>> seen = {}
        >>> register_pytrees(lambda cls, flatten, unflatten: seen.update({cls.__name__: flatten}))
        >>> children, context = seen["GlobalKeys"](global_keys(4))
        >>> children
        ()
    """
    register(registrar, Spans)
    for cls in (And, Or, Prepared, Explicit, Dense, Keys, Predicate, Blocks):
        register(registrar, cls)
    for leaf in (Cache, Causal, Documents, Full, GlobalKeys, Groups, KeyPadding, Prefix, Segments, Window):
        register(registrar, leaf)
