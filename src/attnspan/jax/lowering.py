"""Lowering of a call's mask in JAX: in NumPy where the values are known, and once for all eager calls."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnspan.base.arrays import frozen, is_frozen
from attnspan.base.pytrees import arrays_in, library_classes, nodes_in
from attnspan.call import lower_mask
from attnspan.call.options import NO_OPTIONS, Given
from attnspan.errors import DtypeError
from attnspan.masks import Mask, Prepared, from_predicate
from attnspan.masks.bounds import Spans
from attnspan.masks.memory import Memory, UnknowableError

from .placement import Place, check_devices, check_place, is_traced


class _Memory(Memory):
    """Needs no test of JAX arrays, which are immutable. It keeps no tracer."""

    def evidence(self, x: Any) -> tuple[Callable[[], bool], Any]:
        if not isinstance(x, jax.Array) or is_traced(x):
            raise UnknowableError
        return lambda: True, np.asarray(x) if _on_host(x) else None


_memory = _Memory()


def lower(mask: Any, q: Any, k: Any, given: Given, inputs: tuple[Any, ...], place: Place | None) -> Prepared:
    """Lower a mask for q and k, which are shapes in (B, H, S, D) order.

    `inputs` are the arrays, and `place` is the place of the call. The mask must be there too.
    """
    traced = is_traced(inputs[0])
    fixed = isinstance(mask, Prepared | Spans)
    # jit traces new arrays too, but grad and vmap alone do not.
    in_program = traced and not fixed and is_traced(jnp.zeros(()))
    if not (fixed or in_program) and given.q_index is None is given.k_index:
        found = _remembered(mask, q, k, place)
        if found is not None:
            return found
    arrays = arrays_in(mask)
    refuse_tensors("mask", arrays)
    check_place(place, "mask", arrays)
    if fixed:
        return _fixed(mask if isinstance(mask, Prepared) else Prepared(mask, bare=True))
    # Under a tracer, the program computes the bounds of a mask without arrays. Otherwise a constant of the
    # size of the bounds would be copied into the program.
    like = inputs[0] if traced or _calls_functions(mask) else None
    arrays = jax.tree.leaves((mask, given.q_index, given.k_index))
    if arrays and _is_ours(mask) and _have_values(arrays, in_program):
        # NumPy is faster than eager JAX, and XLA folds constants slowly.
        indices = _in_numpy((given.q_index, given.k_index))
        given = given.replacing(q_index=indices[0], k_index=indices[1])
        return _fixed(lower_mask(_in_numpy(mask), q, k, given, None))
    return _fixed(lower_mask(mask, q, k, given, like))


def remembered(mask: Any, q: Any, k: Any, inputs: tuple[Array, Array, Array]) -> Prepared | None:
    """Return the lowered mask of an eager call, as other calls with the same mask have it.

    None if the mask is wrong, or if nothing shows whether its arrays have changed.

    Args:
        mask: The mask.
        q: Shape of the queries in (B, H, S, D) order.
        k: Shape of the keys.
        inputs: q, k and v.
    """
    if isinstance(mask, Prepared):
        bounds = mask.lowered.bounds
        constant = is_frozen(bounds) if isinstance(bounds, np.ndarray) else not is_traced(bounds)
        return mask if constant and not isinstance(mask.q_index, np.ndarray) else None
    return _remembered(mask, q, k, check_devices(*inputs, NO_OPTIONS)) if isinstance(mask, Mask) else None


def _remembered(mask: Mask, q: Any, k: Any, place: Place | None) -> Prepared | None:
    batch, heads, q_len, _ = q.shape
    sizes = (q_len, k.shape[2], batch, heads)
    if (key := mask.static_key()) is not None:
        return _memory.without_arrays((key, sizes), partial(_lowered, mask, q, k))

    def lower(twin: Any, arrays: Any) -> Prepared:
        check_place(place, "mask", arrays)
        return _lowered(mask if twin is None else twin, q, k)

    return _memory.lowered(mask, (sizes, place and place[0]), lower)


#: Remedy for a torch tensor.
TO_JAX = "Convert it with jax.dlpack.from_dlpack, or call attnspan.torch.attention"


def refuse_tensors(name: str, x: Any) -> None:
    """Raise if an argument holds a torch tensor, because JAX and NumPy would copy it silently."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(y, torch.Tensor) for y in jax.tree.leaves(x)):
        wanted, got = "JAX or NumPy arrays, as q, k and v", "a torch.Tensor"
        raise DtypeError(name, expected=wanted, got=got, remedy=TO_JAX)


def _lowered(mask: Mask, q: Any, k: Any) -> Prepared:
    # A function that jit traces may close over the mask. The result must not be a part of its program.
    with jax.ensure_compile_time_eval():
        return _fixed(lower_mask(mask, q, k, NO_OPTIONS, None))


def _fixed(mask: Prepared) -> Prepared:
    """Return a lowered mask whose NumPy arrays no code can write: a program may share their memory."""
    arrays = mask.lowered.bounds, mask.q_index, mask.k_index
    found = [_frozen(x) if isinstance(x, np.ndarray) else x for x in arrays]
    if all(map(operator.is_, found, arrays)):
        return mask
    bounds, q_index, k_index = found
    return Prepared(Spans._checked(bounds, mask.lowered.k_len), q_index, k_index, mask.bare)


def _frozen(x: Any) -> Any:
    if x.dtype != np.int32:
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))  # as jnp.asarray does
    return frozen(x)


def _calls_functions(mask: Mask) -> bool:
    """Return whether a mask calls a function, which may close over traced arrays if q is not traced."""
    return any(isinstance(node, from_predicate) for node in nodes_in(mask))


def _is_ours(mask: Mask) -> bool:
    """Return whether all parts of a mask work with NumPy. Users' masks may need JAX arrays."""
    ours = all(type(node) in library_classes for node in nodes_in(mask))
    return ours and not _calls_functions(mask)


def _have_values(arrays: list[Any], in_program: bool) -> bool:
    """Return whether NumPy may read arrays at no cost.

    It may if they are on this host, or if they are constants of a program that jit traces.
    """
    of_jax = [x for x in arrays if isinstance(x, jax.Array)]
    if is_traced(*of_jax) or not all(x.is_fully_addressable for x in of_jax):
        return False
    return in_program or all(map(_on_host, of_jax))


def _on_host(x: Any) -> bool:
    return x.is_fully_addressable and [device.platform for device in x.devices()] == ["cpu"]


def _in_numpy(tree: Any) -> Any:
    """Return a pytree with NumPy arrays. An array in two places stays one array.

    Masks compare arrays by identity.
    """
    found: dict[int, Any] = {}
    return jax.tree.map(lambda x: found.setdefault(id(x), np.asarray(x)), tree)
