"""Arrays that a step captures: masks of pairs of tokens, and the lines that use a captured array first."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch

from attnspan_lab.doctor.jax.flow import Flow
from attnspan_lab.doctor.jax.interpret import is_jaxs, jaxprs, places_of
from attnspan_lab.doctor.jax.values import RESHAPES, Value
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import forms

__all__ = ["captured", "given_pairs", "longest_form"]

#: Operators that read an array at indices. The indices are no part of the result.
_READERS = ("gather", "dynamic_slice", "dynamic_update_slice")
_MOST_PAIRS = 2**24


def given_pairs(mask: Value, size: tuple[int, int]) -> tuple[Value, tuple[Place, ...]] | None:
    """Find the array with an entry for each pair that the step gets whole, and that a mask is made from.

    Args:
        mask: The mask that attention gets.
        size: Numbers of queries and keys.

    Returns:
        The captured array, or the argument, and the user's lines of the operator that reads it.
    """
    todo: list[tuple[Value, tuple[Place, ...]]] = [(mask, ())]
    known = {id(mask)}
    while todo:
        value, user = todo.pop()
        if not value.parents and _has_pairs(value, size, is_mask=value is mask):
            return value, user
        user = user if value.name in RESHAPES else value.places or user
        parents = value.parents[: 1 if value.name in _READERS else None]
        new = [x for x in parents if id(x) not in known and x.axes is None]
        known.update(map(id, new))
        todo += [(x, user) for x in new]
    return None


def _has_pairs(value: Value, size: tuple[int, int], *, is_mask: bool) -> bool:
    shape = np.shape(value.array)
    # Ids and padding masks (B, S) are no pairs. A table of trained biases is, and only its values hide pairs.
    fits = is_mask or len(shape) > 2 or (len(shape) == 2 and shape[0] == shape[1])
    kept = value.name == "constant" or (value.name == "argument" and (is_mask or value.array.dtype == bool))
    axes = sorted(shape)[-2:]
    return fits and kept and len(axes) == 2 and axes[0] >= min(size) and axes[1] >= max(size)


def longest_form(array: Any) -> str:
    """Write the shortest mask that shows the pairs of a captured boolean array, or "" if none is known."""
    array = np.asarray(array)
    square = array.ndim > 1 and array.shape[-1] == array.shape[-2]
    single = prod(array.shape[:-2]) == 1 and array.size <= _MOST_PAIRS
    if array.dtype != bool or not (square and single):
        return ""
    pairs = array.reshape(1, *array.shape[-2:])
    shown = (x for own in (pairs, ~pairs) for x in forms(torch.as_tensor(own.copy()), Declared()))
    return next((text for text, _ in shown), "")


def captured(closed: Any, least: int) -> Iterator[tuple[Any, tuple[Place, ...]]]:
    """Yield constants of a jaxpr and of its functions with at least so many bytes, and their first lines."""
    for own in jaxprs(closed):
        for i, x in enumerate(getattr(own, "consts", ())):
            if np.size(x) * x.dtype.itemsize >= least:
                use = _FirstUse()
                use.follow(own, [False] * len(own.in_avals), captured=[False] * i + [True])
                yield x, use.lines


class _FirstUse(Flow[bool]):
    """Finds the user's lines that use an array first, also in loops and called functions.

    Attributes:
        lines: The lines, the innermost first.
    """

    def __init__(self) -> None:
        super().__init__(False)
        self.lines: tuple[Place, ...] = ()

    def made(self, eqn: Any, facts: list[bool], here: Place | None) -> bool:
        del here
        self.lines = self.lines or (places_of(eqn) if any(facts) else ())
        return False

    def entered(self, eqn: Any, inside: Any, facts: list[bool], here: Place | None) -> list[bool]:
        """Follow the user's functions. A function of JAX is one operator."""
        return [] if is_jaxs(inside) else super().entered(eqn, inside, facts, here)
