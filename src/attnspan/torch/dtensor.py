"""DTensors: how a call's arguments lie on their mesh, each rank's part of a mask, strategies of the operators.

Batch rows and heads may be split; every rank then attends to its part alone. The sequence may not: each rank
would see a part of the keys and be wrong without any error, so it is refused by name unless a plan exchanges
keys. DTensor would make inconsistent arguments consistent by moving them, silently; here they are refused.
Only a tensor of the mask or of an option that each rank has whole is cut down to the part that a rank needs,
which moves nothing.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._biases import Alibi, DenseBias, Relative
from .._mistakes import OneMask
from ..errors import OptionError, ShapeError, expect
from ..masks import Mask, Prepared
from ..options import DISTANCE, Options
from ..problem import LAYOUTS
from ..spans import Spans
from ._ops import NO_OPTIONS, backward_op, forward_op
from ._options import Given, dropout_seeds

__all__ = [
    "BATCH",
    "HEADS",
    "ROWS",
    "WHOLE",
    "Places",
    "ShardedMask",
    "check_options",
    "is_dtensor",
    "lower_mask",
    "on_mesh",
    "option_tensors",
    "places_of",
    "register",
]

#: What a mesh axis splits. `ROWS` is the sequence, which only a plan may split; `WHOLE`: nothing.
BATCH, HEADS, ROWS, WHOLE = "batch", "heads", "rows", "whole"
_DIMS = {"batch": BATCH, "heads": HEADS, "length": ROWS, "tokens": ROWS}
#: Number of dims of a mask's arrays that have none for batch rows, by kind of mask.
_RANKS = {"Cache": 0, "KeyPadding": 0, "Prefix": 0, "Documents": 1, "Groups": 1, "Keys": 1, "Segments": 1}
_RANKS |= {"Dense": 2, "Explicit": 4}
_PLAN = (
    "Redistribute it, or plan the exchange of keys that a split sequence needs: "
    "mask=attnspan.parallel.ContextParallel(...)"
)

#: A tensor that belongs to q: its name, its value, and which of its dims are those of batch rows and heads.
Follower = tuple[str, Any, int | None, int | None]


class ShardedMask(OneMask):
    """A mask together with who holds which part of the problem: `attention` hands its calls to it.

    `attnspan.parallel.ContextParallel` is one.
    """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """The result of `attnspan.torch.attention`, without ``mask``, for this rank's part of q, k and v."""
        raise NotImplementedError(f"{type(self).__name__} must say how its part is computed")


def is_dtensor(x: object) -> bool:
    """Whether it is a DTensor; asking loads nothing, as importing DTensor takes long."""
    if type(x) is Tensor or not isinstance(x, Tensor) or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


