"""Calls of a function of indices for all pairs at once: by vmap, as in FlexAttention, or by NumPy.

The mask is the value of the function for single pairs. A function that reduces, such as
``k < ids[b].sum()``, would sum over the whole batch if it received index arrays of all pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from attnspan.base.arrays import Array, Arrays
from attnspan.base.recorded import called_apart, check_not_empty, sure
from attnspan.errors import UsageError, expect

from .captured import with_arrays

#: FlexAttention's `mask_mod`: a function of batch element, head, query and key.
Function = Callable[[Any, Any, Any, Any], Any]

MOST_CALLS = 1 << 20
"""The most pairs for which a Python function is called one by one, which takes about a second."""


def by_vmap(fn: Function, arrays: Arrays, b: Array, h: Array, q: Array, k: Array) -> Array:
    """Call a torch or JAX function for each pair of b (B,), h (H,), q (B|1, rows) and k (k_len,).

    Returns:
        The results, (B|1, H|1, rows|1, k_len|1). An axis has length 1 if the results do not vary along it.
    """
    of_batch = not arrays.is_one(q.shape[0])
    indices = [b, h, q if of_batch else q[0], k]
    # torch reads an index without an axis as a number, which a compiler cannot record.
    mapped = [arrays.name == "torch" or not arrays.is_one(x.shape[-1]) for x in indices]
    if arrays.name == "jax":
        read = _read(fn, indices)
        read[0] |= of_batch and read[2]
        mapped = [a and b for a, b in zip(mapped, read, strict=True)]
    indices = [x if i else x[..., 0] for x, i in zip(indices, mapped, strict=True)]
    for axis in (3, 2, 1, 0):
        if mapped[axis]:
            fn = _over(
                fn,
                arrays,
                [0 if i == axis or (axis, i, of_batch) == (0, 2, True) else None for i in range(4)],
            )
    if arrays.name == "torch":
        for x in indices:
            check_not_empty(x.shape[-1])  # Indexing inside vmap asks for it.
    visible = called_apart(fn, indices) if arrays.name == "torch" else fn(*indices)
    visible = visible[tuple([slice(None) if i else None for i in mapped])]
    for axis in (0, 1) if arrays.name == "torch" else ():
        # vmap expands results that do not depend on an axis, with a stride of 0.
        visible = visible.narrow(axis, 0, 1) if sure(visible.stride(axis) == 0) else visible
    return visible


def _over(fn: Function, arrays: Arrays, axes: list[int | None]) -> Function:
    if arrays.name == "jax":
        return sys.modules["jax"].vmap(fn, in_axes=tuple(axes))  # type: ignore[no-any-return]
    return sys.modules["torch"].vmap(fn, in_dims=tuple(axes))  # type: ignore[no-any-return]


def _read(fn: Function, indices: list[Array]) -> list[bool]:
    """Find which of its indices a JAX function reads."""
    program = sys.modules["jax"].make_jaxpr(fn)(*(x[(0,) * x.ndim] for x in indices)).jaxpr
    read = {id(x) for step in program.eqns for x in step.invars} | {id(x) for x in program.outvars}
    return [id(x) in read for x in program.invars]


def by_numpy(what: str, fn: Function, one: Callable[..., bool], indices: list[Array]) -> Array:
    """Call a NumPy function for each pair. The result is bool, of the broadcast shape of the indices.

    One call computes all pairs if NumPy's protocols prove that each pair is computed on its own. Other
    functions are called for one pair after the other.

    Args:
        what: Name of the mask, for errors.
        fn: The function.
        one: The same function, with its result checked.
        indices: int64 arrays that broadcast.
    """
    shape = np.broadcast_shapes(*(x.shape for x in indices))
    try:
        found = with_arrays(fn, _table)(*map(_Pairs, indices))
    except _AmbiguousError:
        raise
    except Exception:
        found = None  # the calls for single pairs raise the error that a user can read
    values = found._values if type(found) is _Pairs else found
    if type(values) in (bool, np.bool_, np.ndarray) and np.asarray(values).dtype == bool:
        return np.broadcast_to(values, shape)
    pairs, wanted = (
        int(np.prod(shape)),
        "comparisons and sums of indices and of captured arrays, or at most {} pairs",
    )
    remedy = "Index all axes at once, ids[b, q], and reduce before the function, or use tensors or JAX arrays"
    expect(pairs <= MOST_CALLS, what, wanted, pairs, remedy, MOST_CALLS, error=UsageError)
    visible = np.empty(shape, bool)
    for i, at in enumerate(zip(*(x.flat for x in np.broadcast_arrays(*indices)), strict=True)):
        visible.flat[i] = one(*at)
    return visible


class _UnprovenError(Exception):
    """Raised if a function does more than compare, add and index."""


class _AmbiguousError(ValueError):
    """NumPy's error for the truth value of an array."""


class _Watched(NDArrayOperatorsMixin):
    """An array that refuses every operation that a subclass does not allow."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def _refuse(self, *_args: Any, **_keywords: Any) -> Any:
        raise _UnprovenError

    __array__ = __array_ufunc__ = __array_function__ = __getattr__ = __iter__ = __hash__ = __bool__ = _refuse  # type: ignore[assignment]
    # A function may also test the types of its arguments: numbers of one pair are no arrays.
    __class__ = property(_refuse)  # type: ignore[assignment]


class _Pairs(_Watched):
    """One number for each pair."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.signature is not None or options:
            raise _UnprovenError
        found = ufunc(*map(_number, inputs))
        return tuple(map(_Pairs, found)) if type(found) is tuple else _Pairs(found)

    def __array_function__(self, function: Any, _types: Any, args: Any, keywords: Any) -> Any:
        if function is not np.where or len(args) != 3 or keywords:
            raise _UnprovenError
        return _Pairs(np.where(*map(_number, args)))

    def __bool__(self) -> bool:
        raise _AmbiguousError("The truth value of an array with more than one element is ambiguous")


class _Table(_Watched):
    """A captured array, whose elements can be read by full indices."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> _Pairs:
        found = [_number(x) for x in (index if type(index) is tuple else (index,))]
        whole = all(np.asarray(x).dtype.kind in "iu" for x in found)
        if not whole or len(found) != len(self.shape):
            raise _UnprovenError
        return _Pairs(self._values[tuple(found)])


def _table(x: Array) -> Any:
    return _Table(x) if type(x) is np.ndarray and x.ndim and x.dtype.kind in "biuf" else x


def _number(x: Any) -> Any:
    """The values of an operand that is one number for each pair, or one for all pairs."""
    if type(x) is _Pairs:
        return x._values
    if type(x) in (bool, int, float) or isinstance(x, np.generic) or (type(x) is np.ndarray and x.ndim == 0):
        return x
    raise _UnprovenError
