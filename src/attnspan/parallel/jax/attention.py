"""A call of sharded attention: checked, in the form of the devices' programs, and back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax import numpy as jnp

from ...call import Call, Problem
from ...errors import ShapeError, expect
from ...jax.backends import choose_backend, static_for, words_of
from ...jax.front import JaxFront, operands_of, static_of
from ...masks import Prepared
from ...options import Given
from .axes import Axes
from .call import Specs, attend
from .device import Work
from .route import Route

if TYPE_CHECKING:
    from .placed import Sharded

__all__ = ["attention"]

_BHSD = ("batch", "heads", "sequence", None)


class _Front(JaxFront):
    """Global arrays, which lie as a mesh and perhaps a plan say."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.device = str(sharded.axes.mesh.devices.flat[0].platform)

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask, given
        axes = self.sharded.axes
        q, k, v = map(jnp.asarray, (q, k, v))
        if layout != "bhsd":
            q, k, v = ((x[None] if layout == "thd" else x).swapaxes(1, 2) for x in (q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            axes.check_placed(name, x, _BHSD)
        remedy, packed = "Split its sequence: layout.plan(...).on(mesh, sequence=...)", layout == "thd"
        fits = not packed or axes.size("batch") == 1
        what, wanted, got = "layout='thd' with split batch rows", "batch rows to split", "one packed row"
        expect(fits, what, wanted, got, remedy, error=ShapeError)
        axes.check_divides("batch rows of q", q.shape[0], "batch")
        axes.check_divides("heads of q", q.shape[1], "heads")
        return self.shapes(q, k, v, "bhsd")

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        if self.sharded.route is not None and self.sharded.heads is not None:
            _check_planned(self.sharded.route, self.sharded.heads, given, q, k)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared | None, Given]:
        return (None, given) if self.sharded.route is not None else super().lower(mask, q, k, given)


def _check_planned(route: Route, heads: tuple[int, int], given: Given, q: Any, k: Any) -> None:
    for name, x, count, rows in (("q", q, heads[0], route.rows), ("k", k, heads[1], route.keys)):
        fits = x.shape[1:3] == (count, rows.shape[1]) and route.planes in (1, x.shape[0])
        batch = f"{route.planes} batch rows, " if route.planes > 1 else ""
        wanted = f"{batch}{count} heads and {rows.shape[1]} rows, those of all devices with padding"
        got, remedy = f"shape {tuple(x.shape)} in layout bhsd", "Place inputs by placed.shard(...)"
        expect(fits, f"{name} with a split sequence", wanted, got, remedy, error=ShapeError)
    kind, remedy = type(given.k_index).__name__, "The plan knows where keys are"
    expect(given.k_index is None, "k_index with a split sequence", "None", kind, remedy)
    dense = hasattr(given.bias, "values") or hasattr(given.bias, "shape")
    got = "a dense bias, which holds a value for each pair of rows of all devices"
    remedy = "Use a bias by position, or fold what is visible into the mask"
    expect(not dense, "bias with a split sequence", "alibi(...) or relative(...)", got, remedy)


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
    q, k, v = front.inputs
    split_kv = k.shape[1] % axes.size("heads") == 0
    words = None
    if route is None:
        indexed = given.q_index is not None or given.k_index is not None
        words = words_of(sharded.mask, _local(axes, call.problem), not indexed)
    # Parts of sums over devices are not rounded before they are added.
    static = static_of(call, words, wide=route is not None or not split_kv)
    chosen = choose_backend(_local(axes, call.problem, route), static, backend)
    static = static_for(chosen, static)
    work = Work(axes, chosen, static, call.problem.group_size, split_kv, sharded.piece)
    arrays: Any = (q, k, v, operands_of(call), route)
    if axes.explicit:  # Arrays get the shardings of the types that are asked for: what is whole is cut.
        specs = Specs.of(work, *arrays[3:])
        wanted = specs.q, specs.kv, specs.kv, specs.given, specs.route
        arrays = jax.tree.map(axes.put, arrays, wanted)
    found = attend(work, *arrays)
    out, lse = found if claimed is None else _marked(found, claimed, route)
    if layout == "thd":
        out, lse = out.swapaxes(1, 2)[0], lse[0]
    elif layout == "bshd":
        out = out.swapaxes(1, 2)
    return (out, lse) if return_lse else out


def _marked(found: Any, claimed: Any, route: Any) -> Any:
    """The results, if q's rows are those of the plan; else NaN."""
    what, wanted = "q_index with a split sequence", f"the rows of the plan's layout, {route.rows.shape}"
    fits, remedy = claimed.shape == route.rows.shape, "Pass rows['q_index'] of placed.shard(...)"
    expect(fits, what, wanted, claimed.shape, remedy, error=ShapeError)
    same = (claimed == route.rows).all()
    return tuple(jnp.where(same, x, jnp.nan) for x in found)


def _local(axes: Axes, whole: Problem, route: Route | None = None) -> Problem:
    """What one device computes in one call of a backend."""
    heads, batch = whole.q_heads // axes.size("heads"), whole.batch // axes.size("batch")
    # As many key heads as the kernels are given, where each device picks those that it reads.
    kv_heads = heads // math.gcd(whole.group_size, heads)
    local = replace(whole, batch=batch, q_heads=heads, kv_heads=kv_heads)
    if route is None:
        return local
    keys, parts = route.keys if route.exchange is None else route.exchange.keys, axes.size("sequence")
    return replace(
        local, q_len=whole.q_len // parts, k_len=keys.shape[1] // parts, runs=route.bounds.shape[4]
    )