@dataclass(frozen=True)
class Places:
    """How the q, k and v of a call lie on their mesh.

    Attributes:
        mesh: The DeviceMesh.
        roles: What each of its axes splits: `BATCH`, `HEADS`, `ROWS` or `WHOLE`.
    """

    mesh: Any
    roles: tuple[str, ...]

    def wanted(self, x: Tensor, batch: int | None, heads: int | None) -> tuple[Any, ...]:
        """The placements of a tensor that belongs to q: it is split where q is, but for dims of size 1.

        Args:
            x: The tensor.
            batch: Which of its dims is that of batch rows, or None.
            heads: Which is that of query heads, or None.
        """
        return tuple(_follow(x, role, batch, heads) for role in self.roles)

    def check(self, name: str, x: Tensor, batch: int | None, heads: int | None) -> None:
        """Raise an OptionError unless a tensor is plain, whole on each rank, or split where q is."""
        _check_all([(name, x, batch, heads)], self)

    def part(self, name: str, x: Any, batch: int | None, heads: int | None) -> Tensor:
        """This rank's part of a tensor that belongs to q; a plain one is taken to be the whole."""
        self.check(name, x, batch, heads)
        whole = x if is_dtensor(x) else _replicated(x, self.mesh)
        # From whole to split: each rank cuts its own part out.
        return whole.redistribute(self.mesh, self.wanted(x, batch, heads)).to_local()  # type: ignore[no-any-return]

    def join(
        self, x: Tensor, shape: Sequence[Any], dims: dict[str, int], order: Sequence[int] | None = None
    ) -> Tensor:
        """The DTensor of which each rank has a part.

        Args:
            x: This rank's part.
            shape: Sizes of the whole.
            dims: Which dim belongs to which role; the whole is split along these where q is.
            order: The dims as they are stored, the last one without gaps; None for the usual order.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Shard(dims[role]) if role in dims else Replicate() for role in self.roles]
        stride, step = [1] * len(shape), 1
        for dim in reversed(range(len(shape)) if order is None else order):
            stride[dim], step = step, step * shape[dim]
        whole = {"shape": torch.Size(shape), "stride": tuple(stride)}
        found: Tensor = DTensor.from_local(x, self.mesh, placements, run_check=False, **whole)  # type: ignore[arg-type]
        return found


def places_of(q: Tensor, k: Tensor, v: Tensor, layout: str, plan_mesh: Any = None) -> Places | None:
    """How q, k and v lie on their mesh; None where all are plain.

    Args:
        q: As given to `attention`, as all.
        k: Keys.
        v: Values.
        layout: "bhsd", "bshd" or "thd".
        plan_mesh: The mesh of a plan, whose axes split the rows; None where there is no plan.

    Raises:
        OptionError: Some are no DTensors, lie on other meshes, or are split otherwise or along dims that may
            not be.
        ShapeError: A rank would have no batch row, or heads without their key heads.
    """
    given: tuple[Any, ...] = (q, k, v)
    meshes = tuple(x.device_mesh if is_dtensor(x) else None for x in given)
    if meshes == (None, None, None):
        return None
    placements = tuple(tuple(x.placements) if is_dtensor(x) else None for x in given)
    found = Places(meshes[0], _find_roles(layout, meshes, placements, plan_mesh))
    heads, batch = LAYOUTS[layout].index("heads"), LAYOUTS[layout][0] == "batch"
    _check_parts(found, q.shape[0] if batch else 1, q.shape[heads], k.shape[heads])
    return found


# Run while a compiler reads the call, as placements never change within a program: nothing of it is traced,
# and an error keeps its message.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_roles(
    layout: str, meshes: tuple[Any, ...], placements: tuple[Any, ...], plan_mesh: Any
) -> tuple[str, ...]:
    """What each mesh axis splits, by the placements of q, k and v, which must agree."""
    from torch.distributed.tensor import Replicate, Shard

    first = next(i for i, mesh in enumerate(meshes) if mesh is not None)
    mesh, wanted, dims = meshes[first], placements[first], LAYOUTS[layout]
    for name, own, places in zip("qkv", meshes, placements, strict=True):
        what, one = f"{name} as a DTensor", (_words(wanted), mesh, "qkv"[first])
        remedy = "Give all three as DTensors (DTensor.from_local), or none (to_local)"
        expect(own, name, "a DTensor with {} on {}, as {} is one", "a plain tensor", remedy, *one)
        expect(own == mesh, what, "the mesh of q, {}", own, "Place q, k and v on one mesh", mesh)
        remedy = "Redistribute one of them: attention moves nothing by itself"
        expect(places == wanted, what, "{}, as q", _words(places), remedy, _words(wanted))
    split = {i: _DIMS[dim] for i, dim in enumerate(dims) if dim in _DIMS}
    may = [i for i, role in split.items() if role != ROWS or plan_mesh is not None]
    expected = ", ".join(f"Shard({i}) ({dims[i]})" for i in may)
    for place in wanted:
        dim = place.dim if type(place) is Shard else None
        rows = split.get(dim) == ROWS
        got = repr(place) if dim is None else f"{place!r}, which splits {'q_len' if rows else dims[dim]}"
        fits, remedy = type(place) is Replicate or dim in may, _PLAN if rows else "Redistribute it"
        expect(fits, "q as a DTensor", "{} or Replicate()", got, remedy, expected)
    if plan_mesh is not None:
        axes, rows_at = _axes_of_plan(mesh, plan_mesh), next(i for i, role in split.items() if role == ROWS)
        fits = axes == [i for i, place in enumerate(wanted) if place == Shard(rows_at)]
        expected = "Shard({}) along mesh axes {} only: the plan's ranks hold its rows"
        remedy = "Make it by DTensor.from_local(...) of rows that cp.shard(...) gave"
        what = "q as a DTensor with context parallelism"
        expect(fits, what, expected, _words(wanted), remedy, rows_at, f"{axes}")
    return tuple(split[place.dim] if place.is_shard() else WHOLE for place in wanted)


def _axes_of_plan(mesh: Any, plan_mesh: Any) -> list[int]:
    """The axes of a mesh whose ranks are those of a plan, in its order."""
    ranks, wanted, here = mesh.mesh, plan_mesh.mesh.flatten(), mesh.get_coordinate()
    counts = range(1, mesh.ndim + 1)
    found = [list(axes) for count in counts for axes in combinations(range(mesh.ndim), count)]
    found = [
        axes
        for axes in found
        if ranks[tuple(slice(None) if i in axes else here[i] for i in range(mesh.ndim))]
        .flatten()
        .equal(wanted)
    ]
    # Axes of size 1 are told apart by name.
    own, names = mesh.mesh_dim_names or (), plan_mesh.mesh_dim_names or ()
    found.sort(key=lambda axes: tuple(own[i] for i in axes if own) != names)
    what, expected = "q as a DTensor with context parallelism", "a mesh with the ranks of the plan, {}"
    remedy = "Make ContextParallel and the DTensors of one mesh: ContextParallel(mesh['cp'], ...)"
    expect(found, what, expected + ", along its axes", mesh, remedy, f"{wanted.tolist()}")
    return found[0]


def _check_parts(places: Places, batch: Any, q_heads: Any, kv_heads: Any) -> None:
    """Raise a ShapeError unless every rank has a batch row, and heads together with their key heads."""
    for role, what, size in ((BATCH, "batch rows", batch), (HEADS, "key heads", kv_heads)):
        counts = [places.mesh.size(axis) for axis, own in enumerate(places.roles) if own == role]
        ranks, sizes = 1, {size}
        for count in counts:
            ranks *= count
        if ranks == 1 or size % ranks == 0:
            continue
        name, remedy = "q, k and v as DTensors", "Repeat key heads, or share heads out to fewer ranks"
        expected = "a multiple of {} key heads, as so many ranks share {} query heads"
        fits = role != HEADS or q_heads == kv_heads
        expect(fits, name, expected, kv_heads, remedy, ranks, q_heads, error=ShapeError)
        for count in counts:
            # The parts that Shard makes.
            sizes = {min(-(-n // count), max(n + n // -count * i, 0)) for n in sizes for i in range(count)}
        expected, remedy = what + " for each of {} ranks", "Use fewer ranks along that axis, or Replicate()"
        expect(0 not in sizes, name, expected, size, remedy, ranks, error=ShapeError)


def _words(placements: Any) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def _follow(x: Any, role: str, batch: int | None = 0, heads: int | None = 1) -> Any:
    """Placement of a tensor that belongs to q, with these dims, along a mesh axis of this role."""
    from torch.distributed.tensor import Replicate, Shard

    if x is None:
        return None
    dim = {BATCH: batch, HEADS: heads}.get(role)
    return Replicate() if dim is None or x.shape[dim] == 1 else Shard(dim)


def _check_all(tensors: Iterable[Follower], places: Places | None) -> None:
    """Raise an OptionError for a DTensor that is split otherwise than q, or lies on another mesh, or q none."""
    for name, x, batch, heads in tensors:
        if is_dtensor(x):
            mesh, wanted = (None, ()) if places is None else (places.mesh, places.wanted(x, batch, heads))
            _check_follower(name, x.device_mesh, tuple(x.placements), mesh, wanted)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_follower(
    name: str, mesh: Any, placements: tuple[Any, ...], q_mesh: Any, wanted: tuple[Any, ...]
) -> None:
    got, what = _words(placements), f"{name} as a DTensor"
    remedy = "Give q, k and v as DTensors too, or its to_local()"
    expect(q_mesh is not None, name, "a plain tensor, as q, k and v are", f"a DTensor with {got}", remedy)
    expect(mesh == q_mesh, what, "the mesh of q, {}", mesh, "Place it on the mesh of q, k and v", q_mesh)
    fits = placements == wanted or all(place.is_replicate() for place in placements)
    expected = "{}, which goes with q" + ", or Replicate()" * any(place.is_shard() for place in wanted)
    remedy = "Redistribute it: attention moves nothing by itself"
    expect(fits, what, expected, got, remedy, _words(wanted))


def option_tensors(given: Given) -> Iterator[Follower]:
    """The tensors of a call's options.

    Args:
        given: The options.
    """
    bias: Any = DenseBias(given.bias) if isinstance(given.bias, Tensor) else given.bias
    if isinstance(bias, Alibi):
        each_row = bias.slopes.ndim == 2
        yield "bias.slopes", bias.slopes, 0 if each_row else None, int(each_row)
    if isinstance(bias, Relative):
        yield "bias.table", bias.table, None, 0
        yield "bias.buckets", bias.buckets, None, None
    if isinstance(bias, DenseBias):
        ndim = bias.values.ndim
        yield "bias.values", bias.values, 0 if ndim == 4 else None, ndim - 3 if ndim >= 3 else None
    yield "sinks", given.sinks, None, 0
    seed = given.dropout_seed
    own = isinstance(seed, Tensor) and seed.dim() == 2
    yield "dropout_seed", seed, 0 if own else None, 1 if own else None
    for name, index in (("q_index", given.q_index), ("k_index", given.k_index)):
        yield name, index, 0 if isinstance(index, Tensor) and index.dim() == 2 else None, None


def check_options(given: Given, places: Places | None) -> None:
    """Raise for an option whose tensor is a DTensor that does not go with q.

    Args:
        given: The options.
        places: How q lies; None where it is plain.

    Raises:
        OptionError: It is split otherwise than q, lies on another mesh, or q is plain.
    """
    if places is not None or "torch.distributed.tensor" in sys.modules:
        _check_all(option_tensors(given), places)


def lower_mask(
    mask: Any, places: Places | None, q: Tensor, k_len: Any, q_index: Tensor | None, k_index: Tensor | None
) -> Prepared | None:
    """Lower a mask of which some arrays are DTensors; None for any other, and for one that is lowered.

    Plain arrays of a mask describe all batch rows and are the same on all ranks: such masks are lowered
    whole, as on one rank. Arrays that are split over ranks cannot be, so all of the mask is then cut down to
    this rank's part, lowered, and put together again as a DTensor. Nothing is moved.

    Args:
        mask: An expression, a Prepared or Spans.
        places: How q lies; None where it is plain.
        q: Shape (B, Hq, Sq, D).
        k_len: Sk.
        q_index: Indices of the rows, as given to `attention`, or None.
        k_index: Indices of the keys, or None.

    Returns:
        The mask with bounds and indices as DTensors on q's mesh.

    Raises:
        OptionError: An array is split otherwise than q or q is plain, or the mask has a function of batch
            rows or heads.
        ShapeError: An array has another number of batch rows.
    """
    if not isinstance(mask, (Mask, Spans)) or "torch.distributed.tensor" not in sys.modules:
        return None
    arrays = _arrays(mask)
    if places is None or isinstance(mask, (Prepared, Spans)):
        _check_all(arrays, places)
        return None
    if not any([is_dtensor(x) for x in (q_index, k_index, *(array[1] for array in arrays))]):
        return None
    local: Any = q.to_local()  # type: ignore[attr-defined]
    cutter = _Cutter(places, q, local)
    here = cutter.cut(mask)
    rows, keys = cutter.part("q_index", q_index, _batch(q_index, 1)), cutter.part("k_index", k_index, None)
    sizes = {"batch": local.shape[0], "heads": local.shape[1]}
    placed = here.placed(q.shape[2], k_len, **sizes, q_index=rows, k_index=keys, like=local.detach())
    spans = Spans(cutter.join(placed.lowered.bounds, 0, 1), placed.lowered.k_len)
    return Prepared(spans, cutter.join(placed.q_index, 0), cutter.join(placed.k_index))


def _arrays(mask: Any) -> list[Follower]:
    """The fields of a mask; the dims of those of an expression are known where it is cut."""
    if isinstance(mask, Spans):
        return [("bounds of the mask", mask.bounds, 0, 1)]
    if isinstance(mask, Prepared):
        keys = ("k_index of the mask", mask.k_index, None, None)
        return [*_arrays(mask.lowered), ("q_index of the mask", mask.q_index, 0, None), keys]
    if hasattr(mask, "operands"):
        return [array for operand in mask.operands for array in _arrays(operand)]
    kind = type(mask).__name__.lower()
    return [(f"mask {kind}: {f.name}", getattr(mask, f.name), None, None) for f in fields(mask)]


def _batch(x: Any, rank: int) -> int | None:
    """The dim of batch rows of an array that has one in front of this many, or not."""
    return 0 if x is not None and x.ndim > rank else None


class _Cutter:
    """Cuts the arrays of one mask down to this rank's part, and remembers along what it cut."""

    def __init__(self, places: Places, q: Tensor, local: Tensor) -> None:
        self.places = places
        self.sizes = {BATCH: (q.shape[0], local.shape[0]), HEADS: (q.shape[1], local.shape[1])}
        self.split: set[str] = set()
        self._known: list[tuple[Tensor, Tensor]] = []

    def cut(self, mask: Any) -> Any:
        """The mask of this rank's batch rows and heads."""
        if hasattr(mask, "operands"):
            return replace(mask, operands=tuple([self.cut(operand) for operand in mask.operands]))
        if isinstance(mask, Prepared):
            bounds = self.part("bounds of the mask", mask.lowered.bounds, 0, 1)
            rows = self.part("q_index of the mask", mask.q_index, 0)
            return Prepared(Spans(bounds, mask.lowered.k_len), rows, bare=mask.bare)
        remedy = "Pass the arrays of all batch rows as plain tensors, or prepare the mask"
        if hasattr(mask, "fn") and {BATCH, HEADS} & set(self.places.roles):
            expected = "no function of batch rows and heads next to arrays that are DTensors, as q is split"
            got = "one, which would number those of this rank from 0"
            raise OptionError(f"mask {mask!r}", expected=expected, got=got, remedy=remedy)
        kind, changes = type(mask).__name__, {}
        for field in fields(mask):
            x = getattr(mask, field.name)
            if isinstance(x, Tensor | np.ndarray):
                if kind not in _RANKS:
                    expected = "arrays of a mask whose parts are known, where some are DTensors"
                    raise OptionError(f"mask {mask!r}", expected=expected, got=kind, remedy=remedy)
                per_document = getattr(mask, "cu_seqlens", None) is not None
                batch, heads = _batch(x, _RANKS[kind] + per_document), 1 if x.ndim > 3 else None
                changes[field.name] = self.part(f"mask {kind.lower()}: {field.name}", x, batch, heads)
        return replace(mask, **changes) if changes else mask

    def part(self, name: str, x: Any, batch: int | None, heads: int | None = None) -> Any:
        """This rank's part of an array; it must have the batch rows and heads of q, or 1."""
        if x is None:
            return None
        for known, found in self._known:  # Masks that share an array are lowered together.
            if known is x:
                return found
        for role, dim in ((BATCH, batch), (HEADS, heads)):
            if dim is not None and x.shape[dim] != 1:
                expected, size = f"1 or {{}} along the {role} dim, as q has in all", self.sizes[role][0]
                remedy = "Arrays next to DTensors describe the whole, not this rank's part"
                expect(x.shape[dim] == size, name, expected, x.shape, remedy, size, error=ShapeError)
                self.split |= {role} & set(self.places.roles)
        self._known.append((x, self.places.part(name, torch.as_tensor(x), batch, heads)))
        return self._known[-1][1]

    def join(self, x: Any, batch: int | None = None, heads: int | None = None) -> Any:
        """The DTensor of which each rank has made its part; what was cut has this rank's sizes."""
        if x is None:
            return None
        dims = {role: dim for role, dim in ((BATCH, batch), (HEADS, heads)) if dim is not None}
        dims = {role: dim for role, dim in dims.items() if role in self.split}
        shape, here = list(x.shape), list(x.shape)
        for role, dim in dims.items():
            shape[dim], here[dim] = self.sizes[role]
        return self.places.join(x.expand(here).contiguous(), shape, dims)


