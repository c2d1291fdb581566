"""One call of attention, checked once for every front end, in the form that backends take.

This module knows no framework. An array is any object with ``shape`` and ``dtype``, and each framework has a
`Front`. A comparison of traced sizes becomes a guard. Sizes are therefore compared only if they must be
equal, and are converted to text only when an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from attnspan.base.arrays import is_array
from attnspan.base.mistakes import not_a_mask, refuse_keywords
from attnspan.base.plain import check_plain
from attnspan.base.recorded import agree, sure
from attnspan.errors import DeviceError, DtypeError, OptionError, ShapeError, shown
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bands import Band
from attnspan.masks.bounds import Spans

from . import schema
from .options import FLOAT32_MAX, NO_OPTIONS, OF_CALLERS, Given, Options, check_number

#: The longest q or k. Bounds are int32, and kernels step past the end by at most one block of 64.
MAX_LENGTH = 2**31 - 65

#: Dims of q, k and v in each layout. ``thd`` packs the documents of a batch into one sequence of tokens.
LAYOUTS = {
    "bhsd": ("batch", "heads", "length", "head_dim"),
    "bshd": ("batch", "length", "heads", "head_dim"),
    "thd": ("tokens", "heads", "head_dim"),
}

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_FULL = full()
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Problem:
    """Sizes of a call, without its arrays. A backend decides from them whether it can run the call.

    Attributes:
        batch: Batch size.
        q_heads: Number of query heads, a multiple of ``kv_heads``.
        kv_heads: Number of key and value heads.
        q_len: Number of queries per batch element.
        k_len: Number of keys per batch element.
        head_dim: Elements of one query or key.
        v_dim: Elements of one value.
        runs: Spans per query (R), or 0 if a plan has the mask.
        dtype: Dtype of q, k and v, such as ``"bfloat16"``.
        device: Device type, such as ``"cpu"``.
        band: "full", "causal", "window" or "documents" if a call on a GPU has such a mask, else "".
        extras: Features of a call on a GPU that few kernels support: some of "DTensors", "indices", "gradient
            of lse", "scale of 0 or below" and "plan over ranks".
        capability: Compute capability of the GPU, such as 90. None on other devices and without a driver.
        options: The options of the call: some of "softcap", "bias", "sinks" and "dropout".

    Example:
        >>> problem = Problem(1, 8, 2, 4, 4, 64, 64, 1, "float32", "cpu")
        >>> problem.group_size, problem.flops(pairs=10)
        (4, 2560)
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    runs: int
    dtype: str
    device: str
    band: str = ""
    extras: tuple[str, ...] = ()
    capability: int | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        bounds: Any,
        device: str | None = None,
        more: tuple[Any, ...] = (),
        options: tuple[str, ...] = (),
    ) -> Problem:
        """Sizes of arrays in (B, H, S, D) order and of bounds (B|1, H|1, Sq, R, 2), which must fit them.

        q, k and v may be any objects with a shape and a dtype.

        Args:
            q: Shape (B, Hq, Sq, D).
            k: Shape (B, Hkv, Sk, D).
            v: Shape (B, Hkv, Sk, Dv).
            bounds: The mask as spans, or None if a plan has the mask.
            device: Device type. By default it is q's, and the bounds must be on the same device.
            more: Values of the fields after ``device``.
            options: The options of the call.

        Raises:
            ValueError: The bounds do not fit q, or are on another device.
            TypeError: The bounds are not int32.
        """
        batch, heads, q_len, head_dim = q.shape
        if bounds is not None:
            _check_bounds(bounds, batch, heads, q_len)
            if device is None and bounds.device != q.device:
                wanted, remedy = f"device {_device(q)} (as q)", "Move the mask's arrays"
                raise DeviceError("bounds", expected=wanted, got=_device(bounds), remedy=remedy)
        device = _device(q).partition(":")[0] if device is None else device
        runs = 0 if bounds is None else bounds.shape[3]
        sizes = batch, heads, k.shape[1], q_len, k.shape[2], head_dim, v.shape[3]
        return cls(*sizes, runs, _dtype(q), device, *more, options=options)  # type: ignore[misc]

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key head (1 without GQA)."""
        return self.q_heads // self.kv_heads

    def flops(self, pairs: int) -> int:
        """Floating-point operations of the forward pass. The backward pass needs 2.5 times as many.

        The forward pass has two products, with one multiplication and one addition per element
        (FlashAttention-2, arXiv:2307.08691, section 4.1, but with separate head dims for keys and values).

        Args:
            pairs: Number of visible pairs over all batch elements and query heads.
        """
        return 2 * pairs * (self.head_dim + self.v_dim)


class Front:
    """Checks that a front end adds to the checks of a call. One instance serves one call.

    The strings are words for errors: the names of the framework's arrays and of dropout seeds, and the code
    that makes one. ``device`` is the device type of the call, or None if the arrays tell it.
    """

    expected: str
    convert: str
    convert_foreign: str
    an_array, noun = "an array", "array"
    seed: str
    new_seed: str
    device: str | None = None
    #: Whether the caller's values have no elements. `widened` gives them one, which is 0.
    empty_values = False

    def takes(self, x: Any) -> bool:
        """Whether `x` is an array of the framework."""
        raise NotImplementedError

    def kind(self, x: Any) -> str:
        """Name the kind of an object that the caller passed instead of an array, for errors."""
        return type(x).__name__

    def check_taken(self, name: str, x: Any, expected: str) -> None:
        """Raise unless `x` is an array of the framework."""
        if not self.takes(x):
            raise DtypeError(name, expected=expected, got=self.kind(x), remedy=self.convert)
        check_plain(name, x)

    def widened(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """q, k and v, padded if their last dim is empty.

        Scores of queries and keys without elements are 0, as in torch: only the mask and biases count.
        """
        self.empty_values = bool(v.shape[-1] == 0)
        if q.shape[-1] == 0 == k.shape[-1]:
            q, k = self.pad_last(q), self.pad_last(k)
        return q, k, self.pad_last(v) if self.empty_values else v

    def pad_last(self, x: Any) -> Any:
        """`x` with a zero appended along its last dim."""
        raise NotImplementedError

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        """q, k and v in (B, H, S, D) order, or their shapes. Raises if their places do not fit together."""
        raise NotImplementedError

    def check_place(self, name: str, x: Any, q: Any) -> None:
        """Raise if an option's array is on another device than q."""

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        """Raise for options that this front end does not support."""

    def lower_seed(self, seed: Any, batch: Any, heads: Any) -> Any:
        """``dropout_seed`` as kernels take it. Raises unless it is one seed, or one per batch and head."""
        raise NotImplementedError

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared | None, Given]:
        """The mask as spans, or None if a plan has it, and the options, moved to the device if necessary."""
        raise NotImplementedError

    def bounds(self, placed: Prepared, mask: Any, q: Any) -> tuple[Any, Any]:
        """Bounds of a lowered mask as an array of the framework, and a ``k_len`` that the program checks.

        ``k_len`` is None, except for a mask that was lowered before if reading its number would synchronize.
        """
        raise NotImplementedError

    def band(
        self, mask: Any, given: Given, q: Any, k: Any, scale: Any
    ) -> tuple[Band | None, tuple[Any, ...]]:
        """The mask if it is a band, and the fields of a `Problem` about the band, the call and its GPU."""
        del mask, given, q, k, scale
        return None, ()

    def like(self, q: Any) -> Any:
        """An array of the call. Lowered options have its framework and device."""
        return q


