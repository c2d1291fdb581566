"""Backend "pallas": span kernels for TPUs, forward and backward, for every mask.

For tests, they also run slowly on any machine under `interpreted` from tiles.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from attnspan.call import Problem
from attnspan.call.options import DENSE, DISTANCE
from attnspan.jax.backends.tiles import (
    by_distance,
    common_of,
    interpret,
    legal,
    positions_of,
    sinks_gradient,
    symbols,
)
from attnspan.jax.part import Gradients, JaxPart

from . import kernels
from .tile import Tile

#: The largest head dim. With it, tiles of 128 x 128 fit easily into vector memory.
MAX_HEAD_DIM = 512

#: Most spans of a query. A block of 512 queries then has 1 MiB of spans, and memory holds two such blocks.
MAX_RUNS = 256

#: A distance table becomes a dense bias of at most this many elements (64 MiB).
MOST_TABLE_PAIRS = 2**24

#: Bytes of a core's vector memory that a kernel may use. By default compilers give a kernel 16 MiB and
#: reserve some of it.
BUDGET = 12 * 2**20

#: Queries and keys of a tile lie along lanes, so they come in multiples of 128.
LANES = 128

_SIZES = (128, 256, 512)
_WIDTH = {"float32": 4, "bfloat16": 2}


def supports(problem: Problem, part: JaxPart) -> str | None:
    """Return None, or the reason why the kernels cannot run the problem."""
    if problem.device != "tpu" and not (problem.device == "cpu" and interpret.get()):
        return f"it runs on TPUs, not on {problem.device}"
    if reason := symbols(problem):
        return reason
    if problem.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, the dtypes of TPUs, not {problem.dtype}"
    if max(problem.head_dim, problem.v_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if problem.runs > MAX_RUNS:
        return f"it takes up to {MAX_RUNS} spans per query, not {problem.runs}"
    if 0 in (problem.batch, problem.q_len, problem.k_len, problem.runs):
        return "it takes no empty arrays"
    pairs = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    if part.bias_kind == DISTANCE and pairs > MOST_TABLE_PAIRS:
        return (
            f"it converts a distance table to a dense bias of up to {MOST_TABLE_PAIRS} elements over "
            f"the batch and all heads, not {pairs}"
        )
    return None


def forward(part: JaxPart, size: tuple[int, int] | None = None) -> tuple[jax.Array, jax.Array]:
    """See `attnspan.backends`. ``size`` is the queries and keys of a tile, None for the default."""
    part = _for_kernels(part)
    return kernels.forward(_tile(part, size, "forward"), part)


def backward(
    part: JaxPart,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    want_dbias: bool,
    size: tuple[int, int] | None = None,
) -> Gradients:
    """See `attnspan.backends`. ``size`` is as in `forward`, for all kernels."""
    own = _for_kernels(part)
    tile = _tile(own, size, "backward")
    illegal = own.bounds[..., 0, 0] < 0
    common = jnp.where(illegal, 0, common_of(dout, out, dlse, ~illegal))
    finite_lse = jnp.where(illegal | (lse == -jnp.inf), 0, lse)
    inputs = kernels.Inputs(own, dout.astype(part.q.dtype), finite_lse, common)
    dq, dslopes = kernels.d_queries(tile, inputs)
    dk, dv = kernels.d_keys(tile, inputs)
    dbias = None
    if want_dbias and part.bias_kind:
        dbias = _d_bias(tile, inputs, part, dslopes)
    return dq, dk, dv, dbias, sinks_gradient(part.sinks, lse, common)


def _d_bias(tile: Tile, inputs: kernels.Inputs, part: JaxPart, dslopes: jax.Array | None) -> jax.Array:
    assert part.bias is not None
    if dslopes is not None:
        found = dslopes.sum(2)
        return found.sum(0, keepdims=True) if part.bias.shape[0] == 1 else found
    dense = kernels.d_bias(tile, inputs)
    if part.bias_kind == DENSE:
        return dense
    places = positions_of(part)
    _, pull = jax.vjp(lambda table: by_distance(table, *places), part.bias.astype(jnp.float32))
    (found,) = pull(dense)
    return found  # type: ignore[no-any-return]


def _tile(part: JaxPart, size: tuple[int, int] | None, direction: str) -> Tile:
    size = size or default(Problem.of(part.q, part.k, part.v, part.bounds, "tpu"), direction)
    (_, heads, q_len, _), (_, kv_heads, k_len, _) = part.q.shape, part.k.shape
    lengths = zip(size, (q_len, k_len), strict=True)
    block_q, block_k = (min(rows, -(-length // LANES) * LANES) for rows, length in lengths)
    return Tile(block_q, block_k, q_len, k_len, heads, heads // kv_heads, part)


def _for_kernels(part: JaxPart) -> JaxPart:
    """Return the part with `legal` bounds, and with a dense bias in place of a distance table.

    Kernels cannot look up an element per pair.
    """
    part = replace(part, bounds=legal(part.bounds, part.k_len))
    if part.bias_kind != DISTANCE:
        return part
    dense = by_distance(part.bias, *positions_of(part))
    return replace(part, bias=dense, bias_kind=DENSE)


def vmem_bytes(problem: Problem, direction: str, block_q: int, block_k: int) -> int:
    """Estimate the bytes of vector memory that a kernel holds.

    Blocks of q, k, v (and of dout and a result) count twice, because the next block is copied while one is
    used. Sums are float32. The tile itself has scores, weights and intermediate values: 4 tiles of float32
    forward, 6 backward. Head dims fill whole lanes of 128.
    """
    width = _WIDTH[problem.dtype]
    dim, v_dim = (-(-d // LANES) * LANES for d in (problem.head_dim, problem.v_dim))
    tiles = 4 * block_q * block_k * (4 if direction == "forward" else 6)
    if direction == "forward":
        copied = block_q * (dim + v_dim) + block_k * (dim + v_dim)
        sums = block_q * v_dim
    else:
        copied = block_q * (dim + v_dim) + 2 * block_k * (dim + v_dim)
        sums = block_k * (dim + v_dim)
    return tiles + 2 * width * copied + 4 * sums


def default(problem: Problem, direction: str) -> tuple[int, int]:
    """Return tiles of 512 x 512, or the largest that fit.

    Each score then meets 256 flops per byte of k and v. Queries and keys of a tile are multiples of 128, up
    to the lengths rounded up. The three backward kernels share one size.
    """
    q_sizes, k_sizes = (_sizes(length) for length in (problem.q_len, problem.k_len))
    # The smallest tile always fits, up to the largest supported head dim.
    fitting = [(q, k) for q in q_sizes for k in k_sizes if vmem_bytes(problem, direction, q, k) <= BUDGET]
    return max(fitting, key=lambda size: (size[0] * size[1], size[0]))


def _sizes(length: int) -> tuple[int, ...]:
    """Return sizes up to the length rounded up. A larger tile would be partly empty."""
    return tuple(size for size in _SIZES if size < length + size // 2) or _SIZES[:1]
