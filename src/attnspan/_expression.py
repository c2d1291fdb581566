"""Mask expressions: what every mask can do, and the two ways to combine them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from ._intervals import (
    FULL,
    Interval,
    Rows,
    clip_rows,
    either_illegal,
    materialise,
    merge_known,
    sweep,
    union_of_two,
)
from ._lowering import Lowering
from ._mistakes import refuse_operand, refuse_operator, refuse_truth
from ._start import begin
from .arrays import Array, Arrays, arrays_for, is_array, outside_inference_mode
from .errors import OptionError, ShapeError, shown
from .spans import Spans


class Mask:
    """What a query may see: an immutable description, free of any framework, composed with `&` and `|`.

    Masks are made by the functions of `attnspan.masks`.

    Example:
        >>> from attnspan import causal, window
        >>> causal() & window(128)
        causal() & window(128)
    """

    # NumPy then leaves its operators to those below, instead of calling them for each element.
    __array_ufunc__ = None

    def __and__(self, other: Mask) -> Mask:
        return And(_one_order(self, other)) if isinstance(other, Mask) else refuse_operand("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(_one_order(self, other)) if isinstance(other, Mask) else refuse_operand("|", self, other)

    # Reached where the left operand is no mask.
    def __rand__(self, other: object) -> NoReturn:
        refuse_operand("&", self, other)

    def __ror__(self, other: object) -> NoReturn:
        refuse_operand("|", self, other)

    def __bool__(self) -> NoReturn:
        refuse_truth(self)

    def _no_operator(self, *_: object) -> NoReturn:
        refuse_operator(self)

    __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __xor__ = _no_operator

    def spans(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        q_index: Array | None = None,
        k_index: Array | None = None,
        like: Any = None,
    ) -> Spans:
        """Lower the mask to spans.

        Args:
            q_len: number of query rows.
            k_len: number of keys.
            batch, heads: sizes that arrays of the mask must fit; axes on which nothing depends stay 1.
            q_index: integer (q_len,) or (batch, q_len), the rows' global indices. Default: the last q_len of
                the keys (bottom-right alignment), unless the mask says otherwise, as `cache` and `documents`
                do.
            k_index: integer (k_len,), strictly ascending: the global indices of the keys that are here.
                Default: 0..k_len-1. Arrays in the mask that belong to keys always describe the whole, global
                sequence.
            like: an array in whose framework, and on whose device, the mask is lowered, also if its arrays
                are of NumPy. Default: the framework of the mask's arrays, or NumPy.

        Returns:
            Spans whose R depends on the mask's structure, not on data, except for `from_dense` and
            `from_predicate` without `max_runs` outside traced programs.

        Raises:
            ShapeError, DtypeError, OptionError: for arguments or arrays of the mask that do not fit.

        Example:
            >>> from attnspan import causal, window
            >>> (causal() & window(1)).spans(2, 4).bounds[0, 0, :, 0].tolist()
            [[1, 3], [2, 4]]
        """
        return self.placed(
            q_len, k_len, batch=batch, heads=heads, q_index=q_index, k_index=k_index, like=like
        ).lowered

    def placed(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        q_index: Array | None = None,
        k_index: Array | None = None,
        like: Any = None,
    ) -> Prepared:
        """Lower the mask as `spans` does, and keep the global indices of its rows and keys.

        Biases of position and dropout read them. Nothing waits for data. Args and raises are as of `spans`.

        Example:
            >>> from attnspan import cache, causal
            >>> (causal() & cache([2, 3])).placed(1, 3, batch=2).q_index.tolist()
            [[1], [2]]
        """
        with outside_inference_mode():
            low = begin(self, q_len, k_len, batch, heads, q_index, k_index, like)
            spans = Spans(self._bounds(low), low.top)
            rows_at = None if low.counted_back else low.q_index[:, 0]
            if k_index is None:
                return Prepared(spans, rows_at)
            k_index = low.arrays.asarray(k_index, "int32")
            return Prepared(spans.take_keys(k_index), rows_at, k_index[None])

    def _bounds(self, low: Lowering) -> Array:
        rows = low.lower(self)
        los, his = materialise(low.arrays, rows.intervals, low.q_len, low.top)
        return _bounds(low.arrays, los, his, rows.illegal)

    def prepare(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        q_index: Array | None = None,
        k_index: Array | None = None,
        like: Any = None,
    ) -> Prepared:
        """Lower the mask once, with the smallest R its data need, to be shared by all layers.

        Use it outside the model, per batch, in a data loader for instance. Illegal data are reported here, by
        row, on every device. Eager calls of attention remember the lowering of a mask that is passed as it
        is; compiled code lowers it in every layer, as eager code does with `from_predicate`: O(q_len * k_len)
        work each time. It reads values, so it waits for the device. Where R varies from batch to batch, so
        does the shape that a compiler sees: prefer `spans` for such masks there.

        Args and raises are those of `spans`; besides, OptionError for rows whose data break a promise.

        Returns:
            A mask with canonical, contiguous bounds, which keeps the global indices of its rows and keys.

        Example:
            >>> from attnspan import causal
            >>> causal().prepare(3, 3)
            Prepared(B=1, H=1, q_len=3, k_len=3, R=1)
        """
        indices = {"q_index": q_index, "k_index": k_index}
        placed = self.placed(q_len, k_len, batch=batch, heads=heads, like=like, **indices)
        placed.lowered._require_values("prepare", of="mask")
        with outside_inference_mode():
            return replace(placed, lowered=placed.lowered.compact().validate())

    def show(self, q_len: int = 64, k_len: int | None = None, **options: Any) -> None:
        """Print a picture of the mask; see `attnspan.picture.show` for the options.

        Example:
            >>> from attnspan import causal
            >>> causal().show(4)
            causal()
              key 0
            query┌────┐
                0│█▄  │
                2│███▄│
                 └────┘
            4 queries x 4 keys, R = 1, 62.5 % visible
        """
        from .picture import show

        show(self, q_len, q_len if k_len is None else k_len, **options)

    def _repr_svg_(self) -> str | None:
        from .picture import svg_of_mask

        return svg_of_mask(self)

    def _lower(self, low: Lowering) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} must say how it is lowered")

    def _leaves(self) -> list[Mask]:
        return [self]

    # Sizes may be symbolic while a compiler reads this code; int() would fix them to one value.

    def _key_len(self) -> Any:
        """Length of the global key sequence, where an array of the mask says it, else None."""
        return None

    def _knows_k_len_as_data(self) -> bool:
        """Whether the length is an array too, which `_lower` compares in traced programs."""
        return False

    def _row_len(self) -> Any:
        """Number of query rows, where an array of the mask has one entry for each, else None."""
        return None

    def _anchor(self) -> tuple[Any, ...] | None:
        """What determines the default `q_index`, as objects compared by identity; None for the usual one."""
        return None

    def _anchor_index(self, low: Lowering) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must say which indices it implies")

    def _example(self) -> object:
        """An array, not a field, that the mask must be lowered beside."""
        return None

    def __repr__(self) -> str:
        words = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # Of the class, where defaults are: a compiler knows no MISSING.
            if not hasattr(type(self), field.name):
                words.append(_short(value))
            elif is_array(value) or value != getattr(type(self), field.name):
                words.append(f"{field.name}={_short(value)}")
        return f"{type(self).__name__.lower()}({', '.join(words)})"


def _short(value: object) -> str:
    if is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        return f"{dtype}[{', '.join([shown(n) for n in value.shape])}]"  # type: ignore[attr-defined]
    if isinstance(value, int | tuple):
        return shown(value)
    return getattr(value, "__name__", None) or repr(value)


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """The keys that every operand shows."""

    operands: tuple[Mask, ...]

    def _leaves(self) -> list[Mask]:
        leaves: list[Mask] = []
        for operand in self.operands:
            leaves += operand._leaves()
        return leaves

    def _lower(self, low: Lowering) -> Rows:
        clip: Rows | None = None
        wide = []
        for operand in self._flat():
            rows = low.lower(operand)
            if len(rows.intervals) > 1:
                wide.append((operand, rows))
            else:
                clip = rows if clip is None else clip_rows(low.arrays, rows, clip)
        if clip is None:
            clip = Rows((FULL,))
        if not wide:
            return clip
        # Single intervals go into the operands of each `|` first: many of those then have unions known to be
        # one.
        lowered = [
            operand._lower_within(low, clip) if isinstance(operand, Or) else clip_rows(low.arrays, rows, clip)
            for operand, rows in wide
        ]
        result = lowered[0]
        for rows in lowered[1:]:
            result = _intersect(low, result, rows)
        return result

    def _flat(self) -> list[Mask]:
        flat: list[Mask] = []
        for operand in self.operands:
            flat.extend(operand._flat() if isinstance(operand, And) else [operand])
        return flat

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Or) else repr(x) for x in self.operands)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """The keys that any operand shows."""

    operands: tuple[Mask, ...]

    def _leaves(self) -> list[Mask]:
        leaves: list[Mask] = []
        for operand in self.operands:
            leaves += operand._leaves()
        return leaves

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
        merged = merge_known(low.arrays, pool)
        if len(merged) == 1:
            return Rows(merged, illegal)
        los, his = materialise(low.arrays, merged, low.q_len, low.top)
        if len(merged) == 2:
            los, his = union_of_two(low.arrays, los, his, low.top)
            return Rows(tuple(map(Interval, los, his)), illegal)
        lo, hi = _common(low.arrays, los, his)
        lo, hi = sweep(low.arrays, lo, hi, depth=1, count=len(merged), top=low.top)
        return Rows(_split(lo, hi), illegal)

    def _flat(self) -> list[Mask]:
        flat: list[Mask] = []
        for operand in self.operands:
            flat.extend(operand._flat() if isinstance(operand, Or) else [operand])
        return flat

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.operands))


@dataclass(frozen=True, eq=False, repr=False)
class Prepared(Mask):
    """A mask lowered once, by `Mask.prepare`: rows are as they come, keys are the global ones.

    Accepted wherever a mask is. Its bounds belong to one problem: `spans` checks the sizes it is asked
    for. In an expression, the indices of its rows are the default ones of the other operands too.

    Attributes:
        lowered: the spans.
        q_index: int32 (B|1, q_len), the rows' global indices; None where they are the last of the keys.
        k_index: int32 (1, k_len), the keys' global indices; None where they are 0..k_len-1.
        bare: it came as spans, which do not say where their rows are: they fit any other rows.

    Example:
        >>> from attnspan import causal
        >>> causal().prepare(3, 3).spans(3, 3)
        Spans(B=1, H=1, q_len=3, k_len=3, R=1)
    """

    lowered: Spans
    q_index: Array | None = None
    k_index: Array | None = None
    bare: bool = False

    def placed(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        q_index: Array | None = None,
        k_index: Array | None = None,
        like: Any = None,
    ) -> Prepared:
        """The mask itself; with `k_index`, restricted to those keys.

        Raises:
            OptionError: for a `q_index`: the rows were fixed when the mask was prepared.
        """
        if q_index is not None:
            raise OptionError(
                "q_index",
                expected="None with a prepared mask, whose rows are known",
                got="indices of rows",
                remedy="Give them to prepare(), or take rows by mask.lowered.take_queries(...)",
            )
        if k_index is None:
            _check_fit(self.lowered, q_len, self.lowered.k_len, k_len, batch, heads)
            return self
        arrays, q_index = arrays_for([self.lowered.bounds]), self.q_index
        if q_index is None:  # Counted back from all keys, not from those that are left.
            q_index = (arrays.arange(q_len) + (self.lowered.k_len - q_len))[None]
        indices = {"q_index": q_index, "k_index": k_index}
        placed = super().placed(q_len, k_len, batch=batch, heads=heads, like=like, **indices)
        own = placed.k_index if self.k_index is None else arrays.take_along(self.k_index, placed.k_index)
        return Prepared(placed.lowered, q_index, own)

    def _key_len(self) -> Any:
        return self.lowered.k_len

    def _anchor(self) -> tuple[Any, ...] | None:
        return None if self.q_index is None else ("prepared", self.q_index)

    def _anchor_index(self, low: Lowering) -> Array:
        if self.q_index is None:
            return low.last_rows()
        return low.per_batch("prepared mask: q_index", self.q_index, "int32")[:, None]

    def _knows_k_len_as_data(self) -> bool:
        return self.lowered._k_len is not None

    def _row_len(self) -> Any:
        return self.lowered.q_len

    def _example(self) -> object:
        return self.lowered.bounds

    def _lower(self, low: Lowering) -> Rows:
        traced = low.arrays.tracing() and self._knows_k_len_as_data()
        k_len = low.top if traced else self.lowered.k_len
        _check_fit(self.lowered, low.q_len, k_len, low.top, low.batch, low.heads)
        bounds = low.arrays.to_int32(self.lowered.bounds)
        illegal = Spans(bounds, low.top)._illegal_rows()
        if traced:
            illegal = illegal | (low.arrays.asarray(self.lowered._k_len, "int64") != low.top)
        illegal = either_illegal(illegal, self._other_rows(low))
        return Rows(_split(bounds[..., 0], bounds[..., 1]), illegal)

    def _other_rows(self, low: Lowering) -> Array | None:
        """Rows that the other operands take for those of other indices."""
        if self.q_index is None and (self.bare or low.counted_back):
            return None
        return low.broken(
            "q_index of a prepared mask",
            self._anchor_index(low) != low.q_index,
            self.q_index,
            low.q_index,
            expected=lambda: "the rows that it was prepared for",
            remedy="Combine masks before they are prepared, or prepare them for the same rows",
        )

    def __repr__(self) -> str:
        return repr(self.lowered).replace("Spans", "Prepared")


def _one_order(*masks: Mask) -> tuple[Mask, ...]:
    """The masks, if none has keys in an order of their own: another would take slots for indices."""
    for mask in masks:
        if isinstance(mask, Prepared) and mask.k_index is not None:
            raise OptionError(
                "& and | with a prepared mask",
                expected="keys that are 0..k_len-1",
                got=f"{mask!r}, whose keys have indices of their own",
                remedy="Combine the masks before one is prepared for some keys, or for the slots of a cache",
            )
    return masks


def _check_fit(spans: Spans, q_len: int, own_k_len: int, k_len: int, batch: int, heads: int) -> None:
    shape = spans.bounds.shape
    fits = shape[2] == q_len and own_k_len == k_len and shape[0] in (1, batch) and shape[1] in (1, heads)
    if not fits:
        raise ShapeError(
            "prepared mask",
            expected=f"spans for batch {batch}, heads {heads}, q_len {q_len}, k_len {k_len}",
            got=f"spans for batch {shape[0]}, heads {shape[1]}, q_len {shape[2]}, k_len {own_k_len}",
            remedy="Prepare the mask for the problem it is used in",
        )


def _split(lo: Array, hi: Array) -> tuple[Interval, ...]:
    return tuple(Interval(lo[..., r], hi[..., r]) for r in range(lo.shape[-1]))


def _common(arrays: Arrays, los: list[Array], his: list[Array]) -> tuple[Array, Array]:
    """Ends as two arrays (..., R) of one shape."""
    both = arrays.stack([*los, *his])
    return both[..., : len(los)], both[..., len(los) :]


def _intersect(low: Lowering, a: Rows, b: Rows) -> Rows:
    """The intersection where both have several intervals: at most Ra + Rb - 1."""
    los, his = materialise(low.arrays, (*a.intervals, *b.intervals), low.q_len, low.top)
    lo, hi = _common(low.arrays, los, his)
    lo, hi = sweep(low.arrays, lo, hi, depth=2, count=len(los) - 1, top=low.top)
    return Rows(_split(lo, hi), either_illegal(a.illegal, b.illegal))


def _bounds(arrays: Arrays, los: list[Array], his: list[Array], illegal: Array | None) -> Array:
    # Marked before they are interleaved, which is faster by far; not at all where none is seen to be illegal.
    if illegal is not None and not (arrays.concrete(illegal) and not illegal.any()):
        los = [arrays.where(illegal, 0, lo) for lo in los]
        his = [arrays.where(illegal, -1, hi) for hi in his]
    if len(los) == 1:
        bounds = arrays.stack([los[0], his[0]])[..., None, :]
    else:
        bounds = arrays.stack(_common(arrays, los, his))
    return arrays.cast(bounds, "int32")
