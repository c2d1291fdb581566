"""Mask expressions: what every mask can do, how two are combined, and masks that are lowered already."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, NoReturn

import numpy as np

from attnspan.base.arrays import Array, arrays_for, outside_inference_mode, own, read_only
from attnspan.base.mistakes import refuse_operand, refuse_operator, refuse_truth, refuse_use_as_array
from attnspan.base.pytrees import Node, arrays_in
from attnspan.base.recorded import without_tracer_warnings
from attnspan.errors import OptionError, ShapeError, expect

from .bands import Band
from .bounds import Spans
from .intervals import FULL, Interval, Rows, clip_rows, either_illegal, merge_known
from .lowering import Lowering, begin

__all__ = ["And", "Combined", "Mask", "Or", "Prepared", "RowNumbered"]


# Numbers and words that a mask may hold and still say all there is to know.
_STATIC = (bool, int, float, str, type(None))


class Mask(Node):
    """Mask: an immutable description of the keys that each query may see, composed with `&` and `|`.

    A subclass becomes a frozen dataclass, without the decorator, and a pytree. It checks its fields in
    `__post_init__`, and says in `_lower` which keys each row sees. The masks are in `attnspan.masks` and
    `attnspan.library`.

    Example:
        >>> from attnspan import causal, window
        >>> causal() & window(128)
        causal() & window(128)
    """

    # Whether it may keep packed documents apart; a mask that knows none says False.
    _separates: ClassVar[bool] = True
    # Whether its fields are numbers and other masks alone, which then say all there is to know.
    _in_numbers: ClassVar[bool] = False
    # Number of dims that its arrays have besides batch rows; None if their parts are unknown.
    array_dims: ClassVar[int | None] = None

    def may_separate(self) -> bool:
        """Whether it may keep the packed documents of a row apart."""
        return self._separates

    def static_key(self) -> tuple[Any, ...] | None:
        """A hashable key that masks without data share if they mean the same; None for a mask with data."""
        if not self._in_numbers:
            return None
        parts: list[Any] = [type(self)]
        names: tuple[str, ...] = self.__match_args__  # dynamo of torch 2.11 cannot trace vars(self).values()
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

    def __and__(self, other: Mask) -> Mask:
        return And(_one_order(self, other)) if isinstance(other, Mask) else refuse_operand("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _either(self, other) if isinstance(other, Mask) else refuse_operand("|", self, other)

    # Reached where the left operand is no mask.
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
        """Lower the mask for one problem, inside a traced program too. Nothing waits for data.

        Args:
            q_len: number of query rows.
            k_len: number of keys.
            batch, heads: sizes that arrays of the mask must fit; axes on which nothing depends stay 1. By
                default 1, and for `batch` that of a `like` with four axes.
            q_index: integer (q_len,) or (batch, q_len), the rows' global indices. Default: the last q_len of
                the keys (bottom-right alignment), unless the mask says otherwise, as `cache` and `documents`
                do.
            k_index: integer (k_len,), strictly ascending: the global indices of the keys that are here.
                Default: 0..k_len-1. Arrays in the mask that belong to keys always describe the whole, global
                sequence.
            like: an array such as q, in whose framework and on whose device the mask is lowered, also if its
                arrays are of NumPy. Default: the framework of the mask's arrays, or NumPy.

        Returns:
            A lowered mask that keeps the global indices of its rows and keys, which biases of position and
            dropout read. Its R depends on the mask's structure, not on data, except for `from_dense`, `keys`
            and `from_predicate` without `max_runs` outside traced programs.

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
            rows_at = None if low.counted_back else _apart(low.q_index[:, 0], q_index)
            if k_index is None:
                return _known_as(self.band() if q_index is None else None, Prepared(spans, rows_at))
            k_index = _apart(arrays.asarray(k_index, "int32"), k_index)
            return Prepared(spans.take_keys(k_index), rows_at, k_index[None])

    def prepare(self, q_len: int, k_len: int, **options: Any) -> Prepared:
        """Lower the mask once, with the smallest R its data need, to be shared by all layers.

        Use it outside the model, per batch, for instance in a data loader. It reports illegal data by row on
        every device, and waits for the device to do so. Eager calls of attention remember the lowering of a
        mask; compiled code lowers it in every layer, as eager code does with `from_predicate`, in
        O(q_len * k_len). If R varies from batch to batch, so does a shape that a compiler sees: use `spans`.

        Args:
            q_len, k_len, **options: as for `spans`.

        Returns:
            The lowered mask, with canonical, contiguous bounds. Arrays of NumPy are read-only.

        Raises:
            OptionError: for rows whose data break a promise, besides what `spans` raises.

        Example:
            >>> from attnspan import causal
            >>> causal().prepare(3, 3)
            Prepared(B=1, H=1, q_len=3, k_len=3, R=1)
        """
        found = self.spans(q_len, k_len, **options)
        found.lowered._require_values("prepare", of="mask")
        with outside_inference_mode():
            exact = replace(found, lowered=found.lowered.compact().validate())
            # Layers share it: a write would change the mask of all of them.
            for x in (exact.lowered.bounds, exact.q_index, exact.k_index):
                read_only(x)
            return _known_as(found.band(), exact)

    def show(self, q_len: int = 64, k_len: int | None = None, **options: Any) -> None:
        """Print a picture of the mask, as `attnspan.masks.picture.show` does, which has the options."""
        from .picture import show

        show(self, q_len, q_len if k_len is None else k_len, **options)

    def _repr_svg_(self) -> str | None:
        from .picture import svg_of_mask

        return svg_of_mask(self)

    # What a kind of mask says of itself. Sizes may be symbolic while a compiler reads this code; int() would
    # fix them to one value.

    def band(self) -> Band | None:
        """The band that other libraries' kernels know the mask as; None if they do not."""
        return None

    def _first_keys(self) -> int | None:
        """n of a mask that shows every query the first n keys, and no others."""
        return None

    def _lower(self, low: Lowering) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} must say how it is lowered")

    def leaves(self) -> list[Mask]:
        """The masks that it combines; itself where it combines none."""
        return [self]

    def _key_len(self) -> Any:
        """Length of the global key sequence, if an array says it."""
        return None

    def _key_len_is_data(self) -> bool:
        """Whether a program that is being traced must not read that length."""
        return False

    def _row_len(self) -> Any:
        """Number of query rows, if an array of the mask has one entry for each."""
        return None

    def _anchor(self) -> tuple[Any, ...] | None:
        """Objects that determine the default `q_index`, compared by identity; None for the usual one."""
        return None

    def _anchor_index(self, low: Lowering) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must say which indices it implies")


