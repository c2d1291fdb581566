"""One attention call as numbers, and the one validation that every front end uses.

Nothing here knows a framework: an array is whatever has ``shape`` and ``dtype`` (and ``device``, unless it is
NumPy's). A comparison of two sizes becomes a guard when a compiler traces it, so sizes are compared only
where they must be equal and are never converted.
"""

import math
from dataclasses import dataclass
from typing import Any

from .errors import DeviceError, DtypeError, OptionError, ShapeError, shown

__all__ = ["LAYOUTS", "MAX_LENGTH", "Problem", "check_arrays", "check_layout", "check_scale", "describe"]

#: The longest q or k. Bounds are int32, and kernels step past the end by at most one block of 64.
MAX_LENGTH = 2**31 - 65

#: Scales beyond this are infinite in float32, which kernels compute in.
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127

#: The dims of q, k and v in each layout. ``thd`` packs the documents of a batch into one row of tokens.
LAYOUTS = {
    "bhsd": ("batch", "heads", "length", "head_dim"),
    "bshd": ("batch", "length", "heads", "head_dim"),
    "thd": ("tokens", "heads", "head_dim"),
}

_FLOATING = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Problem:
    """What a kernel must know to say whether it can run a call.

    Attributes:
        batch: Number of batch rows.
        q_heads: Number of query heads, a multiple of ``kv_heads``.
        kv_heads: Number of key and value heads.
        q_len: Number of queries per row.
        k_len: Number of keys per row.
        head_dim: Elements of one query or key.
        v_dim: Elements of one value.
        runs: Spans per query row (R).
        dtype: Name of the element type of q, k and v, such as ``"bfloat16"``.
        device: Device type, such as ``"cpu"``.

    Example:
        >>> import numpy as np
        >>> q, k = np.zeros((2, 8, 5, 64), "float32"), np.zeros((2, 2, 7, 64), "float32")
        >>> problem = describe(q, k, k, np.zeros((1, 1, 5, 1, 2), "int32"))
        >>> problem.group_size, problem.k_len, problem.dtype
        (4, 7, 'float32')
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

    @property
    def group_size(self) -> int:
        """Query heads that share one key head (1 is plain multi-head attention)."""
        return self.q_heads // self.kv_heads

    def flops(self, pairs: int) -> int:
        """Floating-point operations of the forward pass over ``pairs`` visible pairs.

        Two products, each one multiplication and one addition per element (FlashAttention-2,
        arXiv:2307.08691, section 4.1, with the two head dims apart); the backward pass has five and costs 2.5
        times as much.

        Args:
            pairs: Visible pairs over all batch rows and query heads.

        Returns:
            The count.

        Example:
            >>> Problem(1, 1, 1, 4, 4, 64, 64, 1, "float32", "cpu").flops(pairs=10)
            2560
        """
        return 2 * pairs * (self.head_dim + self.v_dim)


def check_layout(layout: str, q: Any, k: Any, v: Any) -> None:
    """Raise unless ``layout`` is known and q, k and v have its rank.

    Args:
        layout: A key of ``LAYOUTS``.
        q: The query array.
        k: The key array.
        v: The value array.

    Raises:
        OptionError: The layout is unknown.
        DtypeError: An argument is no array.
        ShapeError: An array has another rank than the layout.

    Example:
        >>> import numpy as np
        >>> q = np.zeros((1, 1, 1, 1))
        >>> check_layout("sdpa", q, q, q)
        Traceback (most recent call last):
        attnspan.errors.OptionError: layout: expected one of bhsd, bshd, thd, got 'sdpa'. Name the order.
    """
    if layout not in LAYOUTS:
        raise OptionError(
            "layout",
            expected=f"one of {', '.join(LAYOUTS)}",
            got=repr(layout),
            remedy="Name the order",
        )
    dims = LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise DtypeError(name, expected="an array", got=type(x).__name__, remedy="Pass a tensor or array")
        if len(x.shape) != len(dims):
            raise ShapeError(
                name,
                expected=f"{len(dims)} dims ({', '.join(dims)}) for layout={layout!r}",
                got=f"shape {shown(x.shape)}",
                remedy="Reshape it, or name the layout that q, k and v have",
            )


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k and v in (batch, heads, length, head_dim) order can attend to each other.

    Args:
        q: Shape (B, Hq, Sq, D), floating.
        k: Shape (B, Hkv, Sk, D), dtype and device of ``q``; Hq is a multiple of Hkv.
        v: Shape (B, Hkv, Sk, Dv), dtype and device of ``q``.

    Raises:
        ShapeError: Sizes do not fit.
        DtypeError: Element types differ or are not floating.
        DeviceError: Devices differ.

    Example:
        >>> import numpy as np
        >>> check_arrays(np.zeros((1, 2, 3, 8)), np.zeros((1, 2, 4, 8)), np.zeros((1, 2, 4, 16)))
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _dtype_name(x) not in _FLOATING:
            raise DtypeError(
                name,
                expected=f"a floating dtype ({', '.join(_FLOATING)})",
                got=_dtype_name(x),
                remedy=f"Convert {name} first",
            )
    _check_same_kind(q, k, v)
    _check_sizes(q, k, v)
    _check_limits(q, k)


def check_scale(scale: Any) -> None:
    """Raise unless ``scale`` is None or a number that is finite in float32.

    Example:
        >>> check_scale(0.125)
        >>> check_scale(float("nan"))
        Traceback (most recent call last):
        attnspan.errors.OptionError: scale: expected a finite number, got nan. Leave it out for 1/sqrt(D).
    """
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise DtypeError(
            "scale",
            expected="a Python number",
            got=type(scale).__name__,
            remedy="Multiply q by it if it is an array, or call .item()",
        )
    if not -_FLOAT32_MAX <= scale <= _FLOAT32_MAX:
        finite = "a finite number" if scale != scale or scale in (math.inf, -math.inf) else "a float32 number"
        raise OptionError("scale", expected=finite, got=shown(scale), remedy="Leave it out for 1/sqrt(D)")


def describe(q: Any, k: Any, v: Any, bounds: Any) -> Problem:
    """Describe checked arrays, and check the bounds against them.

    Args:
        q: Shape (B, Hq, Sq, D), as accepted by `check_arrays`.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32, the mask as spans.

    Returns:
        The problem.

    Raises:
        ShapeError: The bounds do not fit q.
        DtypeError: The bounds are not int32.
        DeviceError: The bounds live elsewhere.

    Example:
        >>> import numpy as np
        >>> q = np.zeros((1, 2, 3, 8), "float32")
        >>> describe(q, q, q, np.zeros((1, 1, 3, 1, 2), "int32")).runs
        1
    """
    batch, q_heads, q_len, head_dim = q.shape
    shape = bounds.shape
    # 1 first: a traced size that is known to be 1 then needs no guard against the batch.
    fits = len(shape) == 5 and all(
        size == 1 or size == full for size, full in ((shape[0], batch), (shape[1], q_heads))
    )
    if not fits or shape[2] != q_len or shape[3] < 1 or shape[4] != 2:
        raise ShapeError(
            "bounds",
            expected=f"(B|1, H|1, q_len, R, 2) with B={batch}, H={q_heads}, q_len={q_len}",
            got=f"shape {shown(shape)}",
            remedy="Lower the mask for these q and k",
        )
    if _dtype_name(bounds) != "int32":
        raise DtypeError(
            "bounds",
            expected="int32",
            got=_dtype_name(bounds),
            remedy="Convert them; lowered masks are int32",
        )
    if _device(bounds) != _device(q):
        raise DeviceError(
            "bounds",
            expected=f"device {_device(q)} (as q)",
            got=_device(bounds),
            remedy="Move the mask's arrays",
        )
    return Problem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        k_len=k.shape[2],
        head_dim=head_dim,
        v_dim=v.shape[3],
        runs=bounds.shape[3],
        dtype=_dtype_name(q),
        device=_device(q).partition(":")[0],
    )


def _check_same_kind(q: Any, k: Any, v: Any) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            "q, k and v",
            expected="one dtype",
            got=", ".join(_dtype_name(x) for x in (q, k, v)),
            remedy="Convert them to one dtype by .astype, or in torch by .to or autocast",
        )
    if not _device(q) == _device(k) == _device(v):
        raise DeviceError(
            "q, k and v",
            expected="one device",
            got=", ".join(_device(x) for x in (q, k, v)),
            remedy="Move them to one device",
        )


def _check_sizes(q: Any, k: Any, v: Any) -> None:
    # Texts are made when an error is raised, not before: putting a traced size into one would make it a
    # constant.
    def misfit(what: str, expected: str, remedy: str) -> ShapeError:
        got = f"q {shown(q.shape)}, k {shown(k.shape)}, v {shown(v.shape)} as (B, H, S, D)"
        return ShapeError(what, expected=expected, got=got, remedy=remedy)

    if q.shape[1] == 0 or k.shape[1] == 0:
        raise misfit("heads", "at least one query and one key head", "Check the heads dim")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise misfit("head_dim", "at least one element", "Check the last dim")
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
        raise misfit("batch", "the same batch size", "Expand or index the batch dim")
    if k.shape[1] != v.shape[1]:
        raise misfit("heads", "as many value as key heads", "Check k and v, and the layout")
    if k.shape[2] != v.shape[2]:
        raise misfit("k_len", "as many values as keys", "Check k and v, and the layout")
    if q.shape[3] != k.shape[3]:
        raise misfit("head_dim", "the same for q and k", "Check the projections")
    if q.shape[1] % k.shape[1] != 0:
        raise misfit(
            "heads",
            "a multiple of the key heads as query heads",
            "Grouped-query attention needs q_heads % kv_heads == 0; check the layout",
        )


def _check_limits(q: Any, k: Any) -> None:
    for name, length in (("q_len", q.shape[2]), ("k_len", k.shape[2])):
        # A symbol of a traced size has no limit that could be checked now.
        if isinstance(length, int) and length > MAX_LENGTH:
            raise ShapeError(
                name,
                expected=f"at most {MAX_LENGTH} (bounds are int32)",
                got=f"{length}",
                remedy="Split the sequence",
            )


def _dtype_name(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _device(x: Any) -> str:
    return str(getattr(x, "device", "cpu"))
