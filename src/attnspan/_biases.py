"""Position biases and dense ones: descriptions, and how each becomes the array that kernels read."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np

from ._mistakes import refuse_truth_of_bias
from ._pytrees import Node
from .arrays import NUMPY, Array, Arrays, arrays_for, is_array, own
from .errors import DtypeError, OptionError, ShapeError, shown

ALIBI, SIGNED_ALIBI, DISTANCE, DENSE = 1, 2, 3, 4

#: A dense bias below this hides its key, as -inf does: the least float32 and bfloat16 numbers, with which
#: masks are often filled, are meant so. In units of log2 it is beyond float32.
HIDES = -2.36e38
"""Kinds of lowered biases; 0 is none."""


class Bias(Node):
    """What is added to the scores: an immutable description, free of any framework.

    Biases are made by `attnspan.alibi`, `attnspan.relative` and `attnspan.dense_bias`.

    Example:
        >>> from attnspan import alibi
        >>> alibi([0.5, 0.25])
        alibi(float64[2])
    """

    def lower(
        self, *, batch: int, heads: int, q_len: int, k_len: int, like: Array = None, wide: bool = False
    ) -> tuple[Array, int]:
        """The array that kernels read, and its kind.

        Differentiable and traceable: frameworks see plain array functions of the bias's own arrays.

        Args:
            batch: number of batch rows.
            heads: number of query heads.
            q_len: number of queries.
            k_len: number of keys.
            like: an array whose framework and device are those of the result; None for those of the bias's
                own arrays.
            wide: float64 instead of float32, for a float64 q.

        Returns:
            ALIBI or SIGNED_ALIBI with slopes (B|1, H), DISTANCE with values (H, 2L + 1) by distance from -L
            to L, or DENSE with values (B|1, H|1, Sq|1, Sk) in their own dtype, or in float32 where that is a
            float64 (`wide` makes them float64).

        Raises:
            ShapeError: for parameters that do not fit the problem.

        Example:
            >>> from attnspan import alibi
            >>> lowered, kind = alibi([0.5, 0.25]).lower(batch=1, heads=2, q_len=3, k_len=3)
            >>> lowered.tolist(), kind
            ([[0.5, 0.25]], 1)
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it is lowered")

    def __bool__(self) -> NoReturn:
        refuse_truth_of_bias(self)

    def _arrays(self, like: Array) -> Arrays:
        own = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return arrays_for([like, *own], what="bias")


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    slopes: Array
    signed: bool = False

    def lower(
        self, *, batch: int, heads: int, q_len: int, k_len: int, like: Array = None, wide: bool = False
    ) -> tuple[Array, int]:
        del q_len, k_len
        shape = self.slopes.shape
        if shape[-1] != heads or (len(shape) == 2 and shape[0] != 1 and shape[0] != batch):
            raise ShapeError(
                "alibi: slopes",
                expected=f"({heads},) or ({batch}, {heads}): a slope for each query head",
                got=shown(shape),
                remedy="Pass alibi_slopes(heads), or slopes of your own",
            )
        slopes = to_float(self._arrays(like), self.slopes, wide)
        return (slopes if len(shape) == 2 else slopes[None]), SIGNED_ALIBI if self.signed else ALIBI

    def __repr__(self) -> str:
        return f"alibi({short(self.slopes)}{', signed=True' if self.signed else ''})"


@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    table: Array
    buckets: Array | None = None

    def lower(
        self, *, batch: int, heads: int, q_len: int, k_len: int, like: Array = None, wide: bool = False
    ) -> tuple[Array, int]:
        del batch, q_len, k_len
        if self.table.shape[0] != heads:
            raise ShapeError(
                "relative: table",
                expected=f"({heads}, n): a row for each query head",
                got=shown(self.table.shape),
                remedy="Pass one row per query head; transpose an embedding's weight of (n, heads)",
            )
        arrays = self._arrays(like)
        table = to_float(arrays, self.table, wide)
        if self.buckets is None:
            return table, DISTANCE
        # A gather of values that nobody could check: a negative index fails too, it never means the end.
        index = arrays.asarray(self.buckets, "int64")
        index = arrays.where(index < 0, self.table.shape[1], index)
        return arrays.take(table, index, 1), DISTANCE

    def __repr__(self) -> str:
        buckets = "" if self.buckets is None else f", {short(self.buckets)}"
        return f"relative({short(self.table)}{buckets})"


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(Bias):
    values: Array

    def lower(
        self, *, batch: int, heads: int, q_len: int, k_len: int, like: Array = None, wide: bool = False
    ) -> tuple[Array, int]:
        given = tuple(self.values.shape)
        shape = (1,) * (4 - len(given)) + given
        # 1 first: a traced size that is known to be 1 then needs no guard against the problem's.
        fits = all(x == 1 or x == full for x, full in zip(shape[:3], (batch, heads, q_len), strict=True))
        if not fits or shape[3] != k_len:
            raise ShapeError(
                "dense bias",
                expected=f"(B|1, H|1, q_len|1, k_len) with B={batch}, H={heads}, q_len={q_len}, "
                f"k_len={k_len}",
                got=shown(given),
                remedy="Give it that shape; axes may be missing in front, or be 1, but for the keys",
            )
        arrays = self._arrays(like)
        values = _moved(arrays, self.values)
        if wide or str(values.dtype).endswith("float64"):
            values = to_float(arrays, values, wide)
        return values.reshape(shape), DENSE

    def __repr__(self) -> str:
        return f"dense_bias({short(self.values)})"


