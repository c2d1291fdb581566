"""Mask expressions: the base class of masks, the operators `&` and `|`, and lowered masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, NoReturn

import numpy as np

from attnspan.base.arrays import Array, arrays_for, frozen, outside_inference_mode, own
from attnspan.base.mistakes import refuse_operand, refuse_operator, refuse_truth, refuse_use_as_array
from attnspan.base.pytrees import Node, arrays_in
from attnspan.base.recorded import without_tracer_warnings
from attnspan.errors import OptionError, ShapeError, UsageError, expect

from .answers import forget_answers_of_others
from .bands import Band
from .bounds import Spans
from .intervals import FULL, Interval, Rows, clip_rows, either_illegal, merge_known
from .lowering import Lowering, begin

# Types of fields that `static_key` can contain.
_STATIC = (bool, int, float, str, type(None))
# Members that describe the lowering of a class. A subclass that changes the lowering does not inherit them.
_ANSWERS = ("band", "static_key", "_in_numbers", "may_separate", "_separates", "_first_keys", "array_dims")


# A chain of equal operators is one level. Lowering takes three of Python's 1,000 frames for each level.
_MOST_LEVELS = 200


class Mask(Node):
    """An immutable description of the keys that each query may see, composed with `&` and `|`.

    The masks are in `attnspan.masks` and `attnspan.library`. Your own subclass becomes a frozen dataclass
    (without the decorator) and a pytree. It checks its fields in `__post_init__`. Its `_lower` returns the
    key intervals of the queries.

    Example:
        >>> from attnspan import causal, window
        >>> causal() & window(128)
        causal() & window(128)
    """

    # Whether it may keep packed documents apart. A mask without documents or ids says False.
    _separates: ClassVar[bool] = True
    # Whether its fields are only numbers and other masks, which then define the mask completely.
    _in_numbers: ClassVar[bool] = False
    # Number of dims of its arrays without the batch dim. None if the arrays cannot be split by batch element.
    array_dims: ClassVar[int | None] = None
    # Levels of nested masks in it, where it knows them. It is no field.
    _depth: ClassVar[int] = 0
    # Whether operands of its own class are merged into it.
    _is_flat: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        forget_answers_of_others(cls, Mask, _ANSWERS)

    def may_separate(self) -> bool:
        """Whether the mask may keep packed documents apart."""
        return self._separates

    def static_key(self) -> tuple[Any, ...] | None:
        """A hashable key that is equal for masks that mean the same, or None for a mask with arrays."""
        if not self._in_numbers:
            return None
        parts: list[Any] = [type(self)]
        names: tuple[str, ...] = self.__match_args__  # Dynamo of torch 2.11 cannot trace vars(self).values()
        for name in names:
            value = getattr(self, name)
            several = type(value) is tuple
            for part in value if several else (value,):
                key = part.static_key() if isinstance(part, Mask) else (type(part), part)
                if key is None or (not isinstance(part, Mask) and type(part) not in _STATIC):
                    return None
                parts.append(key)
            if several:
                parts.append((tuple, len(value)))
        return tuple(parts)

    def _nest(self, masks: Sequence[Mask]) -> None:
        """Store how deep masks are nested in it. Python's recursion limit bounds the number of levels."""
        # Operands of its own class are merged, so they add no level.
        depth = max([mask._depth + (type(mask) is not type(self) or not mask._is_flat) for mask in masks])
        expected, remedy = "at most {} levels of masks", "Prepare an inner part first, by prepare(...)"
        expect(depth <= _MOST_LEVELS, type(self).__name__, expected, depth, remedy, _MOST_LEVELS)
        self._set(_depth=depth)

    def __and__(self, other: Mask) -> Mask:
        return And(_one_order(self, other)) if isinstance(other, Mask) else refuse_operand("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _either(self, other) if isinstance(other, Mask) else refuse_operand("|", self, other)

    # Python calls these if the left operand is no mask.
    def __rand__(self, other: object) -> NoReturn:
        refuse_operand("&", self, other)

    def __ror__(self, other: object) -> NoReturn:
        refuse_operand("|", self, other)

    def __bool__(self) -> NoReturn:
        refuse_truth(self)

    @property
    def ndim(self) -> NoReturn:
        refuse_use_as_array(self)

    def _no_operator(self, *_: object) -> NoReturn:
        refuse_operator(self)

    __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __xor__ = _no_operator

    def spans(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        heads: int = 1,
        q_index: Array | None = None,
        k_index: Array | None = None,
        like: Any = None,
    ) -> Prepared:
        """Lower the mask for given sizes. It also works inside a traced program, and does not synchronize.

        Args:
            q_len: Number of queries.
            k_len: Number of keys.
            batch, heads: Sizes that arrays of the mask must fit. An axis stays 1 if the mask does not vary
                along it. Default: 1, or for `batch` the batch size of a `like` with four axes.
            q_index: integer (q_len,) or (batch, q_len), the global indices of the queries. Default: the last
                q_len indices of the keys (bottom-right alignment), except for masks with another default,
                such as `cache` and `documents`.
            k_index: integer (k_len,), strictly ascending, the global indices of the keys of the call.
                Default: 0..k_len-1. Arrays of the mask that belong to keys always describe the whole, global
                sequence.
            like: An array such as q. The mask is lowered in its framework and on its device, even if the
                mask has NumPy arrays. Default: the framework of the mask's arrays, or NumPy.

        Returns:
            A lowered mask. It keeps the global indices of its queries and keys, which position biases and
            dropout read. R depends on the expression, not on data. Outside traced programs, `from_dense`,
            `keys`, `from_predicate` and `from_block_mask` without `max_runs` take R from the data.

        Raises:
            ShapeError: If arrays of the mask do not fit the sizes.
            OptionError: If two masks have different default `q_index`, or if data are wrong and can be read.
            DeviceError: If the arrays are of two frameworks or on two devices.

        Example:
            >>> from attnspan import causal, window
            >>> (causal() & window(1)).spans(2, 4).bounds[0, 0, :, 0].tolist()
            [[1, 3], [2, 4]]
        """
        if batch is None:
            batch = like.shape[0] if len(getattr(like, "shape", ())) == 4 else 1
        return self._spans(q_len, k_len, batch, heads, q_index, k_index, like)

    def _spans(
        self, q_len: int, k_len: int, batch: int, heads: int, q_index: Any, k_index: Any, like: Any
    ) -> Prepared:
        with outside_inference_mode(), without_tracer_warnings():
            arrays = arrays_for([*arrays_in(self), q_index, k_index], like)
            low = begin(arrays, self.leaves(), q_len, k_len, batch, heads, q_index, k_index)
            spans = Spans(low.bounds(self), low.top)
            rows_at = None if low.counted_back else _apart(low.q_index[:, 0])
            if k_index is None:
                return _known_as(self.band() if q_index is None else None, Prepared(spans, rows_at))
            k_index = _apart(arrays.asarray(k_index, "int32"))
            return Prepared(spans.take_keys(k_index), rows_at, k_index[None])

    def prepare(self, q_len: int, k_len: int, **options: Any) -> Prepared:
        """Lower the mask once, with the smallest R that its data need, to share it among all layers.

        Call it outside the model, once for each batch, for example in a data loader. It checks the data on
        every device, so it synchronizes with the device.

        In eager mode, attention caches the lowered form of a mask. Compiled code lowers an unprepared mask
        in every layer. So does eager code with `from_predicate`, in O(q_len * k_len). If R changes between
        batches, a compiled function recompiles: use `spans` then.

        Args:
            q_len, k_len, **options: As for `spans`.

        Returns:
            The lowered mask, with canonical, contiguous bounds. NumPy arrays are read-only.

        Raises:
            OptionError: If data are wrong, naming the first illegal query. Also the errors of `spans`.

        Example:
            >>> from attnspan import causal
            >>> causal().prepare(3, 3)
            Prepared(B=1, H=1, q_len=3, k_len=3, R=1)
        """
        found = self.spans(q_len, k_len, **options)
        found.lowered._require_values("prepare", of="mask")
        with outside_inference_mode():
            exact = found.lowered.compact().validate()
            # Layers share the mask, and a write would change it for all of them.
            spans = Spans(frozen(exact.bounds), exact.k_len)
            mask = Prepared(spans, frozen(found.q_index), frozen(found.k_index), found.bare)
            return _known_as(found.band(), mask)

    def show(self, q_len: int = 64, k_len: int | None = None, **options: Any) -> None:
        """Print a picture of the mask. The options are those that `attnspan.masks.picture.show` takes."""
        from .picture import show

        show(self, q_len, q_len if k_len is None else k_len, **options)

    def _repr_svg_(self) -> str | None:
        from .picture import svg_of_mask

        return svg_of_mask(self)

    # Members that a class of masks overrides. Sizes may be symbolic while a compiler reads this code, and
    # int() would fix them to one value.

    def band(self) -> Band | None:
        """The mask as a band, for kernels of other libraries, or None if it is no band."""
        return None

    def _first_keys(self) -> int | None:
        """n of a mask that shows every query the first n keys and no others, or None."""
        return None

    def _lower(self, low: Lowering) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} must define _lower")

    def leaves(self) -> list[Mask]:
        """The masks that it combines, or only itself."""
        return [self]

    def _key_len(self) -> Any:
        """Length of the global key sequence, if an array of the mask defines it."""
        return None

    def _key_len_is_data(self) -> bool:
        """Whether a traced program must not read that length."""
        return False

    def _row_len(self) -> Any:
        """Number of queries, if an array of the mask has one entry for each."""
        return None

    def _anchor(self) -> tuple[Any, ...] | None:
        """Objects that define the default `q_index`, compared by identity. None means the usual default."""
        return None

    def _anchor_index(self, low: Lowering) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define _anchor_index")


