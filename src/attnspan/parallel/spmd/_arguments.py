"""What `shard` and its attention ask of their arguments before anything is planned or computed."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from ..._mistakes import not_a_mask
from ...errors import DtypeError, OptionError, ShapeError, expect
from ...jax.front import ShardedMask
from ...masks import Mask
from ...options import Given
from ...spans import Spans
from ..strategy import Strategy
from ._axes import Axes


def strategy_of(strategy: Any, parts: int) -> str | Strategy:
    """A strategy by name, of those that go by rows alone."""
    if strategy == "auto":
        return "auto"
    if isinstance(strategy, str) and strategy in ("exchange", "ring"):
        return Strategy("ring" if strategy == "ring" else "exchange", 1, parts)
    raise OptionError(
        "shard: strategy",
        expected="'exchange', 'ring' or 'auto'",
        got=repr(strategy),
        remedy="Mesh axes say which devices share out heads: name them as heads=...",
    )


def check_sizes(axes: Axes, batch_size: Any, method: Any, planned: dict[str, Any]) -> None:
    """Raise unless the sizes of the whole problem are there where the sequence is split, and only there."""
    if not axes.sequence:
        given = [name for name, value in planned.items() if value is not None]
        given += ["method"] * (method != "balanced") + ["batch_size"] * (batch_size != 1)
        if given:
            raise OptionError(
                f"shard: {given[0]}",
                expected="a mesh axis as sequence beside it",
                got="sequence=None",
                remedy="Only a plan of a split sequence needs it beforehand: leave it out, or name the axis",
            )
        return
    for name in ("q_len", "num_heads"):
        if planned[name] is None:
            raise OptionError(
                f"shard: {name}",
                expected="the size of the whole problem beside sequence",
                got="None",
                remedy="Pass q_len=S and num_heads=(Hq, Hkv): the sequence is planned before it is there",
            )
    numbers = {"batch_size": batch_size} | {x: planned[x] for x in ("q_len", "k_len", "rows_per_chunk")}
    for name, value in numbers.items():
        if value is not None and (type(value) is not int or value < 1):
            raise OptionError(
                f"shard: {name}", expected="an int of at least 1", got=repr(value), remedy="Pass its number"
            )
    _check_heads(axes, planned["num_heads"])
    if batch_size > 1:
        axes.check_divides("shard: batch_size", batch_size, "batch")
    _check_dealt(method, planned)


def _check_heads(axes: Axes, heads: Any) -> None:
    whole = isinstance(heads, tuple) and len(heads) == 2 and all(type(x) is int and x > 0 for x in heads)
    if not whole or heads[0] % heads[1]:
        raise OptionError(
            "shard: num_heads",
            expected="(query heads, key heads) of the whole problem, the second a divisor of the first",
            got=repr(heads),
            remedy="Pass the numbers of heads; the mesh axis that splits them is heads=...",
        )
    axes.check_divides("shard: num_heads", heads[0], "heads")


def _check_dealt(method: Any, planned: dict[str, Any]) -> None:
    dealt = method != "balanced" or planned["rows_per_chunk"] is not None or planned["tolerance"] is not None
    if planned["partition"] is not None and dealt:
        raise OptionError(
            "shard: partition",
            expected="it alone, as it says who owns which rows",
            got="method, rows_per_chunk or tolerance beside it",
            remedy="Pass these to the function that makes the partition",
        )
    if planned["keys"] is not None and planned["k_len"] is None:
        raise OptionError(
            "shard: keys",
            expected="k_len beside it, as in cross attention",
            got="k_len=None, where keys lie like the rows",
            remedy="Leave keys out, or pass the number of keys",
        )


def check_placed(axes: Axes, name: str, x: Array, dims: tuple[str | None, ...]) -> None:
    """Raise for an array that is split otherwise than the plan says; nothing is gathered silently.

    What is whole on all devices is not refused: each takes its part. Of tracers on meshes whose axes are not
    explicit nothing is known.
    """
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return
    for at, entry in enumerate(sharding.spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        names = tuple(n for n in names if sharding.mesh.shape[n] > 1)
        wanted = tuple(n for n in axes.names(dims[at]) if axes.mesh.shape[n] > 1)
        if not names or names == wanted:
            continue
        words = {"batch": "batch rows", "heads": "heads", "sequence": "the sequence", None: "head_dim"}[
            dims[at]
        ]
        if dims[at] == "sequence" and not axes.sequence:
            expected, remedy = (
                "a whole sequence, as sequence=None says",
                f"Make a plan of it: shard(mesh, sequence={names[0]!r}, q_len=..., num_heads=...)",
            )
        else:
            expected = f"{words} {f'split over {wanted}' if wanted else 'whole'}, as the plan has them"
            remedy = "Place it by sharded.shard(...) or sharded.spec(...), or shard(mesh, ...) as it is"
        raise OptionError(f"sharding of {name}", expected=expected, got=f"{sharding.spec}", remedy=remedy)


def check_given(given: Given) -> None:
    """Raise for options that a split sequence does not take."""
    for name, x in (("q_index", given.q_index), ("k_index", given.k_index)):
        kind, remedy = type(x).__name__, "The plan knows where rows are"
        expect(x is None, f"{name} with a split sequence", "None", kind, remedy)
    dense = hasattr(given.bias, "values") or hasattr(given.bias, "shape")
    got = "a dense bias, which holds a value for each pair of rows of all devices"
    remedy = "Use a bias by position, or fold what is visible into the mask"
    expect(not dense, "bias with a split sequence", "alibi(...) or relative(...)", got, remedy)


def check_rows(what: str, x: Array, heads: int, rows: int, batch: int | None) -> None:
    """Raise unless q or k, as (B, H, S, D), has the heads and rows of the plan."""
    if x.shape[1] == heads and x.shape[2] == rows and batch in (None, x.shape[0]):
        return
    some = "" if batch is None else f"{batch} batch rows, "
    raise ShapeError(
        f"{what} with a split sequence",
        expected=f"{some}{heads} heads and {rows} rows, those of all devices with padding",
        got=f"shape {tuple(x.shape)} in layout bhsd",
        remedy="Place the model's inputs by sharded.shard(...), and make the plan for these sizes",
    )


def check_array(name: str, x: Any) -> None:
    """Raise for what is no array of JAX or NumPy."""
    if type(x).__module__.partition(".")[0] == "torch":
        raise DtypeError(
            name,
            expected="an array of JAX",
            got=type(x).__name__,
            remedy="Call attnspan.torch for tensors of torch, or convert it",
        )


def check_mask(mask: Any, planned: bool) -> None:
    """Raise for what is no mask, or for one that is to be planned and cannot be read."""
    if not isinstance(mask, Mask | Spans) or isinstance(mask, ShardedMask):
        raise not_a_mask(mask, "shard: mask")
    if planned and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask)):
        raise OptionError(
            "shard: mask",
            expected="one whose arrays can be read, where the sequence is split: the host plans",
            got=f"{mask!r} of traced arrays",
            remedy="Call shard(...) or with_mask(...) outside the compiled function, and hand the result in",
        )
