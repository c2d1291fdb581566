"""Options of a call besides its mask, checked and lowered for every framework.

The score of query i and its visible key j is x_j = scale * q_i . k_j. A softcap limits x_j, and a bias is
added to it. Sinks join the denominator of the softmax, and dropout removes weights from the softmax's result.
docs/options.md has the formulas. Positions are global indices, as for masks.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypedDict, TypeVar

import numpy as np

from attnspan.base.arrays import INT32_MAX, arrays_for, is_array, is_integer, kind_of
from attnspan.errors import DtypeError, OptionError, expect, shown
from attnspan.masks import Prepared

from . import schema
from .biases import Bias as Bias
from .biases import alibi as alibi
from .biases import alibi_slopes as alibi_slopes
from .biases import dense_bias as dense_bias
from .biases import is_floating, to_float
from .biases import relative as relative
from .biases import t5_buckets as t5_buckets
from .dropout import dropout_seeds as dropout_seeds
from .schema import ALIBI as ALIBI
from .schema import DENSE as DENSE
from .schema import DISTANCE as DISTANCE
from .schema import SIGNED_ALIBI as SIGNED_ALIBI

#: Kernels compute in float32.
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_BELOW_1 = 1 - 2.0**-53

A = TypeVar("A")
M = TypeVar("M")


class Keywords(TypedDict, Generic[A, M], total=False):
    """Keywords of ``attention`` except ``return_lse``, for type checkers, with arrays A and masks M."""

    mask: M | None
    scale: float | None
    softcap: float | None
    bias: Bias | A | None
    sinks: A | None
    dropout_p: float
    dropout_seed: A | None
    q_index: A | None
    k_index: A | None
    layout: Literal["bhsd", "bshd", "thd"]
    backend: str | None


_PUBLIC = tuple(row for row in schema.OPTIONS if getattr(row, "unset", None) is not schema.HIDDEN)
#: The options that callers pass.
OF_CALLERS = schema.names(_PUBLIC)

if TYPE_CHECKING:

    class Options(tuple[Any, ...]):
        """The fields are the rows of `schema.OPTIONS`."""

        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, *args: Any, **kwargs: Any) -> Options: ...
        def __getattr__(self, name: str) -> Any: ...

    class _Given:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    Options = namedtuple(
        "Options", schema.names(schema.OPTIONS), defaults=[row.default for row in schema.OPTIONS]
    )
    _Given = make_dataclass(
        "_Given",
        [(row.name, Any, field(default=getattr(row, "unset", None))) for row in _PUBLIC],
        frozen=True,
    )

Options.__doc__ = """Options in the form and order of operators and kernels: the rows of `schema.OPTIONS`.

Arrays belong to the framework. Float arrays are float32, or float64 for a float64 q (math backend and
reference only).

Attributes:
    softcap: Number c: x becomes c * tanh(x / c), before the bias. 0 means no softcap.
    bias: Depends on the kind: slopes (B|1, H), values by distance (H, 2L + 1), or dense values
        (B|1, H|1, Sq|1, Sk). Dense values are float32, bfloat16 or float16 with a unit last stride. None if
        the kind is 0.
    bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE.
    sinks: Shape (H,): the logit of each head's sink, or None.
    dropout_p: Probability that a weight is dropped. 0 means no dropout.
    dropout_seed: int64, shape () for one seed, or (B, H) for one per batch element and head. In JAX
        uint32, shape (B, H, 2), with low and high words. None without dropout.
    q_index: int32, shape (B|1, Sq): global indices of the queries. None means k_len - q_len + i for query i.
    k_index: int32, shape (B|1, Sk): global indices of the keys, in any order. None means 0..k_len-1.

Example:
    >>> Options(softcap=30.0).bias_kind
    0