def leaves_of(masks: Sequence[Mask]) -> list[Mask]:
    """The leaves of masks, in order."""
    leaves: list[Mask] = []
    for mask in masks:
        leaves += mask.leaves()
    return leaves


class RowNumbered(Mask):
    """A mask whose queries are counted from 0, independent of the keys: cross attention, or a `BlockMask`."""

    def _anchor(self) -> tuple[Any, ...] | None:
        return ("row numbers",)

    def _anchor_index(self, low: Lowering) -> Array:
        return low.arrays.arange(low.q_len)[None, None]


class Combined(Mask):
    """Masks joined by an operator."""

    _in_numbers = True
    _is_flat = True

    operands: tuple[Mask, ...]

    def __post_init__(self) -> None:
        # Operands are merged into one level, so that masks joined in a loop are not nested.
        flat: list[Mask] = []
        for operand in self.operands:
            flat += operand.operands if type(operand) is type(self) else [operand]  # type: ignore[attr-defined]
        self._nest(self.operands)
        self._set(operands=tuple(flat))

    def leaves(self) -> list[Mask]:
        return leaves_of(self.operands)


class And(Combined):
    """The keys that every operand shows."""

    def may_separate(self) -> bool:
        return any(operand.may_separate() for operand in self.operands)

    def band(self) -> Band | None:
        band: Band | None = Band()
        for operand in self.operands:
            other = operand.band()
            band = None if band is None or other is None else band & other
        # A prepared mask may have other queries than the documents. Only the lowering checks that.
        fixed = any(isinstance(operand, Prepared) for operand in self.operands)
        return None if fixed and band is not None and band.cu_k is not None else band

    def _lower(self, low: Lowering) -> Rows:
        clip: Rows | None = None
        wide = []
        for operand in self.operands:
            rows = low.lower(operand)
            if len(rows.intervals) > 1:
                wide.append((operand, rows))
            else:
                clip = rows if clip is None else clip_rows(low.arrays, rows, clip)
        clip = Rows((FULL,)) if clip is None else clip
        if not wide:
            return clip
        # Single intervals clip the operands of each `|` first, because many unions are then known to be one
        # interval.
        lowered = [
            operand._lower_within(low, clip) if type(operand) is Or else clip_rows(low.arrays, rows, clip)
            for operand, rows in wide
        ]
        return reduce(low.intersection, lowered)

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Or) else repr(x) for x in self.operands)


