"""Sharded attention: checks, and a forward and a backward pass by `shard_map` on all devices.

The gradient is written by hand. So a device keeps only its own q, k, v and output, and not the keys that it
fetched. Sums over devices are taken only of parts of gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax import numpy as jnp

from attnspan.call import Call, Problem, schema
from attnspan.call.options import Given
from attnspan.errors import ShapeError, expect
from attnspan.jax.backends import choose_backend
from attnspan.jax.front import JaxFront
from attnspan.jax.part import ARRAYS, JaxPart, band_of, part_of
from attnspan.jax.rules import differentiable, first_order
from attnspan.masks import Prepared
from attnspan.parallel.rows import check_attends, check_options

from .axes import Axes
from .device import Work, backward, forward
from .route import Route

if TYPE_CHECKING:
    from .placed import Sharded


_BHSD = ("batch", "heads", "sequence", None)


class _Front(JaxFront):
    """Front end for global arrays, split by a mesh and optionally by a plan."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.device = str(sharded.axes.mesh.devices.flat[0].platform)

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask, given
        axes = self.sharded.axes
        q, k, v = map(jnp.asarray, (q, k, v))
        axes.check_around(q, k, v)
        if layout != "bhsd":
            q, k, v = ((x[None] if layout == "thd" else x).swapaxes(1, 2) for x in (q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            axes.check_placed(name, x, _BHSD)
        remedy = "Split its sequence: layout.plan(...).on(mesh, rows=rows, sequence=...)"
        fits = layout != "thd" or axes.size("batch") == 1
        what = "layout='thd' with split batch elements"
        wanted, got = "batch elements to split", "one packed sequence"
        expect(fits, what, wanted, got, remedy, error=ShapeError)
        axes.check_divides("batch elements of q", q.shape[0], "batch")
        axes.check_divides("heads of q", q.shape[1], "heads")
        return self.shapes(q, k, v, "bhsd")

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        check_attends("mask with a split sequence", self.sharded.shifts)
        if self.sharded.route is not None and self.sharded.heads is not None:
            _check_planned(self.sharded.route, self.sharded.heads, given, q, k)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared | None, Given]:
        return (None, given) if self.sharded.route is not None else super().lower(mask, q, k, given)


def _check_planned(route: Route, heads: tuple[int, int], given: Given, q: Any, k: Any) -> None:
    for name, x, count, rows in (("q", q, heads[0], route.rows), ("k", k, heads[1], route.keys)):
        fits = x.shape[1:3] == (count, rows.shape[1]) and route.planes in (1, x.shape[0])
        batch = f"{route.planes} batch elements, " if route.planes > 1 else ""
        wanted = f"{batch}{count} heads and {rows.shape[1]} rows of all devices, padding included"
        got, remedy = f"shape {tuple(x.shape)} in layout bhsd", "Place inputs by placed.shard(...)"
        expect(fits, f"{name} with a split sequence", wanted, got, remedy, error=ShapeError)
    check_options(given, "with a split sequence")


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
    axes, route, front = sharded.axes, sharded.route, _Front(sharded)
    claimed = None if route is None else options.pop("q_index", None)
    given = Given(**options)
    call = Call.of(front, q, k, v, given, mask=sharded.mask, scale=scale, layout=layout)
    split_kv = call.k.shape[1] % axes.size("heads") == 0
    band = band_of(sharded.mask, call) if route is None else None
    # Parts of sums over devices must not be rounded before they are added.
    wide = route is not None or not split_kv
    part = part_of(call, front.inputs, band=band, wide=wide)
    chosen = choose_backend(_local(axes, call.problem, route), part, backend)
    part = part if chosen.reads_mask else replace(part, band=None)
    work = Work(axes, chosen, call.problem.group_size, split_kv, sharded.piece)
    arrays: Any = (part, route)
    if axes.explicit:  # Types contain shardings, so whole arrays are cut to the expected shardings.
        _, *specs = _specs(work, *arrays)
        arrays = jax.tree.map(axes.put, arrays, tuple(specs))
    found = _attend(work, *arrays)
    out, lse = found if claimed is None else _marked(found, claimed, route)
    if layout == "thd":
        out, lse = out.swapaxes(1, 2)[0], lse[0]
    elif layout == "bshd":
        out = out.swapaxes(1, 2)
    return (out, lse) if return_lse else out


def _marked(found: Any, claimed: Any, route: Any) -> Any:
    """Return the results if q's rows belong to the plan, else NaN."""
    claimed = jnp.asarray(claimed)
    what, wanted = "q_index with a split sequence", f"the rows of the plan's layout, {route.rows.shape}"
    fits, remedy = claimed.shape == route.rows.shape, "Pass rows['q_index'] of placed.shard(...)"
    expect(fits, what, wanted, claimed.shape, remedy, error=ShapeError)
    same = (claimed == route.rows).all()
    return tuple(jnp.where(same, x, jnp.nan) for x in found)


def _local(axes: Axes, whole: Problem, route: Route | None = None) -> Problem:
    """Sizes of one device's part in one call of a backend."""
    heads, batch = whole.q_heads // axes.size("heads"), whole.batch // axes.size("batch")
    # Number of key heads that the kernel gets, if each device picks the heads that it reads.
    kv_heads = heads // math.gcd(whole.group_size, heads)
    local = replace(whole, batch=batch, q_heads=heads, kv_heads=kv_heads)
    if route is None:
        return local
    *_, n, runs, _ = route.bounds.shape
    keys = route.keys.shape[1] // axes.size("sequence")
    k_len = keys if route.exchange is None else route.exchange.keys.shape[3]
    return replace(local, q_len=n, k_len=k_len, runs=runs)


# With jit, eager calls reuse the compiled program.
@partial(jax.jit, static_argnums=0)
def _attend(work: Work, *args: Any) -> tuple[Array, Array]:
    """Compute out and lse of a part, along the route if there is one."""
    # JAX can differentiate such a backend, and collectives, to any order.
    found: tuple[Array, Array] = (_run if work.backend.backward is None else _run_once)(work, *args)
    return found


_DIMS = {"b": "batch", "h": "heads"}


def _specs(work: Work, part: JaxPart, route: Route | None) -> tuple[Any, ...]:
    """Partition specs of lse, of a part and of its options, which are split like q by construction."""
    axes = work.axes
    rows = axes.spec("batch", "heads", "sequence")
    keys = axes.spec("batch", "heads" if work.split_kv else None, "sequence")

    def split(name: str, x: Any) -> Any:
        dims = (_DIMS.get(axis[0]) for axis in schema.axes(name, part.bias_kind))
        return None if x is None else axes.spec_of(x.shape, *dims)

    specs: Any = {name: split(name, getattr(part, name)) for name in ARRAYS}
    of_part = replace(part, **specs | {"q": rows, "k": keys, "v": keys})
    return rows, of_part, None if route is None else route.specs(axes)


def _run(work: Work, *args: Any) -> Any:
    rows, *specs = _specs(work, *args)
    return work.axes.on_each(partial(forward, work), tuple(specs), (rows, rows))(*args)


def _differentiate(work: Work, want_dbias: bool, *args: Any) -> Any:
    part, _, _, _, dlse, route = args
    axes = work.axes
    rows, specs, of_route = _specs(work, part, route)
    # Along axes that do not split a bias, each device computes a part of the bias's gradient.
    split = jax.tree.leaves(tuple(specs.bias or ()))
    over = tuple(name for name in (*axes.sequence, *axes.batch, *axes.heads) if name not in split)
    in_specs = specs, rows, rows, rows, None if dlse is None else rows, of_route
    out_specs = specs.q, specs.k, specs.v, specs.bias if want_dbias else None, specs.sinks
    run = axes.on_each(partial(backward, work, want_dbias, over), in_specs, out_specs)
    return first_order(run, 'Leave the sequence whole, and pass backend="math"')(*args)


_run_once = differentiable(_run, _differentiate)
