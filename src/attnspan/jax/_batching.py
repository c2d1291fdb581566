"""The batching rule: a mapped axis becomes part of the batch, so that one call of a kernel does all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..options import DISTANCE
from ._contract import Operands, Static


def batched(run: Callable[..., Any], static: Static, *, sums: bool = False, want_dbias: bool = False) -> Any:
    """`run`, a function of arrays whose first axis is the batch, of None and one `Operands`, with a rule.

    Args:
        run: The function. Its results have the batch as their first axis.
        static: What it was made for.
        sums: It also sums gradients of the sinks, and of the bias, over the batch, which mapped calls must
            not share.
        want_dbias: That of the bias is wanted.
    """
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap  # type: ignore[untyped-decorator]
    def rule(size: int, flags: list[Any], *args: Any) -> tuple[Any, Any]:
        at = next(i for i, x in enumerate(args) if isinstance(x, Operands))
        given, given_flags = args[at], flags[at]
        table = static.bias_kind == DISTANCE and given_flags.bias
        summed = sums and (given.sinks is not None or (want_dbias and given.bias is not None))
        # Sinks and tables have no batch axis that a mapped one could join.
        if given_flags.sinks or table or summed:
            return _in_turn(mapped, size, flags, args)
        batch = next(
            x.shape[1] if f else x.shape[0] for x, f in zip(args, flags, strict=True) if _is_array(x)
        )
        folded = [
            _fold_operands(x, f, size, batch, static) if i == at else _fold(x, f, size, batch)
            for i, (x, f) in enumerate(zip(args, flags, strict=True))
        ]
        out = jax.tree.map(lambda x: x.reshape(batch, size, *x.shape[1:]).swapaxes(0, 1), mapped(*folded))
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _is_array(x: Any) -> bool:
    return x is not None and not isinstance(x, Operands)


def _fold(x: Array | None, mapped: bool | None, size: int, batch: int) -> Array | None:
    """(size, batch|1, ...) or (batch|1, ...) as (batch * size, ...)."""
    if x is None:
        return None
    # The batch first: where it is spread over devices, it stays where it is.
    x = x.swapaxes(0, 1) if mapped else x[:, None]
    return jnp.broadcast_to(x, (batch, size, *x.shape[2:])).reshape(batch * size, *x.shape[2:])


def _fold_operands(given: Operands, flags: Any, size: int, batch: int, static: Static) -> Operands:
    folded: dict[str, Any] = {}
    for name, x in given._asdict().items():
        mapped = getattr(flags, name)
        by_head = name == "sinks" or (name == "bias" and static.bias_kind == DISTANCE)
        # What all rows share stays so; seeds are of each row by contract.
        shared = x is None or by_head or (not mapped and x.shape[0] == 1 and name != "seeds")
        folded[name] = x if shared else _fold(x, mapped, size, batch)
    return Operands(**folded)


def _in_turn(run: Callable[..., Any], size: int, flags: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call after the other."""
    del size
    leaves: list[Array]
    tree: Any
    leaves, tree = jax.tree.flatten(args)
    moving = jax.tree.leaves(tuple(flags))

    def one(slices: list[Array]) -> Any:
        rest = iter(slices)
        return run(*tree.unflatten([next(rest) if f else x for x, f in zip(leaves, moving, strict=True)]))

    out = lax.map(one, [x for x, f in zip(leaves, moving, strict=True) if f])
    return out, jax.tree.map(lambda _: True, out)
