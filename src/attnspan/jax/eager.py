"""Eager calls without options: calls that are alike are checked once.

The checks read sizes, dtypes, devices and the mask, and no value of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from attnspan.backends import table
from attnspan.masks.memory import Memory

from .backends import Chosen, warn_if_slow
from .front import Shaped
from .lowering import remembered
from .part import JaxPart
from .placement import is_traced
from .rules import attend, forward_mode_refused


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


_SCALES = (float, type(None))

_memory = Memory()


def checked(q: Any, k: Any, v: Any, mask: Any, check: Callable[..., Checked], **asked: Any) -> Checked | None:
    """Return a call as an earlier call like it was checked, with its own q, k and v.

    Args:
        q: Queries in the layout of the call.
        k: Keys.
        v: Values.
        mask: The mask.
        check: Function that checks a call. Later calls that are alike do not call it.
        **asked: The numbers and names of the call.

    Returns:
        The checked call. None if an array is traced or lies on several devices, if nothing shows that the
        mask has not changed, or if the call is wrong.
    """
    layout = asked["layout"]
    usual = layout in ("bhsd", "bshd") and type(asked["return_lse"]) is bool
    if not usual or type(asked["scale"]) not in _SCALES:
        return None
    key = [jax.config.jax_default_device, *table("jax").values(), *asked.values()]  # type: ignore[attr-defined]
    for x in (q, k, v):
        if not isinstance(x, jax.Array) or is_traced(x) or x.ndim != 4 or x.shape[3] == 0:
            return None
        if type(sharding := x.sharding) is not SingleDeviceSharding:
            return None
        key += x.shape, x.dtype, sharding, x.committed
    lowered = remembered(mask, Shaped.of(q, layout), Shaped.of(k, layout), (q, k, v))
    if lowered is None:
        return None
    # The entry keeps the mask, so no other mask has its number. The number is a cheap key.
    make = partial(_kept, check, lowered, q, k, v, mask, asked)
    kept = _memory.without_arrays((id(lowered), *key), make)
    return None if kept is None else Checked(kept[0].with_inputs(q, k, v), kept[1])


def _kept(check: Callable[..., Checked], lowered: Any, q: Any, k: Any, v: Any, mask: Any, asked: Any) -> Any:
    part, chosen = check(q, k, v, mask, **asked)
    # A function that jit traces may call this. The bounds must not be a part of its program.
    with jax.ensure_compile_time_eval(), jax.default_device(next(iter(q.devices()))):
        part = replace(part, q=None, k=None, v=None, bounds=jnp.asarray(part.bounds))
    return part, chosen, lowered