class RowNumbered(Mask):
    """A mask whose rows are counted from 0, whatever the keys are: cross attention, or a `BlockMask`."""

    def _anchor(self) -> tuple[Any, ...] | None:
        return ("row numbers",)

    def _anchor_index(self, low: Lowering) -> Array:
        return low.arrays.arange(low.q_len)[None, None]


class Combined(Mask):
    """Masks joined by an operator."""

    _in_numbers = True

    operands: tuple[Mask, ...]

    def leaves(self) -> list[Mask]:
        leaves: list[Mask] = []
        for operand in self.operands:
            leaves += operand.leaves()
        return leaves

    def _flat(self) -> list[Mask]:
        flat: list[Mask] = []
        for operand in self.operands:
            flat += operand._flat() if type(operand) is type(self) else [operand]  # type: ignore[attr-defined]
        return flat


class And(Combined):
    """The keys that every operand shows."""

    def may_separate(self) -> bool:
        return any(operand.may_separate() for operand in self.operands)

    def band(self) -> Band | None:
        band: Band | None = Band()
        for operand in self._flat():
            other = operand.band()
            band = None if band is None or other is None else band & other
        # Rows that were lowered before may be others than those of the documents, which the lowering finds.
        fixed = any(isinstance(operand, Prepared) for operand in self._flat())
        return None if fixed and band is not None and band.cu_k is not None else band

    def _lower(self, low: Lowering) -> Rows:
        clip: Rows | None = None
        wide = []
        for operand in self._flat():
            rows = low.lower(operand)
            if len(rows.intervals) > 1:
                wide.append((operand, rows))
            else:
                clip = rows if clip is None else clip_rows(low.arrays, rows, clip)
        clip = Rows((FULL,)) if clip is None else clip
        if not wide:
            return clip
        # Single intervals go into the operands of each `|` first: many of those then have unions known to be
        # one.
        lowered = [
            operand._lower_within(low, clip) if isinstance(operand, Or) else clip_rows(low.arrays, rows, clip)
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
        """Lower the union intersected with `clip`, which has a single interval per row."""
        pool: list[Interval] = []
        illegal = None
        for operand in self._flat():
            rows = clip_rows(low.arrays, low.lower(operand), clip)
            pool.extend(rows.intervals)
            illegal = either_illegal(illegal, rows.illegal)
        return low.union(merge_known(low.arrays, pool), illegal)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.operands))


