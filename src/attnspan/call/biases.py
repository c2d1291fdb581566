"""Biases of the scores: immutable descriptions, and their conversion to the arrays that kernels read.

`schema.py` states the kinds, their axes and their gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import NUMPY, Array, Arrays, arrays_for, is_array, kind_of, own
from attnspan.base.mistakes import refuse_truth_of_bias
from attnspan.base.plain import check_plain, check_strided
from attnspan.base.pytrees import Node, arrays_in
from attnspan.errors import DtypeError, ShapeError, expect

from . import schema
from .schema import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI

#: A dense bias below this hides its key, as -inf does: masks are often filled with the lowest float32 or
#: bfloat16 number. In units of log2 it is beyond float32.
HIDES = -2.36e38


class Bias(Node):
    """Bias of the scores, the base of `attnspan.alibi`, `attnspan.relative` and `attnspan.dense_bias`.

    Example:
        >>> from attnspan import alibi
        >>> alibi([0.5, 0.25])
        alibi(float64[2])
    """

    def lower(
        self, *, batch: int, heads: int, q_len: int, k_len: int, like: Array = None, wide: bool = False
    ) -> tuple[Array, int]:
        """The array that kernels read, and its kind. The conversion is differentiable and traceable.

        The result has the framework and device of ``like``, or of the bias's arrays if ``like`` is None. It
        is float32, or float64 if ``wide`` (for a float64 q).

        Returns:
            One of these pairs of an array and a kind:
            slopes (B|1, H) with ALIBI or SIGNED_ALIBI,
            values (H, 2L + 1) by distance from -L to L with DISTANCE,
            values (B|1, H|1, Sq|1, Sk) in their own dtype (float64 only if `wide`) with DENSE.

        Raises:
            ShapeError: The parameters do not fit the problem.
        """
        arrays = arrays_for([like, *arrays_in(self)], what="bias")
        return self._lower(arrays, wide, {"b": batch, "h": heads, "q": q_len, "k": k_len})

    def _lower(self, arrays: Arrays, wide: bool, sizes: Mapping[str, int]) -> tuple[Array, int]:
        raise NotImplementedError(f"{type(self).__name__} must define _lower")

    def __bool__(self) -> NoReturn:
        refuse_truth_of_bias(self)


class alibi(Bias):
    """Attention with linear biases, Press et al. 2022 (arXiv:2108.12409), section 3.

    The bias of query i and key j, by global index, is -slope * |j - i|. If ``signed``, it is slope * (j - i).
    The two are equal under a causal mask.

    Args:
        slopes: Floating, shape (H,) or (B, H): one slope for each query head, with gradient.
        signed: Whether to keep the sign of the distance.

    Raises:
        DtypeError: The slopes are not floating.
        ShapeError: The slopes have neither 1 nor 2 dims.

    Example:
        >>> alibi(alibi_slopes(8))
        alibi(float32[8])
    """

    slopes: Array
    signed: bool = False

    def __post_init__(self) -> None:
        self._check(slopes=partial(_floats, ranks=(1, 2)), signed=lambda _, signed: bool(signed))

    def _lower(self, arrays: Arrays, wide: bool, sizes: Mapping[str, int]) -> tuple[Array, int]:
        several, words = self.slopes.ndim > 1, "a slope for each query head"
        remedy = "Pass alibi_slopes(heads) or your own slopes, with or without B"
        if several:
            remedy += ". Slopes for each packed document are not supported: pad the documents to a batch"
        schema.check_shape("bias", self.slopes, ALIBI, sizes, words, remedy, "alibi: slopes")
        slopes = to_float(arrays, self.slopes, wide)
        return (slopes if several else slopes[None]), SIGNED_ALIBI if self.signed else ALIBI


class relative(Bias):
    """A bias by distance: T5's (Raffel et al. 2020, section 2.1), or any table.

    The distance of query i and key j, by global index, is j - i. Distances beyond -L..L use the value at the
    end.

    Args:
        table: Floating, shape (H, n), with gradient: a row for each query head. T5's embedding is its
            transpose.
        buckets: Integer, shape (2L + 1,): the column of the table for each distance from -L to L. If None,
            the table has one column for each distance, and n = 2L + 1.

    Raises:
        DtypeError: The table is not floating, or the buckets are not integers.
        ShapeError: The table is not two-dimensional, or the number of distances is even.
        OptionError: A bucket refers to a column that the table does not have. If the buckets cannot be read,
            such as in compiled code, the gather raises an error or returns NaN instead.

    Example:
        >>> relative(np.zeros((4, 32), "float32"), t5_buckets())
        relative(float32[4, 32], buckets=int32[257])
    """

    table: Array
    buckets: Array | None = None

    def __post_init__(self) -> None:
        self._check(table=partial(_floats, ranks=(2,)))
        odd = "an odd number of columns, with distance 0 in the middle"
        if self.buckets is None:
            wanted, remedy = "(H, 2L + 1): a column for each distance from -L to L", f"Pass buckets, or {odd}"
            _fits(self.table.shape[1] % 2 == 1, "relative: table", wanted, self.table, remedy)
            return
        self._set(buckets=checks.integers("relative: buckets", _readable(self.buckets), (1,)))
        wanted = "(2L + 1,): the column of the table for each distance from -L to L"
        remedy = f"Pass t5_buckets(...), or {odd}"
        _fits(self.buckets.shape[0] % 2 == 1, "relative: buckets", wanted, self.buckets, remedy)
        arrays = arrays_for([self.table, self.buckets], what="relative: table and buckets")
        if arrays.concrete(self.buckets):
            values = arrays.to_numpy(self.buckets)
            low, high, top = int(values.min()), int(values.max()), self.table.shape[1] - 1
            wanted, remedy = f"columns of the table, 0 to {top}", "Make the table wider, or the buckets fewer"
            expect(low >= 0 and high <= top, "relative: buckets", wanted, f"{low} to {high}", remedy)

    def _lower(self, arrays: Arrays, wide: bool, sizes: Mapping[str, int]) -> tuple[Array, int]:
        remedy = "Pass one row per query head. Transpose an embedding's weight of shape (n, heads)"
        words = "a row for each query head"
        schema.check_shape("bias", self.table, DISTANCE, sizes, words, remedy, "relative: table")
        table = to_float(arrays, self.table, wide)
        if self.buckets is None:
            return table, DISTANCE
        # These values may be unchecked. A negative index must fail too and must not count from the end.
        index = arrays.asarray(self.buckets, "int64")
        index = arrays.where(index < 0, self.table.shape[1], index)
        return arrays.take(table, index, 1), DISTANCE


class dense_bias(Bias):
    """A bias given value by value. The other biases need less memory, so prefer them if you can.

    Args:
        values: Floating, shape (Sq|1, Sk), (H|1, Sq|1, Sk) or (B|1, H|1, Sq|1, Sk), with gradient. A value of
            -inf hides its key, as a mask does. However, it takes time, and a mask saves time.

    Raises:
        DtypeError: The values are not floating.
        ShapeError: The values do not have 2 to 4 dims.

    Example:
        >>> dense_bias(np.zeros((8, 1, 16), "float32"))
        dense_bias(float32[8, 1, 16])
    """

    values: Array

    def __post_init__(self) -> None:
        self._set(values=_floats("dense_bias", self.values, (2, 3, 4)))

    def _lower(self, arrays: Arrays, wide: bool, sizes: Mapping[str, int]) -> tuple[Array, int]:
        remedy = "Pass this shape. Leading axes may be missing"
        words = "a number for each query and key"
        schema.check_shape("bias", self.values, DENSE, sizes, words, remedy, "dense bias")
        values = _moved(arrays, self.values)
        if wide or str(values.dtype).endswith("float64"):
            values = to_float(arrays, values, wide)
        return values[(None,) * (4 - values.ndim)], DENSE


def alibi_slopes(heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The geometric slopes of Press et al. 2022: 2**(-8 i / heads) for i = 1..heads, as in the paper's code.

    Args:
        heads: Number of query heads. If it is not a power of two, the result holds the slopes of the next
            lower power, and then every other slope of the next higher power.

    Returns:
        NumPy float32, shape (heads,). To train the slopes, make a parameter from them.

    Raises:
        DtypeError: `heads` is not an integer.
        OptionError: `heads` is less than 1.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    heads = checks.count("alibi_slopes: heads", heads, least=1)
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.asarray(slopes, np.float32)


def t5_buckets(
    num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """T5's buckets for `relative` (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    On each side, half of the buckets hold one distance each. The other buckets hold logarithmically more
    distances, up to `max_distance` and beyond. Make the buckets once, outside the model.

    Args:
        num_buckets: Number of columns of the table. If bidirectional, both sides share them.
        max_distance: Distance from which on all distances share a bucket.
        bidirectional: Whether later keys have other buckets than earlier keys. If False (T5's decoder), later
            keys have distance 0.

    Returns:
        NumPy int32, shape (2 * max_distance + 1,): the buckets of the distances from -max_distance to
        max_distance.

    Raises:
        DtypeError: A number is not an integer.
        OptionError: The numbers leave some buckets without a distance.

    Example:
        >>> t5_buckets(8, 4).tolist()
        [3, 3, 2, 1, 0, 5, 6, 7, 7]
    """
    least = 4 if bidirectional else 2
    num_buckets = checks.count("t5_buckets: num_buckets", num_buckets, least=least)
    max_distance = checks.count("t5_buckets: max_distance", max_distance, least=1)
    sides = num_buckets // 2 if bidirectional else num_buckets
    exact = sides // 2
    fits = max_distance > exact and not (bidirectional and num_buckets % 2)
    wanted = f"max_distance beyond the {exact} distances with a bucket each, and an even number of buckets"
    got, remedy = f"num_buckets={num_buckets}, max_distance={max_distance}", "T5 itself has 32 and 128"
    expect(fits, "t5_buckets", f"{wanted} where there are two sides", got, remedy)
    behind = np.array([_bucket(d, sides, exact, max_distance) for d in range(max_distance + 1)], np.int32)
    ahead = behind[1:] + sides if bidirectional else np.zeros(max_distance, np.int32)
    return NUMPY.concat([behind[::-1], ahead])  # type: ignore[no-any-return]


def _bucket(distance: int, sides: int, exact: int, max_distance: int) -> int:
    """Bucket of a distance: one for each small distance, and the rest shared by logarithm."""
    if distance < exact:
        return distance
    # exact + floor(log(distance / exact) / log(max_distance / exact) * coarse), in integers.
    coarse, bucket = sides - exact, 0
    while bucket + 1 < coarse and distance**coarse * exact ** (bucket + 1) >= (
        max_distance ** (bucket + 1) * exact**coarse
    ):
        bucket += 1
    return exact + bucket


def to_float(arrays: Arrays, x: Array, wide: bool) -> Array:
    """`x` as float32 or float64 in the framework of `arrays`, differentiably."""
    name, x = "float64" if wide else "float32", _moved(arrays, x)
    return x.to(getattr(sys.modules["torch"], name)) if arrays.name == "torch" else x.astype(name)


def is_floating(x: object) -> bool:
    """Whether `x` is a floating array. The dtype's name decides: NumPy does not know JAX's bfloat16."""
    return is_array(x) and "float" in str(x.dtype)  # type: ignore[attr-defined]


def _floats(what: str, x: Any, ranks: tuple[int, ...]) -> Array:
    """Check that `x` is a floating array of one of the ranks. Lists become NumPy arrays."""
    check_plain(what, x)
    check_strided(what, x)
    x = _readable(np.asarray(x, np.float64) if isinstance(x, (list, tuple)) else x)
    remedy = "Pass its array, param[...]" if kind_of(x) == "Param" else "Convert it to float32"
    expect(is_floating(x), what, "a floating array", kind_of(x), remedy, error=DtypeError)
    remedy = "Drop or add axes. A batch axis comes first, and heads come before distances"
    _fits(len(x.shape) in ranks, what, "{} axes", x, remedy, " or ".join(map(str, ranks)))
    return x


def _fits(holds: Any, what: str, expected: str, x: Array, remedy: str, *values: object) -> None:
    expect(holds, what, expected, tuple(x.shape), remedy, *values, error=ShapeError)


def _readable(x: Any) -> Any:
    """`x` itself, or a tensor under torch's compiler, which cannot ask NumPy for a dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, np.ndarray) and torch.compiler.is_compiling():
        return torch.as_tensor(x)
    return x


def _moved(arrays: Arrays, x: Array) -> Array:
    """A NumPy array as an array of the framework. Any other array is one already."""
    if arrays.name == "numpy" or not isinstance(x, np.ndarray):
        return x
    if arrays.name == "torch":
        return sys.modules["torch"].as_tensor(own(x), device=arrays.device)  # type: ignore[attr-defined]
    return arrays.xp.asarray(own(x))