class Or(Combined):
    """The keys that any operand shows."""

    def may_separate(self) -> bool:
        return all(operand.may_separate() for operand in self.operands)

    def _lower(self, low: Lowering) -> Rows:
        return self._lower_within(low, Rows((FULL,)))

    def _lower_within(self, low: Lowering, clip: Rows) -> Rows:
        """Lower the union intersected with `clip`, which has one interval for each query."""
        pool: list[Interval] = []
        illegal = None
        for operand in self.operands:
            rows = clip_rows(low.arrays, low.lower(operand), clip)
            pool.extend(rows.intervals)
            illegal = either_illegal(illegal, rows.illegal)
        return low.union(merge_known(low.arrays, pool), illegal)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.operands))


class Prepared(Mask):
    """A lowered mask for given sizes, made by `Mask.prepare` or `Mask.spans`.

    You can use it wherever a mask is expected. It has the attributes and methods of `Spans`. Its `spans`
    checks the sizes, restricts the mask to a `k_index`, and raises for a `q_index`, because its queries are
    fixed. In an expression, its query indices are also the default indices of the other operands.

    Attributes:
        lowered: The spans, over the keys of the call.
        q_index: int32 (B|1, q_len), the global indices of the queries. None means the last keys.
        k_index: int32 (1, k_len), the global indices of the keys. None means 0..k_len-1.
        bare: Whether the mask was made from spans without query indices. It then fits any queries.

    Raises:
        ShapeError: If it is used with other sizes.
        OptionError: If an expression or a `q_index` assigns other indices to its queries.

    Example:
        >>> from attnspan import causal
        >>> causal().prepare(3, 3).spans(3, 3)
        Prepared(B=1, H=1, q_len=3, k_len=3, R=1)
    """

    lowered: Spans
    q_index: Array | None = None
    k_index: Array | None = None
    bare: bool = False

    # The band that it was lowered from, if any. No field, so that all lowered masks have one tree structure.
    _of: ClassVar[Band | None] = None
    # Number of first tokens that a rolling cache keeps and shows to all later tokens. No field either.
    _kept: ClassVar[int | None] = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        del keywords
        expected, got = "a subclass of Mask", "a subclass of Prepared, whose spans are read past its methods"
        remedy = "Write a Mask that holds the lowered mask, and lower it in _lower"
        raise UsageError(f"class {cls.__name__}", expected=expected, got=got, remedy=remedy)

    def band(self) -> Band | None:
        return self._of

    def __getattr__(self, name: str) -> Any:
        # A lowered mask has the members of `Spans`: `mask.spans(4, 4).dense()`.
        if name == "ndim":  # reached if the property has raised
            refuse_use_as_array(self)
        if name.startswith("__") or name == "lowered":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.lowered, name)

    def _spans(
        self, q_len: int, k_len: int, batch: int, heads: int, q_index: Any, k_index: Any, like: Any
    ) -> Prepared:
        # The mask itself, or with `k_index` restricted to these keys.
        what, expected = "q_index", "None with a prepared mask, whose queries are known"
        remedy = "Pass q_index to prepare(), or select queries with mask.lowered.take_queries(...)"
        expect(q_index is None, what, expected, "indices of queries", remedy)
        if k_index is None:
            self._check_fit(self.lowered.k_len, q_len, k_len, batch, heads)
            return self
        arrays, q_index = arrays_for([self.lowered.bounds]), self.q_index
        if q_index is None:  # counted back from all keys, before `k_index` selects some
            q_index = (arrays.arange(q_len) + (self.lowered.k_len - q_len))[None]
        found = super()._spans(q_len, k_len, batch, heads, q_index, k_index, like)
        own = found.k_index if self.k_index is None else arrays.take_along(self.k_index, found.k_index)
        return Prepared(found.lowered, found.q_index, own)

    def _check_fit(self, own_k_len: int, q_len: int, k_len: int, batch: int, heads: int) -> None:
        own_batch, own_heads, own_q_len = self.lowered.bounds.shape[:3]
        fits = own_q_len == q_len and own_k_len == k_len
        fits = fits and own_batch in (1, batch) and own_heads in (1, heads)
        expected, remedy = "(batch, heads, q_len, k_len) = {}", "Prepare it for the problem it is used in"
        got, wanted = (own_batch, own_heads, own_q_len, own_k_len), (batch, heads, q_len, k_len)
        expect(fits, "prepared mask", expected, got, remedy, wanted, error=ShapeError)

    def _key_len(self) -> Any:
        return self.lowered.k_len

    def _key_len_is_data(self) -> bool:
        return self.lowered._k_len is not None

    def _row_len(self) -> Any:
        return self.lowered.q_len

    def _anchor(self) -> tuple[Any, ...] | None:
        return None if self.q_index is None else ("prepared", self.q_index)

    def _anchor_index(self, low: Lowering) -> Array:
        if self.q_index is None:
            return low.last_rows()
        return low.per_batch("prepared mask: q_index", self.q_index)[:, None]

    def _lower(self, low: Lowering) -> Rows:
        traced = low.arrays.tracing() and self._key_len_is_data()
        k_len = low.top if traced else self.lowered.k_len
        self._check_fit(k_len, low.q_len, low.top, low.batch, low.heads)
        rows = low.rows_of(self.lowered.bounds)
        illegal = either_illegal(rows.illegal, self._other_rows(low))
        if traced:
            illegal = either_illegal(illegal, low.arrays.asarray(self.lowered._k_len, "int64") != low.top)
        return replace(rows, illegal=illegal)

    def _other_rows(self, low: Lowering) -> Array | None:
        """The queries to which the other operands assign other indices."""
        if self.q_index is None and (self.bare or low.counted_back):
            return None
        expected = "the queries that it was prepared for"
        remedy = "Combine masks before you prepare them, or prepare them for the same queries"
        other = self._anchor_index(low) != low.q_index
        return low.broken("q_index of a prepared mask", other, expected, remedy)

    def __repr__(self) -> str:
        return repr(self.lowered).replace("Spans", "Prepared")


