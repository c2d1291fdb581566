"""The partitioning rule: under jit, each device computes its own batch elements and heads.

A kernel is one opaque operation to XLA's partitioner, which would silently gather all arguments on every
device. With this rule, each device runs the kernel on its batch elements and heads. Shardings that need keys
from other devices raise an error. For them, use a plan of `attnspan.parallel`, which exchanges keys.
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

from attnspan.call import LAYOUTS, schema
from attnspan.errors import OptionError, expect

from .part import ARRAYS, GRADIENTS, JaxPart

#: Remedy if JAX cannot tell which mesh axes a partial `shard_map` left to the compiler.
INSIDE = "inside a shard_map over some axes, pass mask=attnspan.jax.shard(mesh, mask=..., heads=...)"

# The axes of arrays in letters: b batch, h query heads, g key heads, a dot for an axis that no device splits,
# a dash for the axis of a single key head, which all query heads share.
_LETTERS = {"batch": "b", "heads": "h"}
#: The axes of q in each layout.
AXES_OF_Q = {layout: "".join(_LETTERS.get(dim, ".") for dim in dims) for layout, dims in LAYOUTS.items()}
_RESULTS = schema.names(schema.RESULTS)
# The arguments of a backward pass in addition to a part.
_REST = (*_RESULTS, "dout", "dlse")
# The mask and the options. A device may receive the parts of them that it lacks.
_OPTIONS = ("bounds", *schema.names(schema.OPTIONS))


def partitioned(run: Callable[..., Any]) -> Any:
    """Return `run` with a partitioning rule.

    Args:
        run: Function of a `JaxPart` that returns (out, lse). Or function of a part, out, lse, dout and
            optionally dlse that returns gradients.
    """
    # Under jit, `run` is traced once and closes over no constants. Otherwise a backend's numbers may become
    # constants.
    run = jax.jit(run)

    def call(part: JaxPart, *rest: Any) -> Any:
        args = (part, *rest)
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(args)
        given = {name: getattr(part, name) for name in ARRAYS} | dict(zip(_REST, rest, strict=False))
        of_given = {name: _axes_of(part, name, x) for name, x in given.items() if x is not None}
        axes, whole = list(of_given.values()), [name in _OPTIONS for name in of_given]
        found = jax.eval_shape(run, *args)
        out_tree: Any = jax.tree.structure(found)
        names = GRADIENTS if rest else _RESULTS
        results = {name: x for name, x in zip(names, found, strict=True) if x is not None}
        result_axes = [of_given[name] if rest else _axes_of(part, name, x) for name, x in results.items()]
        group, kv_heads = _heads(leaves, axes)
        if kv_heads == 1:  # Every device has the key head, and its gradient is a sum.
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

    ``whole`` marks the mask and the options.
    """

    run: Callable[..., tuple[Any, ...]]
    axes: list[str]
    result_axes: list[str]
    whole: list[bool]
    kv_heads: int

    def partition(self, mesh: Any, args: Any, results: Any) -> Any:
        """Return the mesh, the function for one device, and the shardings of results and arguments."""
        sides = self._sides(mesh, args)

        def run(*parts: Any) -> tuple[Any, ...]:
            found = zip(self.run(*parts), self.result_axes, strict=True)
            return tuple(self._summed(x, word, sides) for x, word in found)

        arguments = tuple(NamedSharding(mesh, _spec(word, sides)) for word in self.axes)
        return mesh, run, self.infer(mesh, args, results), arguments

    def infer(self, mesh: Any, args: Any, results: Any) -> Any:
        """Return the shardings of the results."""
        del results
        sides = self._sides(mesh, args)
        return tuple(NamedSharding(mesh, _spec(word, sides)) for word in self.result_axes)

    def _sides(self, mesh: Any, args: Any) -> dict[str, Any]:
        """Return the mesh axes that split batch and heads, according to the first array that is split."""
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
        wanted, got = "batch and heads over different mesh axes", f"both over {', '.join(map(repr, both))}"
        expect(not both, "sharding of q, k and v", wanted, got, "Use the same PartitionSpec for q, k and v")
        parts = math.prod(mesh.shape[name] for name in names.get("h", ()))
        fits = self.kv_heads == 1 or self.kv_heads % parts == 0
        wanted, got = (
            f"parts that divide the {self.kv_heads} key heads",
            f"{parts} parts over {sides['h']!r}",
        )
        remedy = "Use attnspan.jax.shard(mesh, heads=...), which shares key heads between devices"
        expect(fits, "sharding of the heads", wanted, got, remedy)

    def _summed(self, x: Any, word: str, sides: dict[str, Any]) -> Any:
        """Sum a gradient over the mesh axes of the batch or the heads, if they share its parameter."""
        over = [sides["b"] if "b" not in word else None, None if {"h", "g"} & set(word) else sides["h"]]
        if over == [None, None]:
            return x
        total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        for mesh_axes in over:
            total = total if mesh_axes is None else lax.psum(total, mesh_axes)
        return total.astype(x.dtype)


def refuse(shape: tuple[int, ...], axis: int, mesh_axes: Any, name: str = "an array") -> None:
    """Raise for an axis that is split over devices but must be whole on each device."""
    raise OptionError(
        f"sharding of {name} of shape {tuple(shape)}",
        expected="only the batch and head axes split over the devices of a mesh",
        got=f"axis {axis} over {mesh_axes!r}",
        remedy="Exchange it by a plan, layout.plan(...).on(mesh, rows=rows, sequence=...), or reshard it",
    )


def _spec_of(x: Any) -> tuple[Any, ...]:
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec)
    # Without a mesh, axes have no names, so the code can notice a split but cannot describe it.
    whole = tuple(sharding.shard_shape(x.shape)) == tuple(x.shape)
    remedy = "Place the arrays with jax.device_put(x, NamedSharding(mesh, spec)), or " + INSIDE
    expect(whole, "sharding", "a NamedSharding of a mesh", str(sharding), remedy)
    return (None,) * len(x.shape)


def _spec(word: str, sides: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(None if a in ".-" else sides["b" if a == "b" else "h"] for a in word))


def _axes_of(part: JaxPart, name: str, x: Any) -> str:
    """Return the axes of an array of a call."""
    # Size 1 is shared, or it is the whole axis.
    axes = [
        axis[0] if axis[0] in "bhg" and not (axis[1:] and size == 1) else "."
        for axis, size in zip(schema.axes(name, part.bias_kind), x.shape, strict=False)
    ]
    if part.layout == "bshd" and len(axes) == 4 and name not in _OPTIONS:
        axes[1], axes[2] = axes[2], axes[1]
    return "".join(axes).ljust(x.ndim, ".")


def _heads(arrays: list[Any], axes: list[str]) -> tuple[int, int]:
    """Return the number of query heads that share a key head, and the number of key heads."""
    heads = {a: x.shape[i] for x, word in zip(arrays, axes, strict=True) for i, a in enumerate(word)}
    return int(heads["h"] // heads["g"]), int(heads["g"])


def _einsum(axes: list[str], result_axes: list[str], group: int) -> str:
    """The rule in Shardy's notation. Batch and key heads are shared factors, all other axes are separate."""
    names = {"b": "b", "g": "g", "h": "g" if group == 1 else "(g r)"}
    number = count()

    def side(words: list[str]) -> str:
        return ", ".join(" ".join(names.get(a) or f"x{next(number)}" for a in word) for word in words)

    return f"{side(axes)} -> {side(result_axes)}"
