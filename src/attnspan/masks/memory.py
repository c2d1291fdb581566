"""The memory of eager calls, for any framework: a mask that many calls get is lowered once.

Each framework has one `Memory`, which knows the framework's arrays. Masks and NumPy arrays are known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

from attnspan.base.arrays import NUMPY, Array, is_frozen
from attnspan.base.forks import ForkSafeLock
from attnspan.base.pytrees import library_classes

from .bounds import Spans
from .expression import Mask, Prepared
from .lowering import begin

# Fields of these types cannot change.
_CONSTANT = (bool, int, str, type(None))
# Sizes for which one mask is remembered: kinds of layers, prefill and decoding.
_MOST_PLACES = 4
# Masks without arrays have few spans: bounds take 8 bytes per query and span, so 16 masks of 65,536 queries
# take 8 MiB.
_MOST_STATIC = 16


T = TypeVar("T")


class UnknowableError(Exception):
    """Nothing shows whether a part of a mask has changed: a function, a user's class, an unknown array."""


class _Known(NamedTuple):
    place: Hashable
    lowered: Prepared
    tests: tuple[Callable[[], bool], ...]  # whether an array of the mask still has its values


class Memory:
    """The lowered masks of one framework.

    It returns a lowered mask as long as the mask lives and no array of the mask has changed. A NumPy array
    is compared with a copy, because no counter sees a write.

    Example:
        >>> from attnspan import segments
        >>> memory, mask = Memory(), segments(np.array([0, 0, 1]))
        >>> lower = lambda twin, _: twin.prepare(3, 3)
        >>> memory.lowered(mask, 3, lower) is memory.lowered(mask, 3, lower)
        True
    """

    def __init__(self) -> None:
        # Keyed by identity, because masks may be equal. The references do not keep the masks alive.
        self._masks: dict[int, tuple[ref[Any], list[_Known]]] = {}
        self._static: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = ForkSafeLock()

    def evidence(self, x: Array) -> tuple[Callable[[], bool], np.ndarray[Any, Any] | None]:
        """Return a test of whether an array of the framework is unchanged, and a copy on the host, if any.

        Raises:
            UnknowableError: There is no such test, or `x` is no array of the framework.
        """
        raise UnknowableError(type(x))

    def lowered(
        self, mask: Mask | Array, place: Hashable, lower: Callable[[Any, tuple[Any, ...]], Prepared]
    ) -> Prepared | None:
        """Return a mask as it was lowered for a place, lowering it first if necessary.

        Args:
            mask: The mask, or an array that a mask is made of.
            place: The sizes and the device.
            lower: Function of a twin of the mask and of the mask's arrays. The twin has NumPy copies of the
                arrays, so that no other thread writes into them. It is None if an array has no values on the
                host.

        Returns:
            The lowered mask. None if the mask cannot be remembered, or if lowering it fails.
        """
        entry = self._masks.get(id(mask))
        known = entry[1] if entry is not None and entry[0]() is mask else []
        for one in known:
            if one.place == place and not [test for test in one.tests if not test()]:
                return one.lowered
        sources: dict[int, tuple[Any, Any, Any]] = {}
        try:
            twin = self._twin(mask, sources)
            arrays, tests, copies = zip(*sources.values(), strict=True) if sources else ((), (), ())
            found = lower(None if [x for x in copies if x is None] else twin, arrays)
        except (ValueError, TypeError, UnknowableError):
            return None
        # A lowering of this place is of no more use, because an array was written.
        others = [one for one in known if one.place != place] if known else []
        self._keep(mask, [_Known(place, found, tests), *others[: _MOST_PLACES - 1]])
        return found

    def without_arrays(self, key: Hashable, lower: Callable[[], T]) -> T | None:
        """Return what was made of a mask without arrays for a key: the lowered mask, or a plan of it.

        None if making it fails.
        """
        try:
            self._static.move_to_end(key)  # Each method of the dict is atomic, so this needs no lock.
            return self._static[key]  # type: ignore[no-any-return]
        except KeyError:  # It is not there, or another thread has just removed it.
            pass
        try:
            found = lower()
        except (ValueError, TypeError):
            return None
        with self._lock.held():
            self._static[key] = found
            while len(self._static) > _MOST_STATIC:
                self._static.popitem(last=False)
        return found

    def __len__(self) -> int:
        return len(self._masks)

    def _keep(self, mask: Mask | Array, known: list[_Known]) -> None:
        key, masks = id(mask), self._masks

        def forget(gone: ref[Any]) -> None:
            # Another mask may have the number by now.
            if (entry := masks.get(key)) is not None and entry[0] is gone:
                del masks[key]

        masks[key] = ref(mask, forget), known

    def _twin(self, x: Any, sources: dict[int, tuple[Any, Any, Any]]) -> Any:
        """Return an expression, or a part of one, with NumPy copies of its arrays.

        `sources` collects each array with the test and the copy. An array in two places stays one array,
        because lowering compares arrays by identity.
        """
        kind = type(x)
        if kind in _CONSTANT:
            return x
        if kind is tuple:
            return tuple([self._twin(part, sources) for part in x])
        if kind in library_classes:
            twin = object.__new__(kind)
            for field in fields(x):
                value = getattr(x, field.name)
                vars(twin)[field.name] = value if type(value) in _CONSTANT else self._twin(value, sources)
            return twin
        if id(x) not in sources:
            sources[id(x)] = x, *(_evidence(x) if kind is np.ndarray else self.evidence(x))
        return sources[id(x)][2]


def _evidence(x: Any) -> tuple[Callable[[], bool], Any]:
    copy = np.array(x)
    if is_frozen(x):
        return partial(is_frozen, x), copy
    return partial(_equal, x, copy.shape, copy.dtype, copy.tobytes()), copy


def _equal(x: Any, shape: Any, dtype: Any, values: bytes) -> bool:
    # bytes compare in a tenth of the time of np.array_equal
    return bool(x.shape == shape and x.dtype == dtype and x.tobytes() == values)


def by_numpy(mask: Mask, q_len: int, k_len: int, batch: int, heads: int) -> tuple[Any, int, Any]:
    """Lower a mask of NumPy arrays with the default indices.

    Returns:
        The bounds, with as few spans as the data need. The number of keys. The indices of the queries, or
        None if they are counted back from the last key.
    """
    low = begin(NUMPY, mask.leaves(), q_len, k_len, batch, heads)
    bounds = low.bounds(mask)
    if bounds.shape[3] > 1:
        bounds = Spans._checked(bounds, low.top).compact().bounds
    return bounds, low.top, None if low.counted_back else low.q_index[:, 0]
