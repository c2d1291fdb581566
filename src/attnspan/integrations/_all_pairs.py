"""Mask functions of other libraries: their combination, and the warning of those that are evaluated."""

import functools
import operator
import warnings
from collections.abc import Iterable

from attnspan.masks import Mask
from attnspan.torch._watched import constant_when_traced


class AllPairsWarning(UserWarning):
    """A mask has all pairs of queries and keys, because its function is unknown or the model reads it.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", AllPairsWarning)
    """


def combined(kind: str, masks: Iterable[Mask]) -> Mask:
    """Combine masks as a library's function "and..." or "or..." does."""
    return functools.reduce(operator.and_ if kind.startswith("and") else operator.or_, masks)


_said: set[str] = set()


@constant_when_traced
def say_once(what: str) -> None:
    """Warn that something is done for all pairs."""
    if what not in _said:
        _said.add(what)
        message = f"attnspan: {what} for all pairs of queries and keys in each step."
        warnings.warn(message, AllPairsWarning, stacklevel=2)


def say_evaluated(name: str, whose: str) -> None:
    """Warn that a mask function is unknown. ``whose`` is the library, such as "torchtitan's"."""
    say_once(f"the mask function {name} is not one of {whose} own, so it is evaluated")
