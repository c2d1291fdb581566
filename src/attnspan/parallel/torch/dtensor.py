"""Context parallelism of DTensors: a plan splits the rows, other mesh axes may split batch rows and heads.

A DTensor whose sequence is split by a plan holds the rows in the order of its ranks, padding included, P * n
of them: ``DTensor.from_local(layout.shard(x, rank), mesh, [Shard(1)])`` makes one, and everything but
attention may work on it. One of rows in their natural order, as ``distribute_tensor`` makes it, looks the
same: so a plan whose order is another one takes DTensors only with ``dtensor_rows="plan"``.

The plan knows only its own ranks: its mask, ``heads`` and ``batch`` describe what they hold together, which
is a part of the batch rows and heads where other mesh axes split these. So do options that are plain tensors;
those that are DTensors describe the whole, and so does a seed of shape ().
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...call import LAYOUTS
from ...errors import ShapeError, expect
from ...options import Given
from ...torch._options import dropout_seeds
from ...torch.dtensor import BATCH, HEADS, ROWS, Places, check_follower, is_dtensor, option_tensors

if TYPE_CHECKING:
    from .attention import MeshPlan

__all__ = ["attend"]


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
) -> Any:
    """`MeshPlan.attention` of DTensors.

    Args:
        plan: Of this rank.
        places: How q, k and v lie, consistently.
        q: A DTensor; the size of its sequence is that of all ranks together, padding included.
        k, v: Keys and values.
        given: The options.
        scale, layout, return_lse: As of `attnspan.torch.attention`.

    Returns:
        DTensors that lie as q does.

    Raises:
        ShapeError: Sizes do not fit the plan.
        OptionError: An option lies otherwise than q, or describes the whole where a part is needed.
    """
    local = [x.to_local() for x in (q, k, v)]
    _check_sizes(plan, q, k, local, layout)
    options = _Options(places, _counts(q, layout), _counts(local[0], layout)).of(given)
    found = plan.attention(*local, scale=scale, layout=layout, return_lse=True, **options.keywords())
    dims = LAYOUTS[layout]
    out = _join(found[0], (*q.shape[:-1], v.shape[-1]), dims, places)
    if not return_lse:
        return out
    sizes = dict(zip(dims, q.shape, strict=True))
    dims = ("heads", "tokens") if layout == "thd" else ("batch", "heads", "length")
    return out, _join(found[1], tuple(sizes[dim] for dim in dims), dims, places)


def _counts(q: Tensor, layout: str) -> tuple[Any, Any]:
    """Batch rows and heads."""
    sizes = dict(zip(LAYOUTS[layout], q.shape, strict=True))
    return sizes.get("batch", 1), sizes["heads"]


def _check_sizes(plan: MeshPlan, q: Tensor, k: Tensor, local: list[Tensor], layout: str) -> None:
    dims, frame = LAYOUTS[layout], plan.frame
    rows, heads = dims.index("tokens" if layout == "thd" else "length"), dims.index("heads")
    for name, x, part, each, count in (
        ("q", q, local[0], frame.rows_per_rank, frame.heads[0]),
        ("k", k, local[1], frame.keys_per_rank, frame.heads[1]),
    ):
        what, whole = f"{name} as a DTensor with context parallelism", each * frame.strategy.ranks
        wanted = "{} rows: those of {} ranks, in the plan's order and with its padding"
        remedy = "Make it by DTensor.from_local(layout.shard(x, rank), mesh, [Shard(1)])"
        got = f"shape {tuple(x.shape)} in layout {layout}"
        expect(
            x.shape[rows] == whole, what, wanted, got, remedy, whole, frame.strategy.ranks, error=ShapeError
        )
        remedy, got = (
            "Plan with the heads of one rank's part",
            f"{part.shape[heads]} here, of {x.shape[heads]} in all",
        )
        expect(
            part.shape[heads] == count, what, "{} heads on this rank", got, remedy, count, error=ShapeError
        )


class _Options:
    """The options of a call as this rank takes them.

    Args:
        places: How q lies.
        whole: Batch rows and heads of q.
        here: Those of this rank's part.
    """

    def __init__(self, places: Places, whole: tuple[Any, Any], here: tuple[Any, Any]) -> None:
        self.places, self.whole, self.here = places, whole, here

    def of(self, given: Given) -> Given:
        parts = {
            name.rpartition(".")[2]: self._part(name, x, batch, heads)
            for name, x, batch, heads in option_tensors(given)
            if x is not None
        }
        seed, sinks = parts.pop("dropout_seed", None), parts.pop("sinks", None)
        if seed is not None and seed.dim() == 0 and {BATCH, HEADS} & set(self.places.roles):
            # Each rank numbers its batch rows and heads from 0: it needs the seeds of those it has.
            seed = self.places.part("dropout_seed", dropout_seeds(seed, *self.whole), 0, 1)
        bias: Any = given.bias
        if parts and not isinstance(bias, Tensor):
            bias = replace(bias, **parts)
        return replace(given, bias=bias, sinks=sinks, dropout_seed=seed)

    def _part(self, name: str, x: Any, batch: int | None, heads: int | None) -> Any:
        if is_dtensor(x):
            return self._local(name, x, batch, heads)
        for what, dim, whole, here in zip((BATCH, HEADS), (batch, heads), self.whole, self.here, strict=True):
            if dim is not None and what in self.places.roles and x.shape[dim] == whole != here:
                what, wanted = (
                    f"{name} with context parallelism of DTensors",
                    f"that of this rank's {what}, {here}, or a DTensor",
                )
                got = f"a plain tensor for all {whole}, of shape {tuple(x.shape)}"
                remedy = "Distribute it along the mesh axis that splits q so, or take this rank's part"
                expect(False, what, wanted, got, remedy)
        return x

    def _local(self, name: str, x: Any, batch: int | None, heads: int | None) -> Tensor:
        """This rank's part of a DTensor; its gradient is summed over ranks that share the part."""
        from torch.distributed.tensor import Partial, Replicate

        check_follower(self.places, name, x, batch, heads)
        wanted = self.places.wanted(x, batch, heads)
        gradient = [
            place if place.is_shard() else Partial() if role in (BATCH, HEADS, ROWS) else Replicate()
            for role, place in zip(self.places.roles, wanted, strict=True)
        ]
        if tuple(x.placements) != wanted:  # It is whole: each rank cuts its own part out.
            x = x.redistribute(self.places.mesh, wanted)
        part: Tensor = x.to_local(grad_placements=gradient)
        return part


def _join(x: Tensor, shape: tuple[Any, ...], dims: tuple[str, ...], places: Places) -> Tensor:
    """The DTensor of which this rank has computed its part."""
    names = {"batch": BATCH, "heads": HEADS, "length": ROWS, "tokens": ROWS}
    at = {names[dim]: i for i, dim in enumerate(dims) if dim in names}
    # In layout bhsd the output is stored as in bshd.
    return places.join(x, shape, at, (0, 2, 1, 3) if dims == LAYOUTS["bhsd"] else None)
