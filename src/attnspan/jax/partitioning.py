"""The partitioning rule: arrays sharded under jit are computed where they are, by batch row and by head.

A kernel is one opaque operation to XLA's partitioner, which would gather its arguments on every device
without a word. With this rule each device runs the kernel on its batch rows and heads; what would need keys
of other devices is refused by name: a plan of `attnspan.parallel` fetches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from attnspan.call.options import DISTANCE
from attnspan.errors import OptionError, expect

from .part import OPTIONS, JaxPart

__all__ = ["partitioned", "refuse"]

#: The remedy where JAX cannot tell which axes a `shard_map` over some of them left to its compiler.
INSIDE = "inside of a shard_map over some axes, pass mask=attnspan.jax.shard(mesh, mask=..., heads=...)"

# The axes of arrays in letters: b batch row, h query head, g key head, a dot for one that no device splits,
# a dash for that of a single key head, which all query heads share.
_AXES = {"bhsd": {"q": "bh..", "k": "bg.."}, "bshd": {"q": "b.h.", "k": "b.g."}}


def partitioned(run: Callable[..., Any]) -> Any:
    """`run` with a partitioning rule.

    Args:
        run: Function of a `JaxPart` that returns (out, lse), or of one, out, lse, dout and perhaps dlse that
            returns gradients.
    """
    # Jitted: it is traced once, and closes over no constants, which a backend may make of numbers.
    run = jax.jit(run)

    def call(part: JaxPart, *rest: Any) -> Any:
        args = (part, *rest)
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(args)
        of_part = _axes_of(part)
        of_rows = {4: of_part["q"], 3: "bh."}
        axes = [*of_part.values(), *(of_rows[x.ndim] for x in rest if x is not None)]
        whole = [name not in "qkv" for name in of_part] + [False] * (len(axes) - len(of_part))
        out_tree: Any
        out, out_tree = jax.tree.flatten(jax.eval_shape(run, *args))
        result_axes = [of_part["q"], "bh."] if len(out) == 2 else _axes_of_gradients(of_part, len(out))
        group, kv_heads = _heads(leaves, axes)
        if kv_heads == 1:  # The one key head is of every device, its gradient the sum over all.
            axes, result_axes = ([word.replace("g", "-") for word in words] for words in (axes, result_axes))
            group = 1

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(run(*tree.unflatten(leaves))))

        rule = _Rule(flat, axes, result_axes, whole, kv_heads)
        wrapped = custom_partitioning(flat)
        wrapped.def_partition(
            partition=rule.partition,
            infer_sharding_from_operands=rule.infer,
            sharding_rule=_einsum(axes, result_axes, group),
            **({"r": group} if group > 1 else {}),
        )
        return out_tree.unflatten(wrapped(*leaves))

    return call


@dataclass(frozen=True, eq=False)
class _Rule:
    """Rule for the partitioner, for arrays whose axes are named.

    ``whole`` are the arrays of which a device may be sent what it lacks: masks and options.
    """

    run: Callable[..., tuple[Any, ...]]
    axes: list[str]
    result_axes: list[str]
    whole: list[bool]
    kv_heads: int

    def partition(self, mesh: Any, args: Any, results: Any) -> Any:
        """Mesh, the function of one device's parts, shardings of results and arguments."""
        sides = self._sides(mesh, args)

        def run(*parts: Any) -> tuple[Any, ...]:
            found = zip(self.run(*parts), self.result_axes, strict=True)
            return tuple(self._summed(x, word, sides) for x, word in found)

        arguments = tuple(NamedSharding(mesh, _spec(word, sides)) for word in self.axes)
        return mesh, run, self.infer(mesh, args, results), arguments

    def infer(self, mesh: Any, args: Any, results: Any) -> Any:
        """Shardings of the results."""
        del results
        sides = self._sides(mesh, args)
        return tuple(NamedSharding(mesh, _spec(word, sides)) for word in self.result_axes)

    def _sides(self, mesh: Any, args: Any) -> dict[str, Any]:
        """The mesh axes over which batch rows and heads are spread, as the first array says that has them."""
        sides: dict[str, Any] = {"b": None, "h": None}
        for x, word, whole in zip(args, self.axes, self.whole, strict=True):
            for axis, (letter, mesh_axes) in enumerate(zip(word, _spec_of(x), strict=False)):
                if mesh_axes is None or mesh_axes == () or letter == "-" or (letter == "." and whole):
                    continue
                if letter == ".":
                    refuse(x.shape, axis, mesh_axes)
                key = "b" if letter == "b" else "h"
                sides[key] = mesh_axes if sides[key] is None else sides[key]
        self._check(mesh, sides)
        return sides

    def _check(self, mesh: Any, sides: dict[str, Any]) -> None:
        names = {key: (x if isinstance(x, tuple) else (x,)) for key, x in sides.items() if x is not None}
        both = set(names.get("b", ())) & set(names.get("h", ()))
        wanted, got = "batch rows and heads over axes of their own", f"both over {', '.join(map(repr, both))}"
        expect(not both, "sharding of q, k and v", wanted, got, "Give q, k and v one PartitionSpec")
        parts = math.prod(mesh.shape[name] for name in names.get("h", ()))
        fits = self.kv_heads == 1 or self.kv_heads % parts == 0
        wanted, got = (
            f"parts that divide the {self.kv_heads} key heads",
            f"{parts} parts, over {sides['h']!r}",
        )
        remedy = "Use attnspan.jax.shard(mesh, heads=...), which shares key heads between devices"
        expect(fits, "sharding of the heads", wanted, got, remedy)

    def _summed(self, x: Any, word: str, sides: dict[str, Any]) -> Any:
        """A gradient of what batch rows or heads share is the sum over those."""
        over = [sides["b"] if "b" not in word else None, None if {"h", "g"} & set(word) else sides["h"]]
        if over == [None, None]:
            return x
        total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        for mesh_axes in over:
            total = total if mesh_axes is None else lax.psum(total, mesh_axes)
        return total.astype(x.dtype)


