"""What ranks do for the tests of DTensors: calls whose q, k, v, mask and options lie in some way."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map
from worlds import error

import attnspan as a
from attnspan import Spans, alibi, causal, relative, segments
from attnspan.torch import attention, dropout_seeds

LENGTH, HEADS, BATCH, DIM = 13, (4, 2), 2, 16
PLACES = {"R": Replicate(), "P": Partial(), **{f"S{dim}": Shard(dim) for dim in range(5)}}


@functools.cache
def grid(*sizes: int) -> DeviceMesh:
    """The mesh of all ranks: one axis "cp", or ("dp", "cp")."""
    names = ("cp",) if len(sizes) == 1 else ("dp", "cp")
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(sizes), mesh_dim_names=names)


def placements(words: str) -> list[Any]:
    """Those of "S0 R", one word for each mesh axis."""
    return [PLACES[word] for word in words.split()]


def whole(batch: int = BATCH, heads: tuple[int, int] = HEADS) -> tuple[list[Tensor], Tensor]:
    """q, k, v in "bhsd" as leaves, and the gradient of the output; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = [heads[0], heads[1], heads[1], heads[0]]
    q, k, v, dout = (torch.randn(batch, n, LENGTH, DIM, generator=generator) for n in sizes)
    return [x.requires_grad_() for x in (q, k, v)], dout