def _apart(x: Any) -> Any:
    """A copy of a caller's array, because the caller may write into it later."""
    return x if arrays_for([x]).tracing() else _copy(x)


def _copy(x: Any) -> Any:
    # NumPy first: a compiler records NumPy arrays as tensors and says that they have `clone`.
    return own(x) if isinstance(x, np.ndarray) or not hasattr(x, "clone") else x.clone()


def _known_as(band: Band | None, mask: Prepared) -> Prepared:
    if band is not None:  # a copy, because a lowered mask must not change if the caller writes into an array
        object.__setattr__(mask, "_of", Band(band.left, band.right, _copy(band.cu_q), _copy(band.cu_k)))
    return mask


def _either(left: Mask, right: Mask) -> Mask:
    """Join masks by `|`. The mask of a rolling cache already shows the first keys that the cache keeps."""
    for mask, other in ((left, right), (right, left)):
        kept, n = getattr(mask, "_kept", None), other._first_keys()
        if isinstance(mask, Prepared) and kept is not None and n is not None:
            what, remedy = "global_keys with the mask of a rolling cache", f"Make the cache with keep={n}"
            expect(n <= kept, what, "at most the {} first tokens that the cache keeps", n, remedy, kept)
            return mask
    return Or(_one_order(left, right))


def _one_order(*masks: Mask) -> tuple[Mask, ...]:
    """The masks, unless one has a `k_index`: another mask would mistake slots for indices."""
    for mask in masks:
        if isinstance(mask, Prepared) and mask.k_index is not None:
            what, got = "& and | with a prepared mask", f"{mask!r}, whose keys have other indices"
            remedy = "Combine the masks before you prepare one for some keys, or for the slots of a cache"
            raise OptionError(what, expected="keys that are 0..k_len-1", got=got, remedy=remedy)
    return masks
