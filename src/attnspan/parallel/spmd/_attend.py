"""A call of sharded attention: checked, in the form of the devices' programs, and back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax import numpy as jnp

from ...call import Call, Problem
from ...errors import ShapeError
from ...jax.backends import MaskWords, choose_backend, module_of, static_for, words_of
from ...jax.front import JaxFront, operands_of, static_of
from ...masks import Prepared
from ...options import Given
from ._arguments import check_given, check_placed, check_rows
from ._axes import Axes
from ._call import attend, make_work, specs_of
from ._device import Inputs, Work

if TYPE_CHECKING:
    from ._sharded import Sharded

_BHSD = ("batch", "heads", "sequence", None)


class _Front(JaxFront):
    """Global arrays, which lie as a mesh and perhaps a plan say."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.device = str(sharded.mesh.devices.flat[0].platform)

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask, given
        axes = self.sharded.axes
        q, k, v = (_to_bhsd(jnp.asarray(x), layout) for x in (q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_placed(axes, name, x, _BHSD)
        _check_divided(axes, q, layout)
        return self.shapes(q, k, v, "bhsd")

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        sharded = self.sharded
        if sharded.route is None:
            return
        assert sharded.rows is not None
        assert sharded.frame.num_heads is not None
        keys = sharded.rows if sharded.keys is None else sharded.keys
        planes = sharded.route.bounds.shape[1]
        batch = planes if planes > 1 else None
        check_rows("q", q, sharded.frame.num_heads[0], sharded.rows.rows.shape[0], batch)
        check_rows("k", k, sharded.frame.num_heads[1], keys.rows.shape[0], batch)
        check_given(given)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared | None, Given]:
        return (None, given) if self.sharded.route is not None else super().lower(mask, q, k, given)


def attention(
    sharded: Sharded,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """See `Sharded.attention`."""
    axes, front, given = sharded.axes, _Front(sharded), Given(**options)
    call = Call.of(front, q, k, v, given, mask=sharded.mask, scale=scale, layout=layout)
    q, k, v = front.inputs
    operands = operands_of(call)
    inputs = Inputs(operands._replace(bias=None, sinks=None), sharded.route)
    split_kv = k.shape[1] % axes.size("heads") == 0
    # Parts of sums over devices are not rounded before they are added.
    static = static_of(call, _words(sharded, call), wide=sharded.route is not None or not split_kv)
    chosen = choose_backend(_problem(axes, call.problem, inputs), static, backend)
    static = static_for(chosen, static)
    work = Work(axes, module_of(chosen), static, call.problem.group_size, split_kv)
    work = make_work(work, operands.bias)
    out, lse = _run(work, *_typed(work, q, k, v, operands.bias, operands.sinks, inputs))
    out = _from_bhsd(out, layout)
    lse = lse[0] if layout == "thd" else lse
    return (out, lse) if return_lse else out


# Eager calls then find the compiled program.
_run = jax.jit(attend, static_argnums=0)


def _to_bhsd(x: Array, layout: str) -> Array:
    if layout == "bhsd":
        return x
    return x.swapaxes(1, 2) if layout == "bshd" else x.swapaxes(0, 1)[None]


def _from_bhsd(x: Array, layout: str) -> Array:
    if layout == "bhsd":
        return x
    return x.swapaxes(1, 2) if layout == "bshd" else x[0].swapaxes(0, 1)


def _check_divided(axes: Axes, q: Array, layout: str) -> None:
    if layout == "thd" and axes.size("batch") > 1:
        raise ShapeError(
            "layout='thd' with split batch rows",
            expected="batch rows to split",
            got="one row of packed documents",
            remedy="Split its sequence: shard(mesh, sequence=...)",
        )
    axes.check_divides("batch rows of q", q.shape[0], "batch")
    axes.check_divides("heads of q", q.shape[1], "heads")


def _words(sharded: Sharded, call: Call) -> MaskWords | None:
    """The mask in words, where devices have whole sequences."""
    if sharded.route is not None:
        return None
    indexed = call.given.q_index is not None or call.given.k_index is not None
    return words_of(sharded.mask, _local(Axes(sharded.mesh), call.problem), not indexed)


def _problem(axes: Axes, whole: Problem, inputs: Inputs) -> Problem:
    """What one device computes in one call of a backend."""
    if (route := inputs.route) is None:
        return _local(axes, whole)
    keys = route.own_keys if route.exchange is None else route.exchange.keys
    k_len = keys.shape[1] // axes.size("sequence")
    return replace(_local(axes, whole), k_len=k_len, runs=route.bounds.shape[4])


def _local(axes: Axes, whole: Problem) -> Problem:
    """The sizes of one device's part, its keys being whole."""
    heads = whole.q_heads // axes.size("heads")
    # As many key heads as the kernels are given, where each device picks those that it reads.
    kv_heads = heads // math.gcd(whole.group_size, heads)
    batch, q_len = whole.batch // axes.size("batch"), whole.q_len // axes.size("sequence")
    return replace(whole, batch=batch, q_heads=heads, kv_heads=kv_heads, q_len=q_len)


def _typed(work: Work, q: Array, k: Array, v: Array, bias: Any, sinks: Any, inputs: Inputs) -> Any:
    """The arrays in the shardings of their types, where a mesh has such: what is whole is cut, at no cost."""
    if not work.axes.explicit:
        return q, k, v, bias, sinks, inputs
    whole = inputs._replace(given=inputs.given._replace(bias=bias, sinks=sinks))
    specs = specs_of(work, whole)

    def put(x: Array, spec: Any) -> Array:
        sharding = jax.sharding.NamedSharding(work.axes.mesh, spec)
        return jax.sharding.reshard(x, sharding)  # type: ignore[no-any-return]

    q, k, v = (put(x, spec) for x, spec in ((q, specs.q), (k, specs.kv), (v, specs.kv)))
    whole = jax.tree.map(put, whole, specs.inputs)
    rest = whole._replace(given=whole.given._replace(bias=None, sinks=None))
    return q, k, v, whole.given.bias, whole.given.sinks, rest