def on_mesh(
    q: Tensor, bounds: Tensor, options: Options | None, k_len: Tensor | None
) -> tuple[Tensor, tuple[Any, ...], Tensor | None]:
    """Bounds, option arguments and k_len as the operator takes them: on q's mesh where q is a DTensor.

    Every rank has made the same ones from the same arguments.
    """
    o, given = options, ()
    if o is not None:
        numbers = (o.softcap, o.bias, o.bias_kind, o.sinks, o.dropout_p)
        given = (*numbers, o.dropout_seed, o.q_index, o.k_index)  # type: ignore[assignment]
    if not is_dtensor(q):
        return bounds, given, k_len
    register()
    mesh, seed = q.device_mesh, None if o is None else o.dropout_seed  # type: ignore[attr-defined]
    if seed is not None and seed.dim() == 0:
        # Each rank numbers its batch rows and heads from 0: it must be handed the seeds of those it has.
        seed = dropout_seeds(seed.full_tensor() if is_dtensor(seed) else seed, q.shape[0], q.shape[1])
        given = (*given[:5], seed, *given[6:])
    arguments = [x if is_dtensor(x) else _replicated(x, mesh) for x in (bounds, *given, k_len)]
    return arguments[0], tuple(arguments[1:-1]), arguments[-1]


