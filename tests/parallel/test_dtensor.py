"""DTensors on real ranks: what goes together gives what one process gives, all else an error with reasons."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import few
from dtensors import (
    BATCH,
    DIMS,
    HEADS,
    LENGTH,
    assert_same,
    grid,
    ids,
    options_of,
    parameters,
    placements,
    whole,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from worlds import named, ranks

import attnspan as a
from attnspan import Spans, alibi, causal, segments
from attnspan.errors import OptionError, ShapeError
from attnspan.torch import attention

PLACES = ("R", "S0", "S1", "S2", "S3")


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


def per_head(heads: int) -> Spans:
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
    "dense per head": (lambda b, h: per_head(h).dense().expand(b, -1, -1, -1), lambda x, _: a.from_dense(x)),
    "explicit": (
        lambda b, h: per_head(h).bounds.expand(b, -1, -1, -1, -1),
        lambda x, _: causal() & a.spans(x),
    ),
    "spans": (_lowered, lambda x, _: Spans(x, LENGTH)),
    "spans per head": (
        lambda b, h: per_head(h).bounds.expand(b, -1, -1, -1, -1),
        lambda x, _: Spans(x, LENGTH),
    ),
    "prepared": (_lowered, lambda x, _: a.Prepared(Spans(x, LENGTH))),
}


#: The error where arrays of a call do not go together.
APART = ((OptionError, ShapeError), r"^(q|k|v|bounds|mask)\b.*: expected .*got .*\. ")


def check(
    kind: str,
    cases: list[tuple[str, ...]],
    good: set[tuple[str, ...]],
    compiled: bool = False,
    batch: int = BATCH,
    heads: tuple[int, int] = HEADS,
    sizes: tuple[int, ...] = (2,),
    error: tuple[Any, str] = APART,
) -> None:
    """Attention under a mask of a kind, where q, k, v and the mask lie so.

    The output and all gradients of good cases are those of one process, the others raise.
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

    def found(case: tuple[str, ...]) -> list[Tensor]:
        if compiled:
            torch._dynamo.reset()
        *leaves, x = (put(i, words) for i, words in enumerate(case))
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return run(call, leaves, dout, mask=mask_of(x, batch), **options)

    check_each(cases, good, found, wanted, error)


def check_each(
    cases: list[Any], good: set[Any], found: Callable[..., list[Tensor]], wanted: list[Tensor], error: Any
) -> None:
    """Good cases find what is wanted, the others raise."""
    for case in cases:
        with named(case):
            if case in good:
                assert_same(found(case), wanted)
            else:
                with pytest.raises(error[0], match=error[1]):
                    found(case)


def good_of(kind: str) -> set[tuple[str, ...]]:
    """The placements of q, k, v and the mask that go together."""
    per_head = kind in ("dense per head", "explicit", "spans per head")
    return {
        ("R", "R", "R", "R"),
        ("S0", "S0", "S0", "R"),
        ("S0", "S0", "S0", "S0"),
        ("S1", "S1", "S1", "R"),
        *([("S1", "S1", "S1", "S1")] if per_head else []),
    }


@pytest.mark.slow
@ranks(2)
def test_every_placement_gives_what_one_process_gives_or_an_error() -> None:
    cases = list(itertools.product(PLACES, PLACES, PLACES, (*PLACES, "S4")))
    cases += [("P", "P", "P", "R"), ("R", "P", "R", "R"), ("R", "R", "P", "R")]
    check("spans", cases, good_of("spans"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MASKS))
@ranks(2)
def test_arrays_of_masks_lie_as_q_or_whole(kind: str) -> None:
    dims = {"cache": 1, "prefix": 1, "ids": 2, "ids and lengths": 2, "groups": 2}.get(kind, 4)
    places = PLACES[: 1 + dims]
    cases = [(place,) * 3 + (at,) for place in ("R", "S0", "S1") for at in (*places, "plain")]
    cases += [("plain",) * 3 + (at,) for at in places]
    good = good_of(kind) | {case for case in cases if case[3] == "plain" and case[0] != "plain"}
    check(kind, cases, good)


