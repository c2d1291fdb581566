"""Eager calls without options: calls that are alike are checked once.

The checks read sizes, dtypes, devices and the mask, and no value of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from attnspan.backends import table
from attnspan.masks.memory import Memory

from .backends import Chosen, warn_if_slow
from .front import Shaped
from .lowering import remembered
from .part import JaxPart
from .rules import attend, forward_mode_refused

_SCALES = (float, type(None))

_memory = Memory()


class Checked(NamedTuple):
    """A checked call: the arrays and numbers of its part, and the backends that run it."""

    part: JaxPart
    chosen: Chosen

    def run(self) -> tuple[Any, Any]:
        """Return the output in the layout of the part, and the lse."""
        if self.chosen.slow is not None:
            warn_if_slow(self.chosen.slow)
        try:
            return attend(self.part, self.chosen.branches)  # type: ignore[no-any-return]
        except TypeError as error:
            if "custom_vjp" in str(error):
                raise forward_mode_refused() from None
            raise


class _Known(NamedTuple):
    """A call that was checked before.

    Attributes:
        program: Function of q, k, v and the bounds. Calls with other masks share it.
        bounds: The mask, on the device of the call.
        slow: The choice, if plain XLA code replaces a kernel. Else None.
        lowered: The mask. It keeps its number, which is a part of the key.
    """

    program: Callable[..., Any]
    bounds: Array
    slow: Any
    lowered: Any


def run_again(q: Any, k: Any, v: Any, mask: Any, check: Callable[..., Checked], **asked: Any) -> Any:
    """Run a call as an earlier call like it was checked.

    Args:
        q: Queries in the layout of the call.
        k: Keys.
        v: Values.
        mask: The mask.
        check: Function that checks a call. Later calls that are alike do not call it.
        **asked: The numbers and names of the call.

    Returns:
        What the call returns. None if an array is traced or lies on several devices, if nothing shows
        that the mask has not changed, or if the call is wrong.
    """
    layout = asked["layout"]
    usual = layout in ("bhsd", "bshd") and type(asked["return_lse"]) is bool
    if not usual or type(asked["scale"]) not in _SCALES:
        return None
    key = [jax.config.jax_default_device, *table("jax").values(), *asked.values()]  # type: ignore[attr-defined]
    for x in (q, k, v):
        if isinstance(x, Tracer) or not isinstance(x, Array) or x.ndim != 4 or x.shape[3] == 0:
            return None
        if type(sharding := x.sharding) is not SingleDeviceSharding:
            return None
        key += x.shape, x.dtype, sharding, x.committed
    lowered = remembered(mask, Shaped.of(q, layout), Shaped.of(k, layout), (q, k, v))
    if lowered is None:
        return None
    make = partial(_known, check, lowered, q, k, v, mask, asked)
    known = _memory.without_arrays((id(lowered), *key), make)
    if known is None:
        return None
    if known.slow is not None:
        warn_if_slow(known.slow)
    return known.program(q, k, v, known.bounds)


def _known(
    check: Callable[..., Checked], lowered: Any, q: Any, k: Any, v: Any, mask: Any, asked: Any
) -> _Known:
    part, chosen = check(q, k, v, mask, **asked)
    # A function that jit traces may call this. The bounds must not be a part of its program.
    with jax.ensure_compile_time_eval(), jax.default_device(next(iter(q.devices()))):
        bounds = jnp.asarray(part.bounds)
    program = _program(jax.tree.structure(part), chosen.branches, asked["return_lse"])
    return _Known(program, bounds, chosen.slow, lowered)


@lru_cache(maxsize=64)
def _program(structure: Any, branches: Any, return_lse: bool) -> Callable[..., Any]:
    # Arrays are found faster among the arguments of a program than in a tree.
    @jax.jit
    def program(*arrays: Any) -> Any:
        found = attend(jax.tree.unflatten(structure, arrays), branches)
        return found if return_lse else found[0]

    return program
