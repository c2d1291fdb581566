"""Lowering of a call's mask in JAX: in NumPy where the values are known, and once for all eager calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan.base.arrays import frozen
from attnspan.base.pytrees import library_classes, nodes_in
from attnspan.call import lower_mask
from attnspan.call.options import NO_OPTIONS, Given
from attnspan.masks import Mask, Prepared, from_predicate
from attnspan.masks.bounds import Spans
from attnspan.masks.memory import Memory, UnknowableError

from .placement import is_traced, platform_of

__all__ = ["lower"]


class _Memory(Memory):
    """Needs no test of JAX arrays, which are immutable. It keeps no tracer."""

    def evidence(self, x: Any) -> tuple[Callable[[], bool], Any]:
        if not isinstance(x, jax.Array) or is_traced(x):
            raise UnknowableError
        return _never_written, np.asarray(x) if _on_host(x) else None


def _never_written() -> bool:
    return True


_memory = _Memory()


def lower(mask: Any, q: Any, k: Any, given: Given, inputs: tuple[Any, ...]) -> Prepared:
    """Lower a mask for q and k, which are shapes in (B, H, S, D) order. `inputs` are the arrays."""
    if isinstance(mask, Prepared | Spans):
        return mask if isinstance(mask, Prepared) else Prepared(mask, bare=True)
    traced = is_traced(inputs[0])
    if given.q_index is None is given.k_index and not (traced and _jit_traces()):
        found = _remembered(mask, q, k)
        if found is not None:
            return found
    # Under a tracer, the program computes the bounds of a mask without arrays. Otherwise a constant of the
    # size of the bounds would be copied into the program.
    like = inputs[0] if traced or _calls_functions(mask) else None
    arrays = jax.tree.leaves((mask, given.q_index, given.k_index))
    if arrays and _is_ours(mask) and _have_values(arrays, traced):
        # NumPy is faster than eager JAX, and XLA folds constants slowly.
        indices = _in_numpy((given.q_index, given.k_index))
        given = given.replacing(q_index=indices[0], k_index=indices[1])
        return lower_mask(_in_numpy(mask), q, k, given, None)
    return lower_mask(mask, q, k, given, like)


def _remembered(mask: Mask, q: Any, k: Any) -> Prepared | None:
    batch, heads, q_len, _ = q.shape
    place, lower = (q_len, k.shape[2], batch, heads), partial(_lowered, mask, q, k)
    if (key := mask.static_key()) is not None:
        return _memory.without_arrays((key, place), lower)
    return _memory.lowered(mask, place, lower)


def _lowered(mask: Mask, q: Any, k: Any, twin: Any = None, _: Any = None) -> Prepared:
    # A function that jit traces may close over the mask. The result must not be a part of its program.
    with jax.ensure_compile_time_eval():
        found = lower_mask(mask if twin is None else twin, q, k, NO_OPTIONS, None)
    bounds, rows = (frozen(x) if isinstance(x, np.ndarray) else x for x in (found.bounds, found.q_index))
    return Prepared(Spans._checked(bounds, found.k_len), rows)


def _jit_traces() -> bool:
    return is_traced(jnp.zeros(()))


def _calls_functions(mask: Mask) -> bool:
    """Return whether a mask calls a function, which may close over traced arrays if q is not traced."""
    return any(isinstance(node, from_predicate) for node in nodes_in(mask))


def _is_ours(mask: Mask) -> bool:
    """Return whether all parts of a mask work with NumPy. Users' masks may need JAX arrays."""
    ours = all(type(node) in library_classes for node in nodes_in(mask))
    return ours and not _calls_functions(mask)


def _have_values(arrays: list[Any], traced: bool) -> bool:
    """Return whether NumPy may read arrays at no cost.

    It may if they are on this host, or if they are constants of a program that jit traces.
    """
    of_jax = [x for x in arrays if isinstance(x, jax.Array)]
    if is_traced(*of_jax) or not all(x.is_fully_addressable for x in of_jax):
        return False
    return all(map(_on_host, of_jax)) or (traced and _jit_traces())  # grad and vmap alone are not jit


def _on_host(x: Any) -> bool:
    return len(x.devices()) == 1 and x.is_fully_addressable and platform_of(x) == "cpu"


def _in_numpy(tree: Any) -> Any:
    """Return a pytree with NumPy arrays. An array in two places stays one array.

    Masks compare arrays by identity.
    """
    found: dict[int, Any] = {}
    return jax.tree.map(lambda x: found.setdefault(id(x), np.asarray(x)), tree)