def refuse(shape: tuple[int, ...], axis: int, mesh_axes: Any, name: str = "an array") -> None:
    """Raise for an axis that is spread over devices but must be whole on each."""
    raise OptionError(
        f"sharding of {name} of shape {tuple(shape)}",
        expected="batch rows and heads over the devices of a mesh, and no other axis",
        got=f"axis {axis} over {mesh_axes!r}",
        remedy="Plan its exchange: layout.plan(...).on(mesh, rows=rows, sequence=...); or reshard the array",
    )


def _spec_of(x: Any) -> tuple[Any, ...]:
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec)
    # Without a mesh nobody can name its axes: what is split cannot be described, only noticed.
    whole = tuple(sharding.shard_shape(x.shape)) == tuple(x.shape)
    remedy = "Place the arrays by jax.device_put(x, NamedSharding(mesh, spec)); " + INSIDE
    expect(whole, "sharding", "a NamedSharding of a mesh", str(sharding), remedy)
    return (None,) * len(x.shape)


def _spec(word: str, sides: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(None if a in ".-" else sides["b" if a == "b" else "h"] for a in word))


def _axes_of(part: JaxPart) -> dict[str, str]:
    """The axes of each array of a part, by name."""
    letters = _AXES[part.layout]
    found = {"q": letters["q"], "k": letters["k"], "v": letters["k"]}
    for name in OPTIONS:
        if (x := getattr(part, name)) is not None:
            by_head = name == "sinks" or (name == "bias" and part.static.bias_kind == DISTANCE)
            found[name] = "h" + "." * (x.ndim - 1) if by_head else _axes_by_row(name, x)
    return found


def _axes_by_row(name: str, x: Any) -> str:
    first = "b" if x.shape[0] != 1 else "."
    if name in ("q_index", "k_index"):
        return first + "."
    rest = "." * int(x.ndim - 2)
    return first + ("h" if x.shape[1] != 1 else ".") + rest


def _axes_of_gradients(of_part: dict[str, str], n: int) -> list[str]:
    """The axes of n gradients: of q, k, v, perhaps the bias, and the sinks if there are any."""
    sinks = [of_part["sinks"]] if "sinks" in of_part else []
    bias = [of_part["bias"]] if n > 3 + len(sinks) else []
    return [of_part["q"], of_part["k"], of_part["v"], *bias, *sinks]


def _heads(arrays: list[Any], axes: list[str]) -> tuple[int, int]:
    """Number of query heads that share a key head, and number of key heads."""
    heads = {a: x.shape[i] for x, word in zip(arrays, axes, strict=True) for i, a in enumerate(word)}
    return int(heads["h"] // heads["g"]), int(heads["g"])


def _einsum(axes: list[str], result_axes: list[str], group: int) -> str:
    """The rule in Shardy's notation: batch rows and key heads are shared factors, any other axis its own."""
    names = {"b": "b", "g": "g", "h": "g" if group == 1 else "(g r)"}
    number = count()

    def side(words: list[str]) -> str:
        return ", ".join(" ".join(names.get(a) or f"x{next(number)}" for a in word) for word in words)

    return f"{side(axes)} -> {side(result_axes)}"
