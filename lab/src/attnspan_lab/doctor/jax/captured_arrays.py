"""Arrays that a step captures: masks of pairs of tokens, and the lines that use a captured array first."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from jax.extend.core import Literal

from attnspan_lab.doctor.jax.interpret import equations, inner, is_jaxs, places_of
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
    yield from _own(closed, least)
    for eqn in equations(closed):
        for x in inner(eqn):
            if hasattr(x, "consts"):
                yield from _own(x, least)


def _own(closed: Any, least: int) -> Iterator[tuple[Any, tuple[Place, ...]]]:
    for var, x in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if np.size(x) * np.dtype(x.dtype).itemsize >= least:
            yield x, _first_use(closed.jaxpr, var)


def _first_use(jaxpr: Any, var: Any) -> tuple[Place, ...]:
    """List the user's lines that use a variable first, also in loops and called functions."""
    for eqn in jaxpr.eqns:
        if not any(x is var for x in eqn.invars if not isinstance(x, Literal)):
            continue
        inside = (_first_use(x, own) for x, own in _entered(eqn, var) if not is_jaxs(x))
        if places := next(filter(None, inside), ()) or places_of(eqn):
            return places
    return ()


def _entered(eqn: Any, var: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the jaxprs that an equation enters, with their variables that get the value of ``var``."""
    for name, value in eqn.params.items():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr: Any = getattr(x, "jaxpr", x)
            if not hasattr(jaxpr, "eqns"):
                continue
            given = list(eqn.invars)
            if name == "cond_jaxpr":
                n = eqn.params["cond_nconsts"]
                given = given[:n] + given[n + eqn.params["body_nconsts"] :]
            # A branch has no argument for the condition, and a loop's body none for the condition's arrays.
            given = given[max(len(given) - len(jaxpr.invars), 0) :]
            yield from ((jaxpr, a) for a, b in zip(jaxpr.invars, given, strict=False) if b is var)