@dataclass(frozen=True, eq=False)
class Part:
    """Arrays and numbers of a call, or of some of its heads and keys, that a kernel computes at once.

    q, k and v may be any objects with a shape and a dtype.

    Attributes:
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: int32, shape (B|1, Hq|1, Sq, R, 2): the mask as spans. None if a plan has the mask.
        scale: Factor of the scores.
        options: Softcap, bias, sinks and dropout in the form of kernels, or None.

    Example:
        >>> import numpy as np
        >>> q = np.zeros((1, 4, 2, 8), np.float32)
        >>> bounds = np.array([[0, 1], [0, 2]], np.int32).reshape(1, 1, 2, 1, 2)  # a causal mask
        >>> Part(q, q, q, bounds, scale=8**-0.5, options=None).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2]]
    """

    q: Any
    k: Any
    v: Any
    bounds: Any
    scale: float
    options: Options | None


@dataclass(frozen=True, eq=False)
class Call(Part):
    """One call of attention, checked.

    Attributes:
        problem: The sizes, for the choice of a backend.
        given: The options as the caller passed them.
        layout: Order of the dims of the caller's q, k, v and output.
        lowered_for: Shape (): the number of keys that the mask was lowered for, if it is not checked yet.
        band: The mask in the form of other libraries' kernels. None on CPU, and if they cannot represent it.
    """

    problem: Problem
    given: Given
    layout: str
    lowered_for: Any = None
    band: Band | None = None

    @classmethod
    def of(
        cls, front: Front, q: Any, k: Any, v: Any, given: Given, *, mask: Any, scale: Any, layout: str
    ) -> Call:
        """Check a call and bring it into the form of backends.

        Args:
            front: The framework's checks.
            q: Queries in ``layout``.
            k: Keys in ``layout``.
            v: Values in ``layout``.
            given: The caller's options.
            mask: A mask, lowered or not, or spans. None means ``full()``.
            scale: Factor of the scores. None means 1/sqrt(D).
            layout: A key of ``LAYOUTS``.

        Raises:
            ValueError: Shapes, devices, options or bounds do not fit.
            TypeError: Dtypes do not fit, or ``mask`` is not a mask.
        """
        mask = _FULL if mask is None else mask
        check_layout(front, layout, q, k, v)
        q, k, v = front.enter(q, k, v, mask, given, layout)
        _check_kinds(q, k, v)
        _check_sizes(q, k, v)
        if scale is not None:
            wanted, remedy = "a finite float32 number", "Leave it out for 1/sqrt(D)"
            check_number("scale", scale, -FLOAT32_MAX, FLOAT32_MAX, wanted, remedy)
        if given is not NO_OPTIONS:
            for row in schema.arrays(schema.OPTIONS):
                if row.name != "bias":
                    check_plain(row.name, getattr(given, row.name))
            front.check_given(given, q, k)
        if not isinstance(mask, (Mask, Spans)):
            foreign = is_array(mask) and not (front.takes(mask) or isinstance(mask, np.ndarray))
            raise not_a_mask(mask, convert=front.convert_foreign if foreign else "")
        placed, given = front.lower(mask, q, k, given)
        fixed = isinstance(mask, (Prepared, Spans))
        bounds = unread = None
        if placed is not None:
            bounds, unread = front.bounds(placed, mask, q)
            if fixed and unread is None:
                check_k_len(placed.lowered.k_len, k.shape[2])
            if layout == "thd" and not fixed:
                _check_packed(mask)  # type: ignore[arg-type]
        # Before the number of keys is checked there is no band: other libraries' kernels do not check it.
        band, more = front.band(None if unread is not None else mask, given, q, k, scale)
        names = () if given is NO_OPTIONS else given.names()
        problem = Problem.of(q, k, v, bounds, front.device, more, names)
        options = None if given is NO_OPTIONS else given.lower(front, q, k, placed, fixed)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        return cls(q, k, v, bounds, scale, options, problem, given, layout, unread, band)


