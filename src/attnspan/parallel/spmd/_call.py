"""One attention over all devices of a mesh: `shard_map` around what each computes, forward and backward.

The gradient is written down and not left to JAX: what a device keeps of a call is its own q, k, v and output,
never the keys that it fetched; and sums over devices are taken where parts of a gradient are, and nowhere
else.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from ...jax.backends import Operands
from ...jax.rules import SAVE_NAMES
from ...options import DENSE, DISTANCE
from ._axes import Axes
from ._device import Done, Inputs, Work, backward, forward
from ._route import Route


class Specs(NamedTuple):
    """How the arrays of a call are split."""

    q: PartitionSpec
    kv: PartitionSpec
    lse: PartitionSpec
    inputs: Any


def specs_of(work: Work, inputs: Inputs) -> Specs:
    """The specs of q, k, v and of everything that goes with them: split as those are, by construction."""
    axes = work.axes
    route = None if inputs.route is None else inputs.route.specs(axes)
    given = _given_specs(axes, inputs.given, work.static.bias_kind)
    kv_heads = "heads" if work.split_kv else None
    return Specs(
        axes.spec("batch", "heads", "sequence", None),
        axes.spec("batch", kv_heads, "sequence", None),
        axes.spec("batch", "heads", "sequence"),
        Inputs(given, route),
    )


def _given_specs(axes: Axes, given: Operands, kind: int) -> Operands:
    def some(x: Array | None, *dims: str | None) -> PartitionSpec | None:
        # A dim of 1 that all batch rows or heads share is whole everywhere.
        if x is None:
            return None
        return axes.spec(*(dim if size > 1 else None for dim, size in zip(dims, x.shape, strict=True)))

    slopes = ("heads", None) if kind == DISTANCE else ("batch", "heads")
    bias = ("batch", "heads", None, None) if kind == DENSE else slopes
    return Operands(
        some(given.bounds, "batch", "heads", None, None, None),  # type: ignore[arg-type]
        some(given.bias, *bias),  # type: ignore[arg-type]
        some(given.sinks, "heads"),  # type: ignore[arg-type]
        some(given.seeds, "batch", "heads", None),  # type: ignore[arg-type]
        some(given.q_index, "batch", None),  # type: ignore[arg-type]
        some(given.k_index, "batch", None),  # type: ignore[arg-type]
    )


def bias_axes(axes: Axes, bias: Array | None, kind: int) -> tuple[str, ...]:
    """The axes over whose devices a bias is the same, so that each finds a part of its gradient."""
    if bias is None:
        return ()
    batch = axes.batch if kind == DISTANCE or bias.shape[0] == 1 else ()
    heads = axes.heads if kind == DENSE and bias.shape[1] == 1 else ()
    return (*batch, *heads, *axes.sequence)


def attend(
    work: Work, q: Array, k: Array, v: Array, bias: Array | None, sinks: Array | None, rest: Inputs
) -> tuple[Array, Array]:
    """Attention of global arrays.

    Args:
        work: What is known when the call is traced.
        q: Shape (B, Hq, Sq, D), rows as the plan has them where the sequence is split.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bias: As in `Operands`.
        sinks: As in `Operands`.
        rest: The other inputs.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq).
    """
    # A back end that JAX can differentiate has all derivatives, and so have collectives.
    run = _run if getattr(work.backend, "OWN_DERIVATIVE", False) else _attend
    return run(work, q, k, v, bias, sinks, rest)


def _run(
    work: Work, q: Array, k: Array, v: Array, bias: Array | None, sinks: Array | None, rest: Inputs
) -> tuple[Array, Array]:
    inputs = _whole(rest, bias, sinks)
    specs = specs_of(work, inputs)
    run = jax.shard_map(
        partial(forward, work),
        mesh=work.axes.mesh,
        in_specs=(specs.q, specs.kv, specs.kv, specs.inputs),
        out_specs=(specs.q, specs.lse),
        check_vma=False,
    )
    return run(q, k, v, inputs)


_attend = jax.custom_vjp(_run, nondiff_argnums=(0,))


def _whole(rest: Inputs, bias: Array | None, sinks: Array | None) -> Inputs:
    return rest._replace(given=rest.given._replace(bias=bias, sinks=sinks))


def _attend_forward(work: Work, *primals: Any) -> Any:
    q, k, v, bias, sinks, rest = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    found = zip(_run(work, q, k, v, bias, sinks, rest), SAVE_NAMES, strict=True)
    out, lse = (checkpoint_name(x, name) for x, name in found)
    # A dense gradient is as large as its bias: none is made that nobody asked for.
    wanted = () if primals[3] is not None and primals[3].perturbed else None
    return (out, lse), (q, k, v, bias, sinks, rest, out, lse, wanted)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _attend_backward(work: Work, kept: Any, gradients: Any) -> Any:
    q, k, v, bias, sinks, rest, out, lse, wanted = kept
    dout, dlse = gradients
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(out)
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    work = replace(work, want_dbias=wanted is not None)
    first = jax.custom_jvp(partial(_differentiate, work))
    first.defjvp(partial(_refuse_second, work))
    found = first(q, k, v, _whole(rest, bias, sinks), Done(dout, dlse, out, lse))
    dq, dk, dv, dbias, dsinks = found
    dbias = None if dbias is None else dbias.astype(bias.dtype)
    dsinks = None if dsinks is None else dsinks.astype(sinks.dtype)
    return dq, dk, dv, dbias, dsinks, None


def _differentiate(work: Work, q: Array, k: Array, v: Array, inputs: Inputs, done: Done) -> Any:
    specs = specs_of(work, inputs)
    parts: Any = specs.q, None if done.dlse is None else specs.lse, specs.q, specs.lse
    done_specs = Done(*parts)
    bias_spec = specs.inputs.given.bias if work.want_dbias else None
    run = jax.shard_map(
        partial(backward, work),
        mesh=work.axes.mesh,
        in_specs=(specs.q, specs.kv, specs.kv, specs.inputs, done_specs),
        out_specs=(specs.q, specs.kv, specs.kv, bias_spec, specs.inputs.given.sinks),
        check_vma=False,
    )
    return run(q, k, v, inputs, done)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _refuse_second(work: Work, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        f"second derivatives of sharded attention: expected first ones, which {work.backend.__name__} has; "
        'got a derivative of its gradient. Call attention(..., backend="math") for higher ones.'
    )


def make_work(work: Work, bias: Array | None) -> Work:
    """The work, with the axes that the bias's gradient is summed over."""
    return replace(work, bias_axes=bias_axes(work.axes, bias, work.static.bias_kind))


__all__ = ["Inputs", "Route", "Work", "attend", "make_work"]