class Prepared(Mask):
    """A mask lowered for one problem, by `Mask.prepare` or `Mask.spans`. Rows are as they come.

    Accepted wherever a mask is, and has the attributes and methods of `Spans`. `spans` checks the sizes it is
    asked for, restricts it to a `k_index`, and refuses a `q_index`, as its rows are fixed. In an expression,
    the indices of its rows are the default ones of the other operands too.

    Attributes:
        lowered: the spans, over the keys that are here.
        q_index: int32 (B|1, q_len), the rows' global indices; None where they are the last of the keys.
        k_index: int32 (1, k_len), the keys' global indices; None where they are 0..k_len-1.
        bare: it came as spans, which do not say where their rows are: they fit any other rows.

    Example:
        >>> from attnspan import causal
        >>> causal().prepare(3, 3).spans(3, 3)
        Prepared(B=1, H=1, q_len=3, k_len=3, R=1)
    """

    lowered: Spans
    q_index: Array | None = None
    k_index: Array | None = None
    bare: bool = False

    # What it was lowered from, where that is a band: no field, so that all lowered masks are of one tree.
    _of: ClassVar[Band | None] = None
    # How many of the first tokens a rolling cache keeps, and shows to all later ones. No field either.
    _kept: ClassVar[int | None] = None

    def band(self) -> Band | None:
        return self._of

    def __getattr__(self, name: str) -> Any:
        # What `Spans` can do, a lowered mask can: `mask.spans(4, 4).dense()`.
        if name == "ndim":  # reached where the property has raised
            refuse_use_as_array(self)
        if name.startswith("__") or name == "lowered":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.lowered, name)

    def _spans(
        self, q_len: int, k_len: int, batch: int, heads: int, q_index: Any, k_index: Any, like: Any
    ) -> Prepared:
        # The mask itself; with `k_index`, restricted to those keys.
        what, expected = "q_index", "None with a prepared mask, whose rows are known"
        remedy = "Give them to prepare(), or take rows by mask.lowered.take_queries(...)"
        expect(q_index is None, what, expected, "indices of rows", remedy)
        if k_index is None:
            self._check_fit(self.lowered.k_len, q_len, k_len, batch, heads)
            return self
        arrays, q_index = arrays_for([self.lowered.bounds]), self.q_index
        if q_index is None:  # Counted back from all keys, not from those that are left.
            q_index = (arrays.arange(q_len) + (self.lowered.k_len - q_len))[None]
        found = super()._spans(q_len, k_len, batch, heads, q_index, k_index, like)
        own = found.k_index if self.k_index is None else arrays.take_along(self.k_index, found.k_index)
        return Prepared(found.lowered, q_index, own)

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
        """Rows that the other operands take for those of other indices."""
        if self.q_index is None and (self.bare or low.counted_back):
            return None
        expected = "the rows that it was prepared for"
        remedy = "Combine masks before they are prepared, or prepare them for the same rows"
        other = self._anchor_index(low) != low.q_index
        return low.broken("q_index of a prepared mask", other, expected, remedy)

    def __repr__(self) -> str:
        return repr(self.lowered).replace("Spans", "Prepared")


def _apart(x: Any, given: Any) -> Any:
    """An array that shares no memory with one that the caller gave, and may write into later."""
    return x if given is None or arrays_for([x]).tracing() else _copy(x)


def _copy(x: Any) -> Any:
    # NumPy first: a compiler, which records its arrays as tensors, says that they have `clone`.
    return own(x) if isinstance(x, np.ndarray) or not hasattr(x, "clone") else x.clone()


def _known_as(band: Band | None, mask: Prepared) -> Prepared:
    if band is not None:  # A copy: what is lowered does not change when the caller writes into an array.
        object.__setattr__(mask, "_of", Band(band.left, band.right, _copy(band.cu_q), _copy(band.cu_k)))
    return mask


def _either(left: Mask, right: Mask) -> Mask:
    """The masks joined by `|`. A rolling cache's mask has those first keys already that the cache keeps."""
    for mask, other in ((left, right), (right, left)):
        kept, n = getattr(mask, "_kept", None), other._first_keys()
        if isinstance(mask, Prepared) and kept is not None and n is not None:
            what, remedy = "global_keys with the mask of a rolling cache", f"Make the cache with keep={n}"
            expect(n <= kept, what, "at most the {} first tokens that it keeps", n, remedy, kept)
            return mask
    return Or(_one_order(left, right))


def _one_order(*masks: Mask) -> tuple[Mask, ...]:
    """The masks, if none has keys in an order of their own: another would take slots for indices."""
    for mask in masks:
        if isinstance(mask, Prepared) and mask.k_index is not None:
            what, got = "& and | with a prepared mask", f"{mask!r}, whose keys have indices of their own"
            remedy = "Combine the masks before one is prepared for some keys, or for the slots of a cache"
            raise OptionError(what, expected="keys that are 0..k_len-1", got=got, remedy=remedy)
    return masks
