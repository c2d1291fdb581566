"""A call of sharded attention: checked, in the form of the devices' programs, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax import numpy as jnp

from ...errors import ShapeError
from ...jax._attention import _as_arrays, _lower
from ...jax._choice import choose_backend, static_for
from ...jax._contract import Operands, Static
from ...jax._ops import module_of
from ...jax._options import Lowered, lower_options
from ...jax._words_of_masks import words_of
from ...masks import Prepared
from ...problem import Problem, check_arrays, check_layout, check_scale
from ...spans import Spans
from ._arguments import CallOptions, check_call, check_placed, check_rows
from ._axes import Axes
from ._call import attend, make_work, specs_of
from ._device import Inputs, Work

if TYPE_CHECKING:
    from ._sharded import Sharded

_BHSD = ("batch", "heads", "sequence", None)


def attention(sharded: Sharded, q: Any, k: Any, v: Any, options: CallOptions) -> Any:
    """See `Sharded.attention`."""
    axes, layout = sharded.axes, options.layout
    q, k, v = _as_arrays(q=q, k=k, v=v)
    check_layout(layout, q, k, v)
    q, k, v = (_to_bhsd(x, layout) for x in (q, k, v))
    views = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    check_arrays(*views)
    check_scale(options.scale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_placed(axes, name, x, _BHSD)
    _check_divided(axes, q, layout)
    if sharded.route is None:
        bounds, lowered, words = _whole_sequence(sharded, views, options, q)
    else:
        bounds, lowered, words = None, _split_sequence(sharded, views, options, q), None
    given = Operands(bounds, None, None, lowered.seeds, lowered.q_index, lowered.k_index)  # type: ignore[arg-type]
    inputs = Inputs(given, sharded.route)
    split_kv = k.shape[1] % axes.size("heads") == 0
    static = Static(
        scale=q.shape[3] ** -0.5 if options.scale is None else float(options.scale),
        softcap=0.0 if options.softcap is None else float(options.softcap),
        bias_kind=lowered.bias_kind,
        dropout_p=0.0 if lowered.seeds is None else float(options.dropout_p),
        mask=words,
        sinks=lowered.sinks is not None,
        # Parts of sums over devices are not rounded before they are added.
        wide=sharded.route is not None or not split_kv,
    )
    backend = choose_backend(_problem(axes, views, inputs), static, options.backend)
    static = static_for(backend, static)
    work = Work(axes, module_of(backend), static, q.shape[1] // k.shape[1], split_kv)
    work = make_work(work, lowered.bias)
    out, lse = _run(work, *_typed(work, q, k, v, lowered.bias, lowered.sinks, inputs))
    out = _from_bhsd(out, layout)
    lse = lse[0] if layout == "thd" else lse
    return (out, lse) if options.return_lse else out


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


def _whole_sequence(sharded: Sharded, views: Any, options: CallOptions, like: Array) -> Any:
    """Bounds, options and the mask in words where devices have whole sequences."""
    mask, (q, k, v) = sharded.mask, views
    assert mask is not None
    given = options.given
    placed = _lower(mask, q, k, given, like)
    fixed, bare = isinstance(mask, Prepared | Spans), isinstance(mask, Spans)
    lowered = lower_options(given, q, k, placed, fixed, bare, like)
    bounds = jnp.asarray(placed.lowered.bounds)
    whole = _sizes(Axes(sharded.mesh), q, k, v, k.shape[2], bounds.shape[3])
    words = words_of(mask, whole, options.q_index is None and options.k_index is None)
    return bounds, lowered, words


def _split_sequence(sharded: Sharded, views: Any, options: CallOptions, like: Array) -> Lowered:
    """The options where the plan knows the rest."""
    (q, k, _), frame = views, sharded.frame
    assert sharded.rows is not None
    assert sharded.route is not None
    assert frame.num_heads is not None
    keys = sharded.rows if sharded.keys is None else sharded.keys
    planes = sharded.route.bounds.shape[1]
    batch = planes if planes > 1 else None
    check_rows("q", q, frame.num_heads[0], sharded.rows.rows.shape[0], batch)
    check_rows("k", k, frame.num_heads[1], keys.rows.shape[0], batch)
    bias = options.bias
    check_call(options, dense=hasattr(bias, "values") or hasattr(bias, "shape"))
    nowhere = Prepared(None)  # type: ignore[arg-type]
    return lower_options(options.given, q, k, nowhere, True, False, like)


def _problem(axes: Axes, views: Any, inputs: Inputs) -> Problem:
    """What one device computes in one call of a back end."""
    (q, k, v), route = views, inputs.route
    if route is None:
        return _sizes(axes, q, k, v, k.shape[2], inputs.given.bounds.shape[3])
    parts = axes.size("sequence")
    keys = route.own_keys if route.exchange is None else route.exchange.keys
    return _sizes(axes, q, k, v, keys.shape[1] // parts, route.bounds.shape[4])


def _sizes(axes: Axes, q: Any, k: Any, v: Any, k_len: int, runs: int) -> Problem:
    heads = q.shape[1] // axes.size("heads")
    # As many key heads as the kernels are given, where each device picks those that it reads.
    groups = math.gcd(q.shape[1] // k.shape[1], heads)
    return Problem(
        batch=q.shape[0] // axes.size("batch"),
        q_heads=heads,
        kv_heads=heads // groups,
        q_len=q.shape[2] // axes.size("sequence"),
        k_len=k_len,
        head_dim=q.shape[3],
        v_dim=v.shape[3],
        runs=runs,
        dtype=str(q.dtype),
        device=str(axes.mesh.devices.flat[0].platform),
    )


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