def ids(batch: int = BATCH) -> Tensor:
    """Segments, of other lengths in each batch row."""
    return torch.stack([torch.arange(LENGTH) // (3 + row) for row in range(batch)])


def place(x: Tensor, mesh: DeviceMesh, words: str) -> Any:
    """The same tensor as a DTensor; "plain" leaves it as it is, "P" makes parts that sum up to it."""
    if words == "plain":
        return x
    if "P" not in words.split():
        return distribute_tensor(x, mesh, placements(words))
    return DTensor.from_local(x / mesh.size(), mesh, placements(words))


def full(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def run(call: Any, leaves: list[Any], dout: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients, of the options' parameters too, whole."""
    out = call(*leaves, **options)
    dout = distribute_tensor(dout, out.device_mesh, out.placements) if isinstance(out, DTensor) else dout
    return [full(x) for x in (out, *torch.autograd.grad(out, [*leaves, *parameters(options)], dout))]


def off(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative distance, norm-wise."""
    return max(error(*pair) for pair in zip(got, wanted, strict=True))


def _or_error(call: Callable[[], float]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _per_head(heads: int) -> Spans:
    like = torch.empty(0)
    bounds = [(causal() & a.window(2 + i)).spans(LENGTH, LENGTH, like=like).bounds for i in range(heads)]
    return Spans(torch.cat(bounds, 1), LENGTH)


def _lowered(batch: int, _: int) -> Tensor:
    found: Tensor = (causal() & segments(ids(batch))).spans(LENGTH, LENGTH, batch=batch).bounds
    return found


def _ids(batch: int, _: int) -> Tensor:
    return ids(batch)


def _dense(batch: int, _: int) -> Tensor:
    return ids(batch)[:, None, :, None] == ids(batch)[:, None, None]


#: Masks by kind: an array with batch rows, of (batch, heads), and the mask of it, of (array, batch).
MASKS: dict[str, tuple[Callable[[int, int], Tensor], Callable[[Any, int], Any]]] = {
    "ids": (_ids, lambda x, _: causal() & segments(x)),
    # With DTensors, plain arrays are those of all batch rows.
    "ids and lengths": (
        _ids,
        lambda x, b: causal() & segments(x) & a.key_padding(torch.arange(LENGTH, LENGTH - b, -1)),
    ),
    "groups": (_ids, lambda x, _: causal() | a.groups(x)),
    "cache": (lambda b, _: torch.arange(LENGTH, LENGTH - b, -1), lambda x, _: causal() & a.cache(x)),
    "prefix": (lambda b, _: torch.arange(3, 3 + b), lambda x, _: causal() | a.prefix(x)),
    "dense": (_dense, lambda x, _: a.from_dense(x)),
    "dense per head": (lambda b, h: _per_head(h).dense().expand(b, -1, -1, -1), lambda x, _: a.from_dense(x)),
    "explicit": (
        lambda b, h: _per_head(h).bounds.expand(b, -1, -1, -1, -1),
        lambda x, _: causal() & a.spans(x),
    ),
    "spans": (_lowered, lambda x, _: Spans(x, LENGTH)),
    "spans per head": (
        lambda b, h: _per_head(h).bounds.expand(b, -1, -1, -1, -1),
        lambda x, _: Spans(x, LENGTH),
    ),
    "prepared": (_lowered, lambda x, _: a.Prepared(Spans(x, LENGTH))),
}


def attend(
    kind: str,
    cases: list[tuple[str, str, str, str]],
    compiled: bool = False,
    batch: int = BATCH,
    heads: tuple[int, int] = HEADS,
    sizes: tuple[int, ...] = (2,),
) -> list[Any]:
    """Attention under a mask of a kind, where q, k, v and the mask lie so.

    Returns:
        For each case the distance of the output and all gradients from one process, or the error in words.
    """
    mesh, (inputs, dout) = grid(*sizes), whole(batch, heads)
    make, mask_of = MASKS[kind]
    array = make(batch, heads[0])
    # What goes by position shows where the rows are.
    options: dict[str, Any] = {"bias": alibi(torch.arange(1.0, 1.0 + heads[0]) / 8)}
    if kind in ("ids and lengths", "groups"):
        index = torch.arange(LENGTH)
        options["q_index"] = index if kind == "groups" else index.repeat(batch, 1)
    wanted = run(attention, inputs, dout, mask=mask_of(array, batch), **options)
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    put = functools.cache(lambda i, words: place([*inputs, array][i].detach(), mesh, words))

    def distance(case: tuple[str, ...]) -> float:
        if compiled:
            torch._dynamo.reset()
        *leaves, x = (put(i, words) for i, words in enumerate(case))
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return off(run(call, leaves, dout, mask=mask_of(x, batch), **options), wanted)

    return [_or_error(functools.partial(distance, case)) for case in cases]


def attend_with_option(name: str, cases: list[tuple[str, str]]) -> list[Any]:
    """Attention where (q, k and v, the tensor of an option) lie so; distances, or errors in words."""
    mesh, (inputs, dout) = grid(2), whole()
    options = options_of(name, BATCH, HEADS[0])
    wanted = run(attention, inputs, dout, mask=causal(), **options)

    def put(words: str, x: Any) -> Any:
        return place(x.detach(), mesh, words).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    def distance(words: str, at: str) -> float:
        placed = tree_map(functools.partial(put, at), options)
        return off(run(attention, [put(words, x) for x in inputs], dout, mask=causal(), **placed), wanted)

    return [_or_error(functools.partial(distance, *case)) for case in cases]


def options_of(name: str, batch: int, heads: int) -> dict[str, Any]:
    """Keywords of a call by name, of the whole problem."""
    generator = torch.Generator().manual_seed(9)
    shapes = ((heads,), (heads,), (batch, heads), (heads, 9))
    sinks, slopes, each, table = (torch.rand(x, generator=generator).requires_grad_() for x in shapes)
    seed = torch.tensor(1234567)
    return {
        "none": {},
        "sinks": {"sinks": sinks, "softcap": 2.0},
        "alibi": {"bias": alibi(slopes)},
        "alibi per row": {"bias": alibi(each)},
        "relative": {"bias": relative(table)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": seed},
        "dropout seeds": {"dropout_p": 0.3, "dropout_seed": dropout_seeds(seed, batch, heads)},
    }[name]


#: The dims of each option's tensor that go with batch rows and heads.
DIMS = {
    "sinks": {"heads": 0},
    "alibi": {"heads": 0},
    "alibi per row": {"batch": 0, "heads": 1},
    "relative": {"heads": 0},
    "dropout seeds": {"batch": 0, "heads": 1},
}


def parameters(options: Any) -> list[Any]:
    return [x for x in tree_leaves(options) if isinstance(x, Tensor) and x.requires_grad]