"""

_LEADING = tuple(row for row in schema.OPTIONS if not row.serves)


def changes(options: Options) -> bool:
    """Whether a call with these options differs from a call without options."""
    for row in _LEADING:
        x = getattr(options, row.name)
        if x is not None and (isinstance(row, schema.Array) or x != row.default):
            return True
    return False


@dataclass(frozen=True)
class Given(_Given):
    """Options as the caller of ``attention`` passed them. The rows of `schema.OPTIONS` are its fields.

    Example:
        >>> print(Given(softcap=30.0, bias=alibi([0.5, 0.25])))
        softcap 30, bias alibi(float64[2])
    """

    def keywords(self) -> dict[str, Any]:
        """Options as keywords of ``attention``."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def replacing(self, **values: Any) -> Given:
        """The same options with other values for some of them."""
        return Given(**{**self.keywords(), **values})

    def names(self) -> tuple[str, ...]:
        """Names of the options that change the scores or weights, for `Problem`."""
        none = isinstance(self.dropout_p, int | float) and self.dropout_p == 0
        dropout = None if none else self.dropout_seed
        found = [row.name for row in _LEADING if row.name != "dropout_p"]
        found = [name for name in found if getattr(self, name) is not None]
        return (*found, *(["dropout"] if dropout is not None else []))

    def __str__(self) -> str:
        words = [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        if self.bias is not None:
            words += [f"bias {dense_bias(self.bias) if is_array(self.bias) else self.bias!r}"]
        words += ["sinks"] if self.sinks is not None else []
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        return ", ".join(words) or "none"

    def lower(self, front: Any, q: Any, k: Any, placed: Prepared | None, fixed: bool) -> Options | None:
        """Check the options against the call, and bring them into the form of kernels.

        Args:
            front: The framework's checks, an `attnspan.call.Front`.
            q: Shape (B, H, S, D), or any object with q's shape and dtype.
            k: The same for the keys.
            placed: The lowered mask, with the indices of queries and keys that are not the default ones. None
                if a plan has the mask.
            fixed: Whether the mask was lowered before the call. Such a mask did not read the call's indices.

        Returns:
            The options. None if the caller passed none.

        Raises:
            ValueError: Values, sizes or devices do not fit, or no option would read the indices.
            TypeError: A value has the wrong type.
        """
        if self.softcap is not None:
            wanted, remedy = "a positive, finite number (1e-30 or more)", "Leave it out for no softcap"
            check_number("softcap", self.softcap, 1e-30, FLOAT32_MAX, wanted, remedy)
        wide = str(q.dtype).endswith("float64")
        bias, kind = (None, 0) if self.bias is None else self._lower_bias(front, q, k, wide)
        others = {}
        for row in _PLAIN_ARRAYS:
            if getattr(self, row.name) is not None:
                others[row.name] = self._lower_array(front, q, k, row, wide)
        for number in _PLAIN_NUMBERS:
            if (x := getattr(self, number.name)) != number.unset:
                wanted = "a finite float32 number"
                check_number(number.name, x, -FLOAT32_MAX, FLOAT32_MAX, wanted, "Leave it out for none")
                others[number.name] = x
        drops = self.dropout_seed is not None or type(self.dropout_p) is not float or self.dropout_p != 0.0
        seed = self._lower_dropout(front, q) if drops else None
        positional = seed is not None or kind not in (0, DENSE)
        q_index = k_index = None
        unread = fixed and (self.q_index is not None or self.k_index is not None)
        if placed is not None and (positional or unread):
            q_index, k_index = self._indices(front, q, k, placed, fixed, positional)
        if self.softcap is None and bias is None and seed is None and not others:
            return None
        return Options(
            softcap=0.0 if self.softcap is None else self.softcap,
            bias=bias,
            bias_kind=kind,
            dropout_p=0.0 if seed is None else self.dropout_p,
            dropout_seed=seed,
            q_index=q_index,
            k_index=k_index,
            **others,
        )

    def _lower_bias(self, front: Any, q: Any, k: Any, wide: bool) -> tuple[Any, int]:
        bias: Any = dense_bias(self.bias) if front.takes(self.bias) else self.bias
        if not isinstance(bias, Bias):
            wanted = f"{front.an_array}, or the result of alibi(...), relative(...) or dense_bias(...)"
            remedy = f"Other functions of the scores are not supported: pass their values as {front.an_array}"
            raise DtypeError("bias", expected=wanted, got=type(bias).__name__, remedy=remedy)
        for each in fields(bias):
            front.check_place(f"bias: {each.name}", getattr(bias, each.name), q)
        (batch, heads, q_len, _), like = q.shape, front.like(q)
        lowered, kind = bias.lower(
            batch=batch, heads=heads, q_len=q_len, k_len=k.shape[2], like=like, wide=wide
        )
        # Kernels read q's dtype or float32, and float32 holds every value of another dtype.
        if kind == DENSE and not wide and lowered.dtype != q.dtype:
            lowered = to_float(arrays_for([lowered]), lowered, wide)
        return lowered, kind

    def _lower_array(self, front: Any, q: Any, k: Any, row: schema.Array, wide: bool) -> Any:
        """A floating array whose shape the schema tells, as float32 (float64 if ``wide``)."""
        x, name, noun = getattr(self, row.name), row.name, front.noun
        front.check_taken(name, x, f"a floating {noun}")
        remedy = "Convert it to float32"
        expect(is_floating(x), name, f"a floating {noun}", kind_of(x), remedy, error=DtypeError)
        sizes = dict(zip("bhqdgk", (*q.shape, *k.shape[1:3]), strict=True))
        remedy = f"Reshape it, or select the entries of this call, as in {name}[:q_heads]"
        schema.check_shape(name, x, 0, sizes, row.words, remedy)
        front.check_place(name, x, q)
        return to_float(arrays_for([front.like(q)]), x, wide)

    def _lower_dropout(self, front: Any, q: Any) -> Any:
        """The seed, or None if nothing is dropped."""
        p, seed = self.dropout_p, self.dropout_seed
        check_dropout_p(p)
        if seed is None:
            expect(p == 0, "dropout_seed", f"{front.seed} with dropout_p={{}}", None, front.new_seed, p)
            return None
        lowered = front.lower_seed(seed, q.shape[0], q.shape[1])
        front.check_place("dropout_seed", seed, q)
        return None if p == 0 else lowered

    def _indices(
        self, front: Any, q: Any, k: Any, placed: Any, fixed: bool, positional: bool
    ) -> tuple[Any, Any]:
        """Global indices of queries and keys for an option that reads them: the call's, else the mask's."""
        expect(
            positional,
            "q_index, k_index",
            "None with a mask that is already lowered and no option that depends on positions",
            "indices and a lowered mask",
            "Pass them to prepare() or spans(). Only alibi, relative and dropout read them here",
        )
        q_index, k_index = placed.q_index, placed.k_index
        if fixed:
            q_index = _index(front, "q_index", self.q_index, q, q.shape[2], q_index)
            k_index = _index(front, "k_index", self.k_index, q, k.shape[2], k_index)
        if placed.bare and self.q_index is None:
            wanted = "the queries' indices with bare spans, because an option needs positions"
            remedy = "Pass the result of prepare() or spans(), which knows the indices, or pass q_index"
            expect(q.shape[2] == k.shape[2], "q_index", wanted, None, remedy)
        arrays = arrays_for([front.like(q)])
        indices = [arrays.asarray(x, "int32") if isinstance(x, np.ndarray) else x for x in (q_index, k_index)]
        return indices[0], indices[1]


#: Rows that need no code of their own: the schema tells their shape and default.
_OWN_CODE = ("softcap", "bias", "bias_kind", "dropout_p", "dropout_seed", "q_index", "k_index")
_PLAIN = [row for row in schema.OPTIONS if row.name not in _OWN_CODE]
_PLAIN_ARRAYS = schema.arrays(_PLAIN)
_PLAIN_NUMBERS = [row for row in _PLAIN if isinstance(row, schema.Number)]
assert all(row.dtype == "float32" for row in _PLAIN_ARRAYS), "Given.lower must convert other dtypes"

#: Options of a call without any. To build them at each call would take a tenth of the time of a small call.
NO_OPTIONS = Given()


def check_number(what: str, x: Any, low: float, high: float, expected: str, remedy: str) -> None:
    """Raise unless `x` is a Python number from `low` to `high`."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        convert = "Multiply q by it if it is an array, or call .item()"
        convert = convert if what == "scale" else "Call .item() if it is an array"
        raise DtypeError(what, expected="a Python number", got=type(x).__name__, remedy=convert)
    if not low <= x <= high:
        raise OptionError(what, expected=expected, got=shown(x), remedy=remedy)


def check_dropout_p(p: Any) -> None:
    """Raise unless `p` is a number in [0, 1)."""
    remedy = "It is the share of weights to drop. A rate of 1 would drop every weight"
    check_number("dropout_p", p, 0, _BELOW_1, "at least 0 and below 1", remedy)


def _index(front: Any, name: str, index: Any, q: Any, length: Any, own: Any) -> Any:
    """The call's indices as int32 (B|1, length), or the mask's indices if the call has none."""
    if index is None:
        return own
    wanted = f"an integer {front.noun}"
    front.check_taken(name, index, wanted)
    expect(is_integer(index), name, wanted, kind_of(index), "Pass int32 or int64 indices", error=DtypeError)
    front.check_place(name, index, q)
    sizes, remedy = {"b": q.shape[0], name[0]: length}, "Pass such indices, with or without B"
    schema.check_shape(name, index, 0, sizes, "a global index for each query or key", remedy)
    arrays = arrays_for([index])
    fits = str(index.dtype).rpartition(".")[2] in ("int8", "uint8", "int16", "uint16", "int32")
    if not fits and arrays.concrete(index) and (values := arrays.to_numpy(index)).size:
        low, high = int(values.min()), int(values.max())
        expect(max(-low, high) <= INT32_MAX, name, "int32 indices", f"{low} to {high}", "Use smaller ones")
    return arrays.to_int32(index if len(index.shape) == 2 else index[None])