def floats(what: str, x: Any, ranks: tuple[int, ...]) -> Array:
    """Check that `x` is a floating array of one of the ranks; lists become NumPy arrays."""
    x = readable(np.asarray(x, np.float64) if isinstance(x, (list, tuple)) else x)
    if not is_array(x) or not _is_floating(x):
        got = str(x.dtype) if is_array(x) else type(x).__name__
        raise DtypeError(what, expected="a floating array", got=got, remedy="Convert it to float32")
    if len(x.shape) not in ranks:
        raise ShapeError(
            what,
            expected=f"{' or '.join(map(str, ranks))} axes",
            got=f"shape {shown(x.shape)}",
            remedy="Drop or add axes; heads come before distances, a batch axis comes first",
        )
    return x


def readable(x: Any) -> Any:
    """`x` itself, or a tensor where torch's compiler reads this code, which cannot ask NumPy for a dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, np.ndarray) and torch.compiler.is_compiling():
        return torch.as_tensor(x)
    return x


def check_buckets(table: Array, buckets: Array) -> None:
    """Raise for an even number of buckets, and for indices outside the table where they can be read."""
    if len(buckets.shape) != 1 or buckets.shape[0] % 2 == 0:
        raise ShapeError(
            "relative: buckets",
            expected="(2L + 1,): the column of the table for each distance from -L to L",
            got=shown(buckets.shape),
            remedy="Take t5_buckets(...), or an odd number of columns with that of distance 0 in the middle",
        )
    arrays = arrays_for([table, buckets], what="relative: table and buckets")
    if not arrays.concrete(buckets):
        return
    values, columns = arrays.to_numpy(buckets), table.shape[1]
    if values.min() < 0 or values.max() >= columns:
        raise OptionError(
            "relative: buckets",
            expected=f"columns of the table, 0 to {columns - 1}",
            got=f"{values.min()} to {values.max()}",
            remedy="Make the table wider, or the buckets fewer",
        )


def to_float(arrays: Arrays, x: Array, wide: bool) -> Array:
    """`x` as float32 or float64 in the framework of `arrays`, differentiably."""
    name = "float64" if wide else "float32"
    x = _moved(arrays, x)
    if arrays.name == "torch":
        torch = sys.modules["torch"]
        return x.to(torch.float64 if wide else torch.float32)
    return x.astype(name)


def short(x: Array) -> str:
    """Dtype and shape of an array, as reprs show them."""
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join([shown(n) for n in x.shape])}]"


def _moved(arrays: Arrays, x: Array) -> Array:
    """A NumPy array as one of the framework; any other is there already."""
    if arrays.name == "numpy" or not isinstance(x, np.ndarray):
        return x
    if arrays.name == "torch":
        return sys.modules["torch"].as_tensor(own(x), device=arrays.device)  # type: ignore[attr-defined]
    return arrays.xp.asarray(own(x))


def _is_floating(x: Array) -> bool:
    # By name: ml_dtypes' bfloat16, which JAX brings, is no floating dtype to NumPy.
    return "float" in str(x.dtype)


def make_slopes(heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """See `attnspan.alibi_slopes`."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    # Between two powers of two the paper's code takes every other slope of the next one.
    slopes += [2.0 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.asarray(slopes, np.float32)


def make_t5_buckets(
    num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """See `attnspan.t5_buckets`."""
    sides = num_buckets // 2 if bidirectional else num_buckets
    exact = sides // 2
    behind = np.array([_bucket(d, sides, exact, max_distance) for d in range(max_distance + 1)], np.int32)
    ahead = behind[1:] + sides if bidirectional else np.zeros(max_distance, np.int32)
    return NUMPY.concat([behind[::-1], ahead])  # type: ignore[no-any-return]


def _bucket(distance: int, sides: int, exact: int, max_distance: int) -> int:
    """Small distances have a bucket each, the others share the rest by logarithm."""
    if distance < exact:
        return distance
    # exact + floor(log(distance / exact) / log(max_distance / exact) * coarse), in integers.
    coarse, bucket = sides - exact, 0
    while bucket + 1 < coarse and distance**coarse * exact ** (bucket + 1) >= (
        max_distance ** (bucket + 1) * exact**coarse
    ):
        bucket += 1
    return exact + bucket
