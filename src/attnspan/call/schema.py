"""The arrays and numbers of a call, stated once: names, axes, dtypes, gradients and defaults.

Other modules derive their facts from these rows: the operators' schemas, the rules for vmap, DTensors, ranks
and meshes, and the arguments of kernels. A new option is a row here, a keyword of `attention`, a line in the
reference, and the code of kernels.

Axes are letters: b batch, h query heads, g key heads, q queries, k keys, d elements of a query or key, e
elements of a value, r spans of a query, n distances. Axis 2 has two elements. After a letter, "?" means that
the axis may have size 1, and that all batch elements, heads or queries then share its values. Arrays that a
caller passes may lack these axes.

Example:
    >>> dim("sinks", "h", 1), dim("bias", "h", 2, DISTANCE), dim("q_index", "b", 1)
    (0, 0, None)
    >>> is_shared("bounds", "b"), is_shared("dropout_seed", "b")
    (True, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.base.recorded import agree, sure
from attnspan.errors import ShapeError, expect

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
        serves: Whether it only serves another option. By itself, it changes nothing.
        single: Whether it may also be one value, of shape ().
        words: Description of its elements, for errors.
    """

    name: str
    axes: str | tuple[tuple[int, str], ...]
    dtype: str = "q"
    grad: bool = False
    optional: bool = False
    serves: bool = False
    single: bool = False
    words: str = ""
    default = None


@dataclass(frozen=True)
class Number:
    """A row for a number.

    Attributes:
        name: The argument's name.
        type: "float", "int", "bool" or "str".
        default: The value that changes nothing. None if the argument is required.
        serves: Whether it only serves another option. By itself, it changes nothing.
        unset: The default of `attention`, which stands for `default`. `HIDDEN` if it is no keyword of
            `attention`.
    """

    name: str
    type: str = "float"
    default: Any = None
    serves: bool = False
    unset: Any = None
    axes = ""


Row = Array | Number
HIDDEN = object()

#: The arguments that every call has.
INPUTS: tuple[Row, ...] = (
    Array("q", "b h q d", grad=True),
    Array("k", "b g k d", grad=True),
    Array("v", "b g k e", grad=True),
    Array("bounds", "b? h? q r 2", "int32"),
    Number("scale"),
)
_BIAS = (ALIBI, "b? h"), (SIGNED_ALIBI, "b? h"), (DISTANCE, "h n"), (DENSE, "b? h? q? k")
#: The options, in the order of `attnspan.call.options.Options` and of the compiled module. Add new ones at
#: the end, because the compiled module and saved programs read them by their places.
OPTIONS: tuple[Row, ...] = (
    Number("softcap", default=0.0),
    Array("bias", _BIAS, grad=True, optional=True),
    Number("bias_kind", "int", default=0, serves=True, unset=HIDDEN),
    Array("sinks", "h", "float32", grad=True, optional=True, words="a logit for each query head"),
    Number("dropout_p", default=0.0, unset=0.0),
    Array("dropout_seed", "b h", "int64", optional=True, serves=True, single=True),
    Array("q_index", "b? q", "int32", optional=True, serves=True),
    Array("k_index", "b? k", "int32", optional=True, serves=True),
)
#: The number of keys that a mask was lowered for, if only the running program knows it.
K_LEN = Array("k_len", "", "int64", optional=True)
#: The backend that runs the call.
BACKEND = Number("backend", "str", default="cpu")
#: The arguments of a forward pass.
FORWARD: tuple[Row, ...] = (*INPUTS, *OPTIONS, K_LEN, BACKEND)
#: The results of a call.
RESULTS: tuple[Array, ...] = (Array("out", "b h q e", grad=True), Array("lse", "b h q", "float64", grad=True))

#: The arguments of a backward pass. A gradient whose "want_" number is False is not computed.
BACKWARD: tuple[Row, ...] = (
    Array("dout", "b h q e"),
    Array("dlse", "b h q", "float32", optional=True),
    *(row for row in INPUTS if isinstance(row, Array)),
    *RESULTS,
    *(row for row in INPUTS if isinstance(row, Number)),
    *OPTIONS,
    Number("want_dbias", "bool", default=False),
    BACKEND,
)

#: Names of axes in errors, by letter.
_WORDS = {"b": "B", "h": "H", "q": "q_len", "k": "k_len"}
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


def by_name(rows: Sequence[Row], args: Sequence[Any]) -> dict[str, Any]:
    """Arguments, keyed by name. Missing trailing arguments get their defaults."""
    # A loop, because each value of a generator would be a Python call.
    given, count = {}, len(args)
    for at, row in enumerate(rows):
        given[row.name] = args[at] if at < count else row.default
    return given


def axes(name: str, kind: int = 0) -> tuple[str, ...]:
    """The axes of an array, such as ("b?", "q"). ``kind`` is the kind of the call's bias."""
    found = _AXES[name]
    return found if isinstance(found, tuple) else found.get(kind, ())


# Split once, because calls with options read them.
_AXES: dict[str, Any] = {
    row.name: tuple(row.axes.split())
    if isinstance(row.axes, str)
    else {kind: tuple(words.split()) for kind, words in row.axes}
    for row in (*BACKWARD, K_LEN)
}


def dim(name: str, letter: str, rank: int | None = None, kind: int = 0) -> int | None:
    """The dim of an array that is axis "b" or "h", or None if the array has no such axis.

    For "h", it is the axis of the query heads or of the key heads. ``rank`` is the number of the array's
    dims, if its leading axes may be missing.
    """
    own = axes(name, kind)
    missing = 0 if rank is None else len(own) - rank
    letters = ("h", "g") if letter == "h" else (letter,)
    at = next((i - missing for i, axis in enumerate(own) if axis[0] in letters), -1)
    return at if at >= 0 else None


def check_shape(
    name: str, x: Any, kind: int, sizes: Mapping[str, Any], words: str, remedy: str, what: str = ""
) -> None:
    """Raise unless a caller's array has its axes, of these sizes by letter. Other axes have any size.

    An axis with a "?" may have size 1. At the beginning, it may also be missing.
    """
    own, shape = axes(name, kind), tuple(x.shape)
    missing = len(own) - len(shape)
    fits = missing == 0 or (missing > 0 and "" not in [axis[1:] for axis in own[:missing]])
    for axis, size in zip(own[missing:] if missing > 0 else own, shape, strict=False):
        whole = sizes.get(axis[0], size)
        # Compare with 1 first: a traced size that is known to be 1 then needs no guard.
        fits = fits and (whole is size or (axis[1:] and sure(size == 1)) or agree(size, whole))
    if fits:
        return
    known = [axis[0] for axis in own if axis[0] in sizes]
    wanted = ", ".join([_WORDS.get(axis[0], axis[0]) + "|1" * len(axis[1:]) for axis in own])
    wanted = (
        f"({wanted}{',' * (len(own) == 1)}) with {', '.join([_WORDS[x] + '={}' for x in known])}: {words}"
    )
    expect(False, what or name, wanted, shape, remedy, *[sizes[x] for x in known], error=ShapeError)


def is_shared(name: str, letter: str, kind: int = 0) -> bool:
    """Whether an axis of an array may have size 1 and be shared."""
    return letter + "?" in axes(name, kind)