def _replicated(x: Any, mesh: Any) -> Any:
    """A tensor that all ranks have as a DTensor; anything else as it is."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, Tensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def register() -> None:
    """Tell DTensor the strategies, once; importing DTensor is left to those who use it, as it takes long."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(forward_op)(_forward_strategies)
    register_sharding(backward_op)(_backward_strategies)


_Strategies = list[tuple[list[Any], list[Any]]]


def _ways() -> Iterator[tuple[str, Any]]:
    """What one mesh axis may split, and how q, k and v then lie on it."""
    from torch.distributed.tensor import Replicate, Shard

    yield from ((WHOLE, Replicate()), (BATCH, Shard(0)), (HEADS, Shard(1)))


def _forward_strategies(q: Any, k: Any, v: Any, bounds: Any, scale: float, *given: Any) -> _Strategies:
    del scale
    _check_specs(q, k, v)
    options, k_len = given[: len(NO_OPTIONS)], given[len(NO_OPTIONS) :]
    found = []
    for role, place in _ways():
        inputs = [place, place, place, _follow(bounds, role), None, *_option_places(options, role)]
        found.append(([place, place], [*inputs, *(_follow(x, role, None, None) for x in k_len)]))
    return found


def _backward_strategies(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, out: Any, lse: Any, scale: float, *given: Any
) -> _Strategies:
    del dout, out, lse, scale
    _check_specs(q, k, v)
    options, want_dbias = given[: len(NO_OPTIONS)], given[len(NO_OPTIONS) :] == (True,)
    found = []
    for role, place in _ways():
        places = _option_places(options, role)
        _, bias, _, sinks, *_ = (*places, *(None,) * 8)
        gradients = [_summed(bias if want_dbias else None, place), _summed(sinks, place)]
        inputs = [place, None if dlse is None else place, place, place, place, _follow(bounds, role)]
        inputs += [place, place, None, *places, *([None] if want_dbias else [])]
        found.append(([place, place, place, *gradients], inputs))
    return found