def lower_mask(mask: Mask, q: Any, k: Any, given: Given, like: Any) -> Prepared:
    """Lower a mask for q and k in (B, H, S, D) order. No other code lowers the mask of a call.

    The bounds have the framework and device of the array ``like``, or of the mask if ``like`` is None.
    """
    indices = {"q_index": given.q_index, "k_index": given.k_index}
    return mask.spans(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], like=like, **indices)


def check_k_len(own: Any, k_len: Any) -> None:
    """Raise unless a mask was lowered for the number of keys of the call.

    Example:
        >>> check_k_len(3, 4)
        Traceback (most recent call last):
        attnspan.errors.OptionError: mask: expected spans over k_len=4 keys (as k), got spans over 3. Lower \
the mask for these keys, or pass the layout of q, k and v.
    """
    if own != k_len:
        expected, got = f"spans over k_len={k_len} keys (as k)", f"spans over {own}"
        remedy = "Lower the mask for these keys, or pass the layout of q, k and v"
        raise OptionError("mask", expected=expected, got=got, remedy=remedy)


def forwards_to(target: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function of ``(q, k, v, **options)`` the signature of `target`, to which it forwards them."""

    def decorate(function: F) -> F:
        returned = signature(function).return_annotation
        function.__signature__ = signature(target).replace(return_annotation=returned)  # type: ignore[attr-defined]
        function.__kwdefaults__ = target.__kwdefaults__
        return function

    return decorate


def check_keywords(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise for keywords that neither a function nor the schema has, and name the equivalent option."""
    known = (*(function.__kwdefaults__ or ()), *OF_CALLERS)
    if mistaken := {name: value for name, value in options.items() if name not in known}:
        refuse_keywords(function, mistaken)


def check_layout(front: Front, layout: Any, q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k and v are arrays of the front end with the dims of the layout."""
    if not (isinstance(layout, str) and layout in LAYOUTS):
        raise OptionError(
            "layout", expected=f"one of {', '.join(LAYOUTS)}", got=repr(layout), remedy="Name the order"
        )
    dims = LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        front.check_taken(name, x, front.expected)
        if len(x.shape) != len(dims):
            wanted = f"{len(dims)} dims ({', '.join(dims)}) for layout={layout!r}"
            remedy = "Reshape it, or pass the layout that q, k and v have"
            raise ShapeError(name, expected=wanted, got=shown(tuple(x.shape)), remedy=remedy)


def _check_bounds(bounds: Any, batch: Any, heads: Any, q_len: Any) -> None:
    shape, dtype = bounds.shape, _dtype(bounds)
    # Compare with 1 first: a traced size that is known to be 1 then needs no guard.
    fits = len(shape) == 5 and (sure(shape[0] == 1) or agree(shape[0], batch))
    fits = fits and (sure(shape[1] == 1) or agree(shape[1], heads))
    if not (fits and agree(shape[2], q_len) and shape[3] >= 1 and shape[4] == 2):
        wanted = f"(B|1, H|1, q_len, R, 2) with B={batch}, H={heads}, q_len={q_len}"
        remedy = "Lower the mask for these q and k, or pass their layout"
        raise ShapeError("bounds", expected=wanted, got=f"{shown(tuple(shape))}", remedy=remedy)
    if dtype != "int32":
        remedy = "Convert them to int32, as lowered masks are"
        raise DtypeError("bounds", expected="int32", got=dtype, remedy=remedy)


def _check_kinds(q: Any, k: Any, v: Any) -> None:
    dtype, device = q.dtype, getattr(q, "device", None)
    same_dtype = k.dtype == dtype and v.dtype == dtype
    same_device = getattr(k, "device", None) == device and getattr(v, "device", None) == device
    if same_dtype and same_device and _dtype(q) in _FLOATING:
        return
    dtypes, devices = [_dtype(q), _dtype(k), _dtype(v)], [_device(q), _device(k), _device(v)]
    for name, dtype in zip("qkv", dtypes, strict=True):
        if dtype not in _FLOATING:
            wanted, remedy = f"a floating dtype ({', '.join(_FLOATING)})", f"Convert {name} first"
            raise DtypeError(name, expected=wanted, got=dtype, remedy=remedy)
    remedy = "Convert them to one dtype by .astype, or in torch by .to or autocast"
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        raise DtypeError("q, k and v", expected="one dtype", got=", ".join(dtypes), remedy=remedy)
    if not devices[0] == devices[1] == devices[2]:
        got, remedy = ", ".join(devices), "Move them to one device"
        raise DeviceError("q, k and v", expected="one device", got=got, remedy=remedy)


def _check_sizes(q: Any, k: Any, v: Any) -> None:
    if q.shape[1] == 0 or k.shape[1] == 0:
        broken = "heads", "at least one query and one key head", "Check the heads dim"
    elif q.shape[3] == 0 or v.shape[3] == 0:
        broken = "head_dim", "at least one element", "Check the last dim"
    elif not (q.shape[0] == k.shape[0] and k.shape[0] == v.shape[0]):
        broken = "batch", "the same batch size", "Expand or index the batch dim"
    elif k.shape[1] != v.shape[1]:
        broken = "heads", "as many value as key heads", "Check k and v, and the layout"
    elif k.shape[2] != v.shape[2]:
        broken = "k_len", "as many values as keys", "Check k and v, and the layout"
    elif q.shape[3] != k.shape[3]:
        broken = "head_dim", "the same for q and k", "Check the projections"
    elif q.shape[1] % k.shape[1] != 0:
        grouped = "Grouped-query attention needs q_heads % kv_heads == 0. Check the layout"
        broken = "heads", "a multiple of the key heads as query heads", grouped
    else:
        broken = None
    if broken is not None:
        got = f"q {shown(q.shape)}, k {shown(k.shape)}, v {shown(v.shape)} as (B, H, S, D)"
        raise ShapeError(broken[0], expected=broken[1], got=got, remedy=broken[2])
    for name, length in (("q_len", q.shape[2]), ("k_len", k.shape[2])):
        # A symbolic size cannot be checked now.
        if isinstance(length, int) and length > MAX_LENGTH:
            wanted = f"at most {MAX_LENGTH} (bounds are int32)"
            raise ShapeError(name, expected=wanted, got=f"{length}", remedy="Split the sequence")


def _check_packed(mask: Mask) -> None:
    # A mask without data does not describe documents: all tokens are one sequence.
    if not mask.may_separate() and mask.static_key() is None:
        raise OptionError(
            "mask with layout='thd'",
            expected="one that keeps packed documents apart",
            got=f"{mask!r}, under which they see each other",
            remedy="Combine it by & with documents(cu_seqlens) or segments(ids)",
        )


def _dtype(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _device(x: Any) -> str:
    return str(getattr(x, "device", "cpu"))
