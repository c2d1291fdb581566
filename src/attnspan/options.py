"""What a call of attention may ask for beside a mask, and the form in which operators and kernels take it.

With x_j = scale * q_i . k_j for query i and its visible keys j: a softcap squashes x_j, a bias is added to
it, sinks join the denominator of the softmax, and dropout takes weights out of its result. docs/options.md
has the formulas. Positions are global indices, as for masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from ._biases import (
    ALIBI,
    DENSE,
    DISTANCE,
    SIGNED_ALIBI,
    Alibi,
    Bias,
    DenseBias,
    Relative,
    check_buckets,
    floats,
    make_slopes,
    make_t5_buckets,
    readable,
)
from ._dropout import dropout_seeds
from ._dropout import threshold as dropout_threshold
from .arrays import Array
from .errors import OptionError, ShapeError, shown

__all__ = [
    "ALIBI",
    "DENSE",
    "DISTANCE",
    "SIGNED_ALIBI",
    "Bias",
    "Options",
    "alibi",
    "alibi_slopes",
    "dense_bias",
    "dropout_seeds",
    "dropout_threshold",
    "relative",
    "t5_buckets",
]


@dataclass(frozen=True, eq=False)
class Options:
    """Options as operators and kernels take them: numbers, and arrays of the call's framework.

    Float arrays are float32, or float64 beside a float64 q (math backend and reference only).

    Attributes:
        softcap: 0 for none, else x becomes softcap * tanh(x / softcap), before the bias.
        bias: by kind, slopes (B|1, H), values by distance (H, 2L + 1), or values (B|1, H|1, Sq|1, Sk), these
            in float32, bfloat16 or float16 with a unit last stride; None where the kind is 0.
        bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE.
        sinks: (H,), the logit of each head's sink, or None.
        dropout_p: probability with which a weight is dropped; 0 for none.
        dropout_seed: int64, () for one seed or (B, H) for one per batch row and head; None without dropout.
        q_index: int32 (B|1, Sq), global indices of the queries; None for k_len - q_len + row.
        k_index: int32 (B|1, Sk), global indices of the keys, in any order; None for 0..k_len-1.

    Example:
        >>> Options(softcap=30.0).bias_kind
        0
    """

    softcap: float = 0.0
    bias: Any = None
    bias_kind: int = 0
    sinks: Any = None
    dropout_p: float = 0.0
    dropout_seed: Any = None
    q_index: Any = None
    k_index: Any = None


def alibi(slopes: Array, signed: bool = False) -> Bias:
    """Attention with linear biases, Press et al. 2022 (arXiv:2108.12409), section 3.

    The bias of query i and key j, by global index, is -slope * |j - i|, or slope * (j - i) if signed: the two
    are one where a query sees no later keys.

    Args:
        slopes: floating (H,) or (B, H), one for each query head, with gradient.
        signed: keep the sign of the distance.

    Raises:
        DtypeError, ShapeError: for slopes that are not floating or of a wrong rank.

    Example:
        >>> alibi(alibi_slopes(8))
        alibi(float32[8])
    """
    return Alibi(floats("alibi: slopes", slopes, (1, 2)), bool(signed))


def alibi_slopes(heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The geometric slopes of Press et al. 2022: 2**(-8 i / heads) for i = 1..heads, as in the paper's code.

    Args:
        heads: number of query heads; where that is no power of two, the slopes are those of the power below,
            and then every other one of the power above.

    Returns:
        float32 (heads,), in NumPy; train them by making a parameter of them.

    Raises:
        DtypeError, OptionError: for a number that is none, or below 1.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return make_slopes(checks.count("alibi_slopes: heads", heads, least=1))


def relative(table: Array, buckets: Array | None = None) -> Bias:
    """A bias by distance: T5's (Raffel et al. 2020, section 2.1), or any table of your own.

    Query i and key j, by global index, are j - i apart; distances beyond -L..L take the value at the end.

    Args:
        table: floating (H, n), with gradient: a row for each query head. An embedding of T5 has it
            transposed.
        buckets: integer (2L + 1,), the column of the table for each distance from -L to L; None where the
            table has a column for each, n = 2L + 1.

    Raises:
        DtypeError, ShapeError, OptionError: for a table that is not floating, an even number of distances, or
            a column that the table lacks (where it can be read; elsewhere the gather fails or gives NaN).

    Example:
        >>> import numpy as np
        >>> relative(np.zeros((4, 32), "float32"), t5_buckets())
        relative(float32[4, 32], int32[257])
    """
    table = floats("relative: table", table, (2,))
    if buckets is None:
        if table.shape[1] % 2 == 0:
            raise ShapeError(
                "relative: table",
                expected="(H, 2L + 1): a column for each distance from -L to L",
                got=shown(table.shape),
                remedy="Pass buckets, or an odd number of columns with that of distance 0 in the middle",
            )
        return Relative(table)
    buckets = checks.integers("relative: buckets", readable(buckets), (1,))
    check_buckets(table, buckets)
    return Relative(table, buckets)


def t5_buckets(
    num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """T5's buckets for `relative` (Raffel et al. 2020, section 2.1; arXiv:1910.10683).

    Half of the buckets of a side hold one distance each, the others logarithmically more, up to
    `max_distance` and beyond. Make them once, outside the model.

    Args:
        num_buckets: columns of the table; both sides together if bidirectional.
        max_distance: from here on, all distances share a bucket.
        bidirectional: tell later keys from earlier ones; False (T5's decoder): later keys have distance 0.

    Returns:
        int32 (2 * max_distance + 1,), for distances from -max_distance to max_distance.

    Raises:
        DtypeError, OptionError: for numbers that leave a part of the buckets without a distance.

    Example:
        >>> t5_buckets(8, 4).tolist()
        [3, 3, 2, 1, 0, 5, 6, 7, 7]
    """
    least = 4 if bidirectional else 2
    num_buckets = checks.count("t5_buckets: num_buckets", num_buckets, least=least)
    max_distance = checks.count("t5_buckets: max_distance", max_distance, least=1)
    exact = num_buckets // least
    if max_distance <= exact or (bidirectional and num_buckets % 2):
        raise OptionError(
            "t5_buckets",
            expected=f"max_distance beyond the {exact} distances with a bucket each, and an even number of "
            "buckets where there are two sides",
            got=f"num_buckets={num_buckets}, max_distance={max_distance}",
            remedy="T5 itself has num_buckets=32, max_distance=128",
        )
    return make_t5_buckets(num_buckets, max_distance, bool(bidirectional))


def dense_bias(values: Array) -> Bias:
    """A bias given value by value. It takes the memory of its values: prefer the others where they serve.

    Args:
        values: floating (Sq|1, Sk), (H|1, Sq|1, Sk) or (B|1, H|1, Sq|1, Sk), with gradient. A value of -inf
            hides the key, as a mask does, but costs time where a mask saves it.

    Raises:
        DtypeError, ShapeError: for values that are not floating or of a wrong rank.

    Example:
        >>> import numpy as np
        >>> dense_bias(np.zeros((8, 1, 16), "float32"))
        dense_bias(float32[8, 1, 16])
    """
    return DenseBias(floats("dense_bias", values, (2, 3, 4)))