def _option_places(given: tuple[Any, ...], role: str) -> list[Any]:
    """Placements of the option arguments; trailing ones may have been left out."""
    _, bias, kind, sinks, _, seed, q_index, k_index = (*given, *NO_OPTIONS[len(given) :])
    of_bias = _follow(bias, role, None, 0) if kind == DISTANCE else _follow(bias, role)
    of_indices = [_follow(index, role, 0, None) for index in (q_index, k_index)]
    places = [None, of_bias, None, _follow(sinks, role, None, 0), None, _follow(seed, role), *of_indices]
    return places[: len(given)]


def _summed(place: Any, way: Any) -> Any:
    """Placement of the gradient of a parameter: where each rank has all of it, it lacks the others' part."""
    from torch.distributed.tensor import Partial, Replicate

    if place is None:
        return Replicate()
    return Partial() if way.is_shard() and not place.is_shard() else place


def _check_specs(*specs: Any) -> None:
    """What `attention` checks, for programs that call the operators themselves, or were compiled to do so."""
    meshes, placements = (tuple(getattr(x, name) for x in specs) for name in ("mesh", "placements"))
    places = Places(meshes[0], _find_roles("bhsd", meshes, placements, None))
    _check_parts(places, specs[0].shape[0], specs[0].shape[1], specs[1].shape[1])
