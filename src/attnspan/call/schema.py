"""The arrays and numbers of a call, stated once: names, axes, dtypes, gradients and defaults.

Other modules derive their facts from these rows: the operators' schemas, the rules for vmap, DTensors, ranks
and meshes, and the arguments of kernels. A new option is a row here, a keyword of `attention`, a line in the
reference, and the code of kernels.

Axes are letters: b batch, h query heads, g key heads, q queries, k keys, d elements of a query or key, e
elements of a value, r spans of a query, n distances. Axis 2 has two elements. After a letter, "?" means that
the axis may have size 1, and that all batch elements, heads or queries then share its values. Arrays that a
caller passes may lack leading axes.

Example:
    >>> dim("sinks", "h", 1), dim("bias", "h", 2, DISTANCE), dim("q_index", "b", 1)
    (0, 0, None)
    >>> is_shared("bounds", "b"), is_shared("dropout_seed", "b")
    (True, False)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

#: Kinds of lowered biases. 0 is no bias.
ALIBI, SIGNED_ALIBI, DISTANCE, DENSE = 1, 2, 3, 4


@dataclass(frozen=True)
class Array:
    """A row for an array.

    Attributes:
        name: The argument's name.
        axes: Its axes, separated by spaces. Pairs of a kind of bias and axes, if the kind decides.
        dtype: Its dtype, or "q" for an array with q's dtype or a floating one that is converted.
        grad: Whether it has a gradient.
        optional: Whether it may be None.
    """

    name: str
    axes: str | tuple[tuple[int, str], ...]
    dtype: str = "q"
    grad: bool = False
    optional: bool = False

    @property
    def default(self) -> None:
        """The default of an optional array."""
        return None


@dataclass(frozen=True)
class Number:
    """A row for a number.

    Attributes:
        name: The argument's name.
        type: "float" or "int".
        default: The value that changes nothing. None if the argument is required.
    """

    name: str
    type: str = "float"
    default: Any = None

    @property
    def optional(self) -> bool:
        """Whether the number may be left out."""
        return self.default is not None


Row = Array | Number

#: What every call has.
INPUTS: tuple[Row, ...] = (
    Array("q", "b h q d", grad=True),
    Array("k", "b g k d", grad=True),
    Array("v", "b g k e", grad=True),
    Array("bounds", "b? h? q r 2", "int32"),
    Number("scale"),
)
_BIAS = (ALIBI, "b? h"), (SIGNED_ALIBI, "b? h"), (DISTANCE, "h n"), (DENSE, "b? h? q? k")
#: The options, in the order of `attnspan.call.options.Options` and of the compiled module.
OPTIONS: tuple[Row, ...] = (
    Number("softcap", default=0.0),
    Array("bias", _BIAS, grad=True, optional=True),
    Number("bias_kind", "int", default=0),
    Array("sinks", "h", "float32", grad=True, optional=True),
    Number("dropout_p", default=0.0),
    Array("dropout_seed", "b h", "int64", optional=True),
    Array("q_index", "b? q", "int32", optional=True),
    Array("k_index", "b? k", "int32", optional=True),
)
#: The number of keys that a mask was lowered for, if only the running program knows it.
K_LEN = Array("k_len", "", "int64", optional=True)
#: What a call returns.
RESULTS: tuple[Array, ...] = (Array("out", "b h q e", grad=True), Array("lse", "b h q", "float64", grad=True))

#: The kind of a bias by the field of its description that has its values.
KIND_OF_FIELD = {"slopes": ALIBI, "table": DISTANCE, "values": DENSE}


def arrays(rows: Iterable[Row]) -> tuple[Array, ...]:
    """The rows of arrays."""
    return tuple(row for row in rows if isinstance(row, Array))


def names(rows: Iterable[Row]) -> tuple[str, ...]:
    """The names of rows, in their order."""
    return tuple(row.name for row in rows)


def with_gradient(rows: Iterable[Row]) -> tuple[str, ...]:
    """The names of the arrays that have a gradient."""
    return tuple(row.name for row in arrays(rows) if row.grad)


@cache
def axes(name: str, kind: int = 0) -> tuple[str, ...]:
    """The axes of an array, such as ("b?", "q"). ``kind`` is the kind of the call's bias.

    The gradient of an array has its name after a "d", and its axes.
    """
    rows = {row.name: row for row in arrays((*INPUTS, *OPTIONS, K_LEN, *RESULTS))}
    row = rows[name if name in rows else name.removeprefix("d")]
    words = row.axes if isinstance(row.axes, str) else dict(row.axes).get(kind, "")
    return tuple(words.split())


@cache
def dim(name: str, letter: str, rank: int | None = None, kind: int = 0) -> int | None:
    """The dim of an array that is axis "b" or "h", or None if the array has no such axis.

    For "h" it is the axis of query or key heads. ``rank`` is the number of the array's dims, if its leading
    axes may be missing.
    """
    own = axes(name, kind)
    missing = 0 if rank is None else len(own) - rank
    letters = ("h", "g") if letter == "h" else (letter,)
    at = next((i - missing for i, axis in enumerate(own) if axis[0] in letters), -1)
    return at if at >= 0 else None


@cache
def is_shared(name: str, letter: str, kind: int = 0) -> bool:
    """Whether an axis of an array may have size 1 and be shared."""
    return letter + "?" in axes(name, kind)
