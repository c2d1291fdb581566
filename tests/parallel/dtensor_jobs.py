"""What ranks do for the tests of DTensors: calls whose q, k, v, mask and options lie in some way."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from attnspan import (
    Prepared,
    Spans,
    alibi,
    cache,
    causal,
    from_dense,
    groups,
    key_padding,
    prefix,
    relative,
    segments,
    spans,
    window,
)
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
    """Output and gradients, whole."""
    out = call(*leaves, **options)
    dout = distribute_tensor(dout, out.device_mesh, out.placements) if isinstance(out, DTensor) else dout
    found = torch.autograd.grad(out, leaves, dout)
    return [full(x) for x in (out, *found)]


def off(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative distance, norm-wise."""
    assert [x.shape for x in got] == [x.shape for x in wanted]
    return max(float((x - y).norm() / y.norm()) for x, y in zip(got, wanted, strict=True))


#: Masks by kind, with an array of each that has batch rows, and of some that has heads.
ARRAYS: dict[str, Callable[[int, int], Tensor]] = {
    "ids": lambda batch, _: ids(batch),
    "ids and lengths": lambda batch, _: ids(batch),
    "groups": lambda batch, _: ids(batch),
    "cache": lambda batch, _: torch.arange(LENGTH, LENGTH - batch, -1),
    "prefix": lambda batch, _: torch.arange(3, 3 + batch),
    "dense": lambda batch, _: ids(batch)[:, None, :, None] == ids(batch)[:, None, None],
    "dense per head": lambda batch, heads: _by_head(heads).dense().expand(batch, -1, -1, -1),
    "explicit": lambda batch, heads: _by_head(heads).bounds.expand(batch, -1, -1, -1, -1),
    "spans": lambda batch, _: (causal() & segments(ids(batch))).spans(LENGTH, LENGTH, batch=batch).bounds,
    "spans per head": lambda batch, heads: _by_head(heads).bounds.expand(batch, -1, -1, -1, -1),
    "prepared": lambda batch, _: (causal() & segments(ids(batch))).spans(LENGTH, LENGTH, batch=batch).bounds,
}


def _by_head(heads: int) -> Spans:
    bounds = [
        (causal() & window(2 + head)).spans(LENGTH, LENGTH, like=torch.empty(0)).bounds
        for head in range(heads)
    ]
    return Spans(torch.cat(bounds, 1), LENGTH)


def mask_of(kind: str, x: Any, batch: int) -> Any:
    """The mask of a kind with an array that lies in some way."""
    if kind == "ids and lengths":
        # Beside DTensors, plain arrays are those of all batch rows.
        return causal() & segments(x) & key_padding(torch.arange(LENGTH, LENGTH - batch, -1))
    if kind in ("spans", "spans per head", "prepared"):
        return Prepared(Spans(x, LENGTH)) if kind == "prepared" else Spans(x, LENGTH)
    expressions: dict[str, Callable[[Any], Any]] = {
        "ids": lambda x: causal() & segments(x),
        "groups": lambda x: causal() | groups(x),
        "cache": lambda x: causal() & cache(x),
        "prefix": lambda x: causal() | prefix(x),
        "dense": from_dense,
        "dense per head": from_dense,
        "explicit": lambda x: causal() & spans(x),
    }
    return expressions[kind](x)


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
    array = ARRAYS[kind](batch, heads[0])
    # What goes by position shows where the rows are.
    options: dict[str, Any] = {"bias": alibi(torch.arange(1.0, 1.0 + heads[0]) / 8)}
    if kind in ("ids and lengths", "groups"):
        index = torch.arange(LENGTH)
        options["q_index"] = index if kind == "groups" else index.repeat(batch, 1)
    wanted = run(attention, inputs, dout, mask=mask_of(kind, array, batch), **options)
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    put = functools.cache(lambda i, words: place([*inputs, array][i].detach(), mesh, words))
    found: list[Any] = []
    for case in cases:
        if compiled:
            torch._dynamo.reset()
        *leaves, x = (put(i, words) for i, words in enumerate(case))
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        try:
            found.append(off(run(call, leaves, dout, mask=mask_of(kind, x, batch), **options), wanted))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def attend_with_option(name: str, cases: list[tuple[str, str]]) -> list[Any]:
    """Attention where (q, k and v, the tensor of an option) lie so; distances, or errors in words."""
    mesh, (inputs, dout) = grid(2), whole()

    def results(place_input: Any, place_option: Any) -> list[Tensor]:
        options = torch.utils._pytree.tree_map(place_option, options_of(name, BATCH, HEADS[0]))
        leaves = [place_input(x.detach()).requires_grad_() for x in inputs]
        out = attention(*leaves, mask=causal(), **options)
        back = distribute_tensor(dout, mesh, out.placements) if isinstance(out, DTensor) else dout
        return [full(x) for x in (out, *torch.autograd.grad(out, [*leaves, *parameters(options)], back))]

    def put(words: str, x: Tensor) -> Any:
        return place(x, mesh, words)

    def option(words: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return place(x.detach(), mesh, words).requires_grad_(x.requires_grad)

    wanted, found = results(lambda x: x, lambda x: x), list[Any]()
    for words, at in cases:
        inputs_at, option_at = functools.partial(put, words), functools.partial(option, at)
        try:
            found.append(off(results(inputs_at, option_at), wanted))
        except ValueError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def options_of(name: str, batch: int, heads: int) -> dict[str, Any]:
    """Keywords of a call by name, of the whole problem."""
    generator = torch.Generator().manual_seed(9)
    sinks, slopes, each, table = (
        torch.rand(shape, generator=generator).requires_grad_()
        for shape in ((heads,), (heads,), (batch, heads), (heads, 9))
    )
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
    leaves = torch.utils._pytree.tree_leaves(options)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
