"""Attention as JAX sees it: one differentiable function over any back end, with rules for vmap and meshes.

The layers, from outside: a custom derivative (`_attend`), a batching rule (`batched`), a partitioning rule
(`partitioned`), the back end itself. Each direction has the last three.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ._batching import batched
from ._contract import Operands, Static
from ._partitioning import partitioned
from ._varying import axes_of, spread

#: Every back end by name: its module here.
MODULES = {
    "cpu": "_ffi",
    "xla": "_blockwise",
    "pallas": "_pallas_tpu",
    "cudnn": "_cudnn",
    "pallas_gpu": "_pallas_gpu",
    "math": "_math",
}

#: What `jax.checkpoint` has to keep, by the names of its policies, so that no kernel runs twice.
SAVE_NAMES = ("attnspan.out", "attnspan.lse")


class How(NamedTuple):
    """What a call is compiled for, beside shapes: numbers, back end, layout of q, k, v and out."""

    static: Static
    backend: str
    layout: str


@cache
def module_of(backend: str) -> Any:
    """The module of a back end, imported when it is first asked for."""
    return import_module(f".{MODULES[backend]}", __package__)


# Eager calls then find the compiled program; inside another jit its trace is shared by the layers of a model.
@partial(jax.jit, static_argnames=("how",))
def attend(q: Array, k: Array, v: Array, given: Operands, how: How) -> tuple[Array, Array | None]:
    """Attention in the layout "bhsd" or "bshd", checked arguments; lse is (B, H, Sq).

    A back end may have a derivative of its own (``OWN_DERIVATIVE``): JAX then differentiates what it calls.
    """
    q, k, v, given = spread((q, k, v, given), axes_of(q, k, v, given))
    module = module_of(how.backend)
    if getattr(module, "OWN_DERIVATIVE", False):
        q, k, v = (_to_bhsd(x, how.layout) for x in (q, k, v))
        found = module.forward(q, k, v, given, how.static)
        return _to_bhsd(found[0], how.layout), found[1]
    return _attend(how, q, k, v, given)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, q: Array, k: Array, v: Array, given: Operands) -> tuple[Array, Array]:
    return _forward(how)(q, k, v, given)  # type: ignore[no-any-return]


def _attend_forward(how: How, q: Any, k: Any, v: Any, given: Any) -> tuple[Any, Any]:
    # With symbolic zeros each argument says whether its gradient is wanted: a dense bias's is expensive.
    wanted = given.bias is not None and given.bias.perturbed
    q, k, v = (x.value for x in (q, k, v))
    given = jax.tree.map(lambda x: x.value, given, is_leaf=lambda x: hasattr(x, "perturbed"))
    found = zip(_forward(how)(q, k, v, given), SAVE_NAMES, strict=True)
    out, lse = (checkpoint_name(x, name) for x, name in found)
    return (out, lse), (q, k, v, given, out, lse, _Flag(wanted))


def _attend_backward(how: How, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, given, out, lse, wanted = saved
    dout, dlse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    dout = jnp.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsinks = _backward(how, wanted.on)(dout, dlse, q, k, v, given, out, lse)
    # A dense bias may have q's dtype; its gradient is summed in float32.
    dbias = None if dbias is None else dbias.astype(given.bias.dtype)
    return dq, dk, dv, Operands(None, dbias, dsinks, None, None, None)  # type: ignore[arg-type]


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@jax.tree_util.register_static
class _Flag:
    """A bool among residuals that is no array."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Flag) and other.on == self.on

    def __hash__(self) -> int:
        return hash(self.on)


@cache
def _forward(how: How) -> Any:
    def run(q: Array, k: Array, v: Array, given: Operands) -> tuple[Array, Array]:
        module = module_of(how.backend)
        if how.layout in getattr(module, "LAYOUTS", ("bhsd",)):
            extra = (how.layout,) if how.layout != "bhsd" else ()
            return module.forward(q, k, v, given, how.static, *extra)  # type: ignore[no-any-return]
        q, k, v = (_to_bhsd(x, how.layout) for x in (q, k, v))
        out, lse = module.forward(q, k, v, given, how.static)
        return _to_bhsd(out, how.layout), lse

    names = ("q", "k", "k", "given")
    return first_order(how.backend, batched(partitioned(run, names, how.static, how.layout), how.static))


@cache
def _backward(how: How, want_dbias: bool) -> Any:
    def run(
        dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, given: Operands, out: Array, lse: Array
    ) -> Any:
        module = module_of(how.backend)
        if how.layout in getattr(module, "LAYOUTS", ("bhsd",)):
            extra = (how.layout,) if how.layout != "bhsd" else ()
            return module.backward(dout, dlse, q, k, v, given, out, lse, how.static, want_dbias, *extra)
        dout, q, k, v, out = (_to_bhsd(x, how.layout) for x in (dout, q, k, v, out))
        found = module.backward(dout, dlse, q, k, v, given, out, lse, how.static, want_dbias)
        return (*(_to_bhsd(x, how.layout) for x in found[:3]), *found[3:])

    names = ("q", "lse", "q", "k", "k", "given", "q", "lse")
    parted = partitioned(run, names, how.static, how.layout)
    mapped = batched(parted, how.static, sums=True, want_dbias=want_dbias)
    return first_order(how.backend, mapped)


def first_order(backend: str, run: Any) -> Any:
    """`run`, whose derivative is asked for only where a second one of attention is."""
    guarded = jax.custom_jvp(run)
    guarded.defjvp(partial(_refuse_second, backend))
    return guarded


def _refuse_second(backend: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        f"second derivatives of attention: expected first ones, which back end {backend!r} has; got a "
        'derivative of its gradient. Call attention(..., backend="math") for higher ones.'
    )


def _to_bhsd(x: Array, layout: str) -> Array:
    return x if layout == "bhsd" else x.swapaxes(1, 2)
