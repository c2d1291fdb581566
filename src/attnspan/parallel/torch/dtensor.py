"""Context parallelism of DTensors: a plan splits the rows, other mesh axes may split batch and heads.

A DTensor whose sequence is split by a plan has P * n rows in the order of the plan's ranks, padding included.
``DTensor.from_local(layout.shard(x, rank), mesh, [Shard(1)])`` makes one, which all other layers can use.
``distribute_tensor`` makes DTensors that look the same, with rows in their original order. So a plan with
another order raises an error for DTensors without ``dtensor_rows="plan"``.

The plan describes the problem of its own ranks. If other mesh axes split the batch and the heads, its mask,
``heads`` and ``batch`` describe one part of them. Plain tensors in options describe the same part. DTensors
in options, and a seed of shape (), describe the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnspan.call import LAYOUTS
from attnspan.call.options import Given
from attnspan.errors import ShapeError, expect
from attnspan.torch._options import dropout_seeds
from attnspan.torch.dtensor import BATCH, HEADS, ROWS, Places, check_follower, is_dtensor, option_tensors

if TYPE_CHECKING:
    from .mesh_plan import MeshPlan


def attend(
    plan: MeshPlan,
    places: Places,
    q: Any,
    k: Any,
    v: Any,
    given: Given,
    *,
    scale: float | None,
    layout: str,
    return_lse: bool,
    backend: str | None,
) -> Any:
    """`MeshPlan.attention` of DTensors.

    Args:
        plan: Plan of this rank.
        places: Placements of q, k and v, which are consistent.
        q, k, v: DTensors. Their sequence has the rows of all ranks, padding included.
        given, scale, layout, return_lse, backend: See `attnspan.torch.attention`.

    Returns:
        DTensors with the placements of q.

    Raises:
        ShapeError: Sizes do not fit the plan.
        OptionError: An option has other placements than q, or describes the whole instead of a part.
    """
    local, dims, frame = [x.to_local() for x in (q, k, v)], LAYOUTS[layout], plan.frame
    rows = dims.index("tokens" if layout == "thd" else "length")
    for name, x, each in (("q", q, frame.rows_per_rank), ("k", k, frame.keys_per_rank)):
        what, whole = f"{name} as a DTensor with context parallelism", each * frame.strategy.ranks
        wanted = "{} rows of {} ranks together, in the plan's order and with its padding"
        got, ranks = f"shape {tuple(x.shape)} in layout {layout}", frame.strategy.ranks
        remedy = "Make it by DTensor.from_local(layout.shard(x, rank), mesh, [Shard(1)])"
        expect(x.shape[rows] == whole, what, wanted, got, remedy, whole, ranks, error=ShapeError)
    counts = [
        (sizes.get("batch", 1), sizes["heads"])
        for sizes in (dict(zip(dims, x.shape, strict=True)) for x in (q, local[0]))
    ]
    options = _local_options(places, given, *counts)
    asked: Any = {"scale": scale, "layout": layout, "backend": backend, **options.keywords()}
    found = plan.attention(*local, return_lse=True, **asked)
    out = _join(found[0], (*q.shape[:-1], v.shape[-1]), dims, places)
    if not return_lse:
        return out
    sizes = dict(zip(dims, q.shape, strict=True))
    dims = ("heads", "tokens") if layout == "thd" else ("batch", "heads", "length")
    return out, _join(found[1], tuple(sizes[dim] for dim in dims), dims, places)


def _local_options(places: Places, given: Given, whole: tuple[Any, Any], here: tuple[Any, Any]) -> Given:
    """This rank's part of the options. ``whole`` and ``here`` are batch size and heads of q."""
    parts = {}
    for name, x, *dims in option_tensors(given):
        if is_dtensor(x):
            x = _part(places, name, x, *dims)
        for role, dim, all_of_it, mine in zip((BATCH, HEADS), dims, whole, here, strict=True):
            if dim is not None and role in places.roles and x.shape[dim] == all_of_it != mine:
                wanted = f"a tensor for this rank's {role}, {mine}, or a DTensor"
                got = f"a plain tensor for all {all_of_it}, of shape {tuple(x.shape)}"
                remedy = "Distribute it along the mesh axis that splits q, or pass this rank's part"
                expect(False, f"{name} with context parallelism of DTensors", wanted, got, remedy)
        if x is not None:
            parts[name.rpartition(".")[2]] = x
    seed, sinks = parts.pop("dropout_seed", None), parts.pop("sinks", None)
    if seed is not None and seed.dim() == 0 and {BATCH, HEADS} & set(places.roles):
        # Each rank numbers its batch elements and heads from 0, so it needs their own seeds.
        seed = places.part("dropout_seed", dropout_seeds(seed, *whole), 0, 1)
    bias: Any = given.bias
    if parts and not isinstance(bias, Tensor):
        bias = replace(bias, **parts)
    return given.replacing(bias=bias, sinks=sinks, dropout_seed=seed)


def _part(places: Places, name: str, x: Any, batch: int | None, heads: int | None) -> Tensor:
    """This rank's part of a DTensor. Its gradient is summed over ranks that share the part."""
    from torch.distributed.tensor import Partial, Replicate

    check_follower(places, name, x, batch, heads)
    wanted = places.wanted(x, batch, heads)
    gradient = [
        place if place.is_shard() else Partial() if role in (BATCH, HEADS, ROWS) else Replicate()
        for role, place in zip(places.roles, wanted, strict=True)
    ]
    if tuple(x.placements) != wanted:  # replicated, so each rank cuts out its part
        x = x.redistribute(places.mesh, wanted)
    part: Tensor = x.to_local(grad_placements=gradient)
    return part


def _join(x: Tensor, shape: tuple[Any, ...], dims: tuple[str, ...], places: Places) -> Tensor:
    """Make a DTensor from this rank's part."""
    names = {"batch": BATCH, "heads": HEADS, "length": ROWS, "tokens": ROWS}
    at = {names[dim]: i for i, dim in enumerate(dims) if dim in names}
    # In layout bhsd the output is stored as in bshd.
    return places.join(x, shape, at, (0, 2, 1, 3) if dims == LAYOUTS["bhsd"] else None)