@pytest.mark.parametrize("name", list(DIMS))
@ranks(2)
def test_options_lie_as_q_or_whole(name: str) -> None:
    # Where q, k and v lie, and where the tensor of the option.
    ndim = 2 if name in ("alibi per row", "relative", "dropout seeds") else 1
    cases = list(itertools.product(("R", "S0", "S1"), ("plain", *PLACES[: 1 + ndim])))
    dims = {"S0": DIMS[name].get("batch"), "S1": DIMS[name].get("heads")}
    good = {case for case in cases if case[1] in ("plain", "R") or case[1] == f"S{dims.get(case[0])}"}
    mesh, (inputs, dout), options = grid(2), whole(), options_of(name, BATCH, HEADS[0])

    def put(words: str, x: Any) -> Any:
        return place(x.detach(), mesh, words).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    def found(case: tuple[str, str]) -> list[Tensor]:
        placed = tree_map(functools.partial(put, case[1]), options)
        return run(attention, [put(case[0], x) for x in inputs], dout, mask=causal(), **placed)

    wanted = run(attention, inputs, dout, mask=causal(), **options)
    error = OptionError, r"^(bias\.|sinks|dropout_seed).* as a DTensor: expected \["
    check_each(cases, good, found, wanted, error)


@pytest.mark.parametrize(
    ("batch", "heads", "place", "error"),
    [
        (3, (4, 2), "S0", None),
        (2, (5, 5), "S1", None),
        (
            2,
            (6, 3),
            "S1",
            "expected a multiple of 2 key heads, because this many ranks share 6 query heads, got 3",
        ),
        (2, (4, 1), "S1", "expected a multiple of 2 key heads"),
        (2, (1, 1), "S1", "expected key heads for each of 2 ranks, got 1"),
        (1, (4, 2), "S0", "expected batch elements for each of 2 ranks, got 1"),
    ],
)
@ranks(2)
def test_uneven_parts(batch: int, heads: tuple[int, int], place: str, error: str | None) -> None:
    """A rank that holds query heads without their key heads would take those of others for them."""
    case = (place, place, place, "R")
    for kind in ("spans", "ids"):
        text = f"^q, k and v as DTensors: {error}"
        check(kind, [case], set() if error else {case}, batch=batch, heads=heads, error=(ShapeError, text))


@pytest.mark.slow
@ranks(4)
def test_two_mesh_axes() -> None:
    good = {("S0 S1",) * 3 + (at,) for at in ("R R", "S0 R")} | {("S0 S0",) * 3 + ("S0 S0",)}
    bad = {("S0 S1", "S1 S0", "S0 S1", "R R"), ("S0 S2",) * 3 + ("R R",), ("S0 S1",) * 3 + ("R S0",)}
    for kind in ("spans", "ids"):
        check(kind, sorted(good | bad), good, batch=4, sizes=(2, 2))


@pytest.mark.slow
@ranks(2)
def test_compiled_programs_are_right_or_fail_too() -> None:
    good = few(sorted(good_of("ids"))[::-1], 1)
    assert good[0] == ("S1", "S1", "S1", "R")
    bad = [("R", "S2", "R", "R"), ("S0", "R", "S0", "R"), ("R", "R", "R", "S0"), ("plain", "S0", "S0", "R")]
    # The compiler's own error, around ours.
    error = Exception, "as a DTensor: expected|q: expected a DTensor"
    check("ids", [*good, *few(bad, 1)], set(good), compiled=True, error=error)


@ranks(4)
def test_tensors_on_other_meshes_than_q_are_named() -> None:
    mesh, (inputs, _) = grid(2, 2), whole()
    both = [distribute_tensor(x.detach(), mesh, placements("R R")) for x in inputs]
    one = [distribute_tensor(x.detach(), mesh["cp"], placements("R")) for x in inputs]
    spans = causal().spans(LENGTH, LENGTH, like=inputs[0])
    bounds = distribute_tensor(spans.bounds, mesh["cp"], placements("R"))
    for given, mask, text in (
        (
            (both[0], one[1], both[2]),
            causal(),
            "k as a DTensor: expected the mesh of q, DeviceMesh((dp=2, cp=2)",
        ),
        ((one[0], one[1], both[2]), causal(), "v as a DTensor: expected the mesh of q, DeviceMesh((cp=2)"),
        (
            both,
            Spans(bounds, LENGTH),
            "bounds of the mask as a DTensor: expected the mesh of q, DeviceMesh((dp=2",
        ),
    ):
        with pytest.raises(OptionError, match=re.escape(text)):
            attention(*given, mask=mask)
