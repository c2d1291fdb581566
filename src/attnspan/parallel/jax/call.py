"""One attention over all devices of a mesh: `shard_map` around what each computes, forward and backward.

The gradient is written down and not left to JAX: what a device keeps of a call is its own q, k, v and output,
never the keys that it fetched; and sums over devices are taken where parts of a gradient are, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec

from ...jax.backends import Operands
from ...jax.rules import differentiable, first_order
from ...options import DENSE, DISTANCE
from .axes import Axes
from .device import Work, backward, forward
from .route import Route

__all__ = ["Specs", "attend"]


# Eager calls then find the compiled program.
@partial(jax.jit, static_argnums=0)
def attend(
    work: Work, q: Array, k: Array, v: Array, given: Operands, route: Route | None
) -> tuple[Array, Array]:
    """Attention of global arrays, rows as the route has them: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    # A backend that JAX can differentiate has all derivatives, and so have collectives.
    return (_run if work.has_derivative else _attend)(work, q, k, v, given, route)


class Specs(NamedTuple):
    """How the arrays of a call are split: all that goes with q, k and v as those are, by construction."""

    q: PartitionSpec
    kv: PartitionSpec
    lse: PartitionSpec
    given: Operands
    route: Route | None

    @classmethod
    def of(cls, work: Work, given: Operands, route: Route | None) -> Specs:
        """The specs of a call."""
        axes = work.axes
        dims: Any = {"sinks": ("heads",), "q_index": ("batch",), "k_index": ("batch",)}
        if work.static.bias_kind == DISTANCE:
            dims["bias"] = ("heads",)

        def split(name: str, x: Any) -> Any:
            return None if x is None else axes.spec_of(x, *dims.get(name, ("batch", "heads")))

        return cls(
            axes.spec("batch", "heads", "sequence", None),
            axes.spec("batch", "heads" if work.split_kv else None, "sequence", None),
            axes.spec("batch", "heads", "sequence"),
            Operands(*map(split, given._fields, given)),
            None if route is None else route.specs(axes),
        )


def _bias_axes(axes: Axes, bias: Array | None, kind: int) -> tuple[str, ...]:
    """The axes over whose devices a bias is the same, so that each finds a part of its gradient."""
    if bias is None:
        return ()
    batch = axes.batch if kind == DISTANCE or bias.shape[0] == 1 else ()
    heads = axes.heads if kind == DENSE and bias.shape[1] == 1 else ()
    return (*batch, *heads, *axes.sequence)


def _on_devices(axes: Axes, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _run(work: Work, *args: Any) -> Any:
    specs = Specs.of(work, *args[3:])
    in_specs = specs.q, specs.kv, specs.kv, specs.given, specs.route
    return _on_devices(work.axes, partial(forward, work), in_specs, (specs.q, specs.lse))(*args)


def _differentiate(work: Work, want_dbias: bool, *args: Any) -> Any:
    dlse, given, route = args[1], args[5], args[8]
    specs = Specs.of(work, given, route)
    q, kv, lse, *inputs = specs
    over = _bias_axes(work.axes, given.bias, work.static.bias_kind)
    run = _on_devices(
        work.axes,
        partial(backward, work, want_dbias, over),
        (q, None if dlse is None else lse, q, kv, kv, inputs[0], q, lse, inputs[1]),
        (q, kv, kv, specs.given.bias if want_dbias else None, specs.given.sinks),
    )
    return first_order(work.backend, run)(*args)


_attend = differentiable(_run, _differentiate)
