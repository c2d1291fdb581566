"""Operands of the TPU kernels: one list for all kernels, keyed by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnspan.call.options import ALIBI, DENSE, SIGNED_ALIBI
from attnspan.jax.backends.tiles import interpret, words_of_rows
from attnspan.jax.part import JaxPart
from attnspan.jax.varying import axes_of, declared, spread

from . import lists as tables
from .tile import Place, Refs, Tile


class Operand(NamedTuple):
    """An array (or its shape and dtype), the block of it that a step sees, and the index of that block.

    Without a block, the whole array lies in scalar memory.
    """

    array: Any
    block: tuple[int, ...] | None = None
    at: Callable[[Place], tuple[Any, ...]] | None = None


class Grid(NamedTuple):
    """The steps of a kernel and the place of each. The last steps run in turn on one core."""

    sizes: tuple[Any, ...]
    in_turn: int
    place: Callable[[Sequence[Any], Sequence[Any]], Place]


#: Takes the place of a step, its grid coordinates, the prefetched tables, and the operands keyed by name.
Body = Callable[[Place, Sequence[Any], Sequence[Any], Refs], None]


def launch(
    name: str,
    body: Body,
    grid: Grid,
    scalars: Sequence[jax.Array],
    operands: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """Run a kernel over a grid, and return its outputs.

    ``scalars`` are prefetched tables, which ``grid.place`` reads. ``scratch`` has the shapes of float32
    memory that is kept from step to step.
    """
    names, axes = [*operands, *outputs, *scratch], len(grid.sizes)
    arrays = (*scalars, *(each.array for each in operands.values()))
    varied = axes_of(arrays)

    def kernel(*refs: Any) -> None:
        given, rest = refs[: len(scalars)], refs[len(scalars) :]
        at = tuple(pl.program_id(axis) for axis in range(axes))
        body(grid.place(at, given), at, given, dict(zip(names, rest, strict=True)))

    def spec(operand: Operand) -> pl.BlockSpec:
        if operand.block is None or operand.at is None:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        where = operand.at
        return pl.BlockSpec(operand.block, lambda *at: where(grid.place(at[:axes], at[axes:])))

    turns = ["parallel"] * (axes - grid.in_turn) + ["arbitrary"] * grid.in_turn
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid.sizes,
            in_specs=[spec(each) for each in operands.values()],
            out_specs=[spec(each) for each in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        out_shape=[declared(each.array.shape, each.array.dtype, varied) for each in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=turns),  # type: ignore[arg-type]
        interpret=interpret.get(),
        name=name,
    )
    found = call(*spread(arrays, varied))
    return dict(zip(outputs, found, strict=True))


def operands(tile: Tile, part: JaxPart, bounds: jax.Array) -> dict[str, Operand]:
    """Return the operands that every kernel reads: blocks of q, k, v, `padded_bounds`, and the options."""
    runs, bq, bk = bounds.shape[3], tile.block_q, tile.block_k
    found = {
        "q": of_rows(tile, part.q),
        "k": of_keys(tile, part.k),
        "v": of_keys(tile, part.v),
        # (b, h, 2 R, rows), with rows along lanes.
        "rows": by_row(tile, bounds.reshape(*bounds.shape[:3], 2 * runs).swapaxes(2, 3)),
    }
    if tile.part.bias_kind in (ALIBI, SIGNED_ALIBI):
        assert part.bias is not None
        found["slopes"] = Operand(part.bias.astype(jnp.float32).reshape(-1))
    elif tile.part.bias_kind == DENSE:
        found["bias"] = _dense(tile, part.bias)
    if part.q_index is not None:
        q_index = _padded(part.q_index[:, None].astype(jnp.int32), tile.q_blocks * bq)
        found["q_index"] = Operand(q_index, (1, 1, bq), lambda p: (_or0(q_index.shape[0], p.b), 0, p.i))
    if part.k_index is not None:
        k_index = _padded(part.k_index[:, None].astype(jnp.int32), tile.k_blocks * bk)
        found["k_index"] = Operand(k_index, (1, 1, bk), lambda p: (_or0(k_index.shape[0], p.b), 0, p.j))
    if tile.part.dropout_p:
        words = [jnp.broadcast_to(word, part.q.shape[:3]) for word in words_of_rows(part)]
        found["words"] = by_row(tile, jnp.stack(words, 2))
    return found


def of_rows(tile: Tile, x: jax.Array | jax.ShapeDtypeStruct) -> Operand:
    """Blocks of rows of a (B, Hq, Sq, n) array, each with all of its n elements."""
    return Operand(x, (1, 1, tile.block_q, x.shape[3]), lambda p: (p.b, p.h, p.i, 0))


def of_keys(tile: Tile, x: jax.Array | jax.ShapeDtypeStruct) -> Operand:
    """Blocks of keys of a (B, Hkv, Sk, n) array, each with all of its n elements."""
    return Operand(x, (1, 1, tile.block_k, x.shape[3]), lambda p: (p.b, p.kv, p.j, 0))


def by_row(tile: Tile, x: Any) -> Operand:
    """Blocks of a (B|1, Hq|1, n, Sq) array with n numbers per query, padded if it is too short."""
    length = tile.q_blocks * tile.block_q
    x = x if x.shape[3] == length else _padded(x, length)
    batch, heads, count, _ = x.shape
    return Operand(x, (1, 1, count, tile.block_q), lambda p: (_or0(batch, p.b), _or0(heads, p.h), 0, p.i))


def padded_bounds(tile: Tile, bounds: jax.Array) -> jax.Array:
    """Return bounds with as many rows as the blocks have. The added rows see nothing."""
    missing = tile.q_blocks * tile.block_q - bounds.shape[2]
    return jnp.pad(bounds, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))


def over_keys(tile: Tile, batch: int, lists: tables.Lists) -> Grid:
    """Return a grid with a step for each block of keys of each block of queries: b, h, i, step."""

    def place(at: Sequence[Any], scalars: Sequence[Any]) -> Place:
        b, h, i, step = at
        j = tables.block_at((scalars[0], scalars[1]), lists.dims, b, h, i, step)
        return Place(b, h, _head(tile, h), i, j)

    return Grid((batch, tile.q_heads, tile.q_blocks, lists.steps), 1, place)


def over_queries(tile: Tile, batch: int, lists: tables.Lists) -> Grid:
    """Return a grid with steps for all heads and query blocks of each key block: b, kv, j, member, step."""

    def place(at: Sequence[Any], scalars: Sequence[Any]) -> Place:
        b, kv, j, member, step = at
        h = kv * tile.group + member
        return Place(b, h, kv, tables.block_at((scalars[0], scalars[1]), lists.dims, b, h, j, step), j)

    sizes = (batch, tile.q_heads // tile.group, tile.k_blocks, tile.group, lists.steps)
    return Grid(sizes, 2, place)


def over_bias(tile: Tile, batch: int, shape: tuple[int, ...]) -> Grid:
    """Return a grid of a dense bias's tiles. Members that share a tile take turns: b, h, i, j, member."""
    full = (batch, tile.q_heads, tile.q_blocks)
    own = tuple(1 if has == 1 else many for has, many in zip(shape[:3], full, strict=True))
    shared = tuple(many // has for many, has in zip(full, own, strict=True))

    def place(at: Sequence[Any], scalars: Sequence[Any]) -> Place:
        del scalars
        *where, j, member = at
        inner = shared[1] * shared[2]
        members = (_over(member, inner), _left(_over(member, shared[2]), shared[1]), _left(member, shared[2]))
        b, h, i = (m if s > 1 else w for w, m, s in zip(where, members, shared, strict=True))
        return Place(b, h, _head(tile, h), i, j)

    return Grid((*own, tile.k_blocks, shared[0] * shared[1] * shared[2]), 1, place)


def _head(tile: Tile, h: Any) -> Any:
    return _over(h, tile.group)


def _over(x: Any, by: int) -> Any:
    """Return x // by of a nonnegative scalar. Python's division needs signs, which some TPUs lack."""
    return x if by == 1 else jax.lax.div(x, jnp.int32(by))


def _left(x: Any, by: int) -> Any:
    return 0 if by == 1 else jax.lax.rem(x, jnp.int32(by))


def _or0(size: int, at: Any) -> Any:
    return at if size > 1 else 0


def _padded(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def _dense(tile: Tile, bias: Any) -> Operand:
    batch, heads, rows, _ = bias.shape
    block = (1, 1, 1 if rows == 1 else tile.block_q, tile.block_k)
    return Operand(bias, block, lambda p: (_or0(batch, p.b), _or0(heads, p.h), _or0(rows, p.i), p.j))
