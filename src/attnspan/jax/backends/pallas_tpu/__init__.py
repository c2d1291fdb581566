"""Backend "pallas": span kernels for TPUs, forward and backward, whatever the mask.

They run on any machine under `interpreting`, slowly, for tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ....call import Problem
from ....options import DENSE, DISTANCE
from .. import Gradients, Operands, Static, symbols
from ..tiles import common_of, legal, positions_of, sinks_gradient
from . import kernels
from .launch import plainly
from .sizes import LANES, default
from .tile import Tile

#: The largest head dim: with it tiles of 128 x 128 fit into vector memory with room to spare.
MAX_HEAD_DIM = 512

#: Most spans of a row. Those of 512 rows are 1 MiB then, twice.
MAX_RUNS = 256

#: A distance table becomes a dense bias here, of at most this many elements (64 MiB).
MOST_TABLE_PAIRS = 2**24

_interpreting = ContextVar("_interpreting", default=False)


@contextmanager
def interpreting(simulated: bool = True) -> Iterator[None]:
    """Inside, the kernels run on CPU. Memory behind the end of an array is NaN in both ways of it.

    Args:
        simulated: In JAX's TPU interpret mode, which simulates a core's memories and copies. Else as plain
            array code, of which a call takes a thousandth of the time.
    """
    inside, plain = _interpreting.set(True), plainly.set(not simulated)
    try:
        with pltpu.force_tpu_interpret_mode() if simulated else nullcontext():
            yield
    finally:
        plainly.reset(plain)
        _interpreting.reset(inside)


def supports(problem: Problem, static: Static) -> str | None:
    """None, or why the kernels cannot run the problem."""
    if problem.device != "tpu" and not (problem.device == "cpu" and _interpreting.get()):
        return f"it runs on TPUs, not on {problem.device}"
    if reason := symbols(problem):
        return reason
    if problem.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, which TPUs compute in, not {problem.dtype}"
    if max(problem.head_dim, problem.v_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if problem.runs > MAX_RUNS:
        return f"it takes up to {MAX_RUNS} spans a row, not {problem.runs}"
    if 0 in (problem.batch, problem.q_len, problem.k_len, problem.runs):
        return "it takes no empty arrays"
    pairs = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    if static.bias_kind == DISTANCE and pairs > MOST_TABLE_PAIRS:
        return (
            f"it makes a distance table a dense bias, of up to {MOST_TABLE_PAIRS} pairs of a query and a key "
            f"in all heads and batch rows, not {pairs}"
        )
    return None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    given: Operands,
    static: Static,
    size: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `attnspan.jax.backends`; ``size`` are rows and keys of a tile, None for the default."""
    tile = _tile(q, k, static, size or _default(q, k, v, given, "forward"))
    given = _expanded(given, static, q.shape[2], k.shape[2])
    return kernels.forward(tile, q, k, v, legal(given.bounds, k.shape[2]), given)


def backward(*call: Any, size: tuple[int, int] | None = None) -> Gradients:
    """See `attnspan.jax.backends`; ``size`` as in `forward`, for all kernels."""
    dout, dlse, q, k, v, given, out, lse, static, want_dbias = call
    tile = _tile(q, k, static, size or _default(q, k, v, given, "backward"))
    bounds = legal(given.bounds, k.shape[2])
    illegal = bounds[..., 0, 0] < 0
    common = jnp.where(illegal, 0, common_of(dout, out, dlse, ~illegal))
    finite_lse = jnp.where(illegal | (lse == -jnp.inf), 0, lse)
    expanded = _expanded(given, static, q.shape[2], k.shape[2])
    inputs = kernels.Inputs(q, k, v, dout.astype(q.dtype), bounds, finite_lse, common, expanded)
    dq, dslopes = kernels.d_queries(tile, inputs)
    dk, dv = kernels.d_keys(tile, inputs)
    dbias = None
    if want_dbias and static.bias_kind:
        dbias = _d_bias(tile, inputs, given, static, dslopes)
    return dq, dk, dv, dbias, sinks_gradient(given.sinks, lse, common)


def _d_bias(
    tile: Tile, inputs: kernels.Inputs, given: Operands, static: Static, dslopes: jax.Array | None
) -> jax.Array:
    assert given.bias is not None
    if dslopes is not None:
        found = dslopes.sum(2)
        return found.sum(0, keepdims=True) if given.bias.shape[0] == 1 else found
    dense = kernels.d_bias(tile, inputs)
    if static.bias_kind == DENSE:
        return dense
    sizes = dense.shape[2:]
    _, pull = jax.vjp(lambda table: _by_distance(table, given, *sizes), given.bias.astype(jnp.float32))
    (found,) = pull(dense)
    return found  # type: ignore[no-any-return]


def _default(q: jax.Array, k: jax.Array, v: jax.Array, given: Operands, direction: str) -> tuple[int, int]:
    return default(Problem.of(q, k, v, given.bounds, "tpu"), direction)


def _tile(q: jax.Array, k: jax.Array, static: Static, size: tuple[int, int]) -> Tile:
    (_, heads, q_len, _), (_, kv_heads, k_len, _) = q.shape, k.shape
    lengths = zip(size, (q_len, k_len), strict=True)
    block_q, block_k = (min(rows, -(-length // LANES) * LANES) for rows, length in lengths)
    static = replace(static, bias_kind=DENSE) if static.bias_kind == DISTANCE else static
    return Tile(block_q, block_k, q_len, k_len, heads, heads // kv_heads, static)


def _expanded(given: Operands, static: Static, q_len: int, k_len: int) -> Operands:
    """With a dense bias in the place of a distance table, as kernels cannot look up an element per pair."""
    if static.bias_kind != DISTANCE:
        return given
    return given._replace(bias=_by_distance(given.bias, given, q_len, k_len))


def _by_distance(table: Any, given: Operands, q_len: int, k_len: int) -> jax.Array:
    """The values of a distance table, (B|1, Hq, Sq, Sk)."""
    q_index, k_index = positions_of(given, q_len, k_len)
    reach = table.shape[1] // 2
    distance = (k_index[:, None, :] - q_index[:, :, None]).clip(-reach, reach) + reach
    # Of one axis: gathered columns of all heads would each fill 128 lanes.
    heads, width = table.shape
    at = distance[:, None] + jnp.arange(heads, dtype=jnp.int32)[:, None, None] * width
    return table.reshape(-1)[at]  # type: ignore[no-any-return]
