"""Backend "pallas_gpu": span kernels in Pallas, which JAX hands to Triton. Any mask, O(S) memory.

Blocks of keys that a block of queries does not see cost nothing; tiles of which every row sees every key are
not masked. The backward pass has a kernel by queries and one by keys, so results are the same bits each time.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....call import Problem
from ....options import DENSE, DISTANCE
from .. import Gradients, Operands, Static, symbols
from ..tiles import LOG2E, common_of, interpret, legal, sinks_gradient, words_of_rows
from ..visits import key_visits, query_visits
from . import kernels
from .tiles import Arrays, Plan, power_of_two

MAX_HEAD_DIM = 256
MAX_RUNS = 16


def supports(problem: Problem, static: Static) -> str | None:
    """None, or why the kernels cannot run the problem."""
    if problem.device != "gpu" and not interpret.get():
        return f"it runs on GPUs, not on {problem.device}"
    if reason := symbols(problem):
        return reason
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {problem.dtype}"
    if max(problem.head_dim, problem.v_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if min(problem.batch, problem.q_len, problem.k_len) == 0:
        return "it takes no empty arrays"
    if problem.runs > MAX_RUNS:
        return f"it takes at most {MAX_RUNS} spans a row, not {problem.runs}"
    if static.bias_kind == DISTANCE:
        return "it has no biases by distance: the gradient of a table would need atomics"
    return None


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, given: Operands, static: Static
) -> tuple[jax.Array, jax.Array]:
    """See `attnspan.jax.backends`."""
    plan = _plan(q, k, v, static, _tiling(q, v, backward=False))
    return kernels.forward(plan, _arrays(plan, q, k, v, given))


def backward(*call: Any) -> Gradients:
    """See `attnspan.jax.backends`."""
    dout, dlse, q, k, v, given, out, lse, static, want_dbias = call
    plan = _plan(q, k, v, static, _tiling(q, v, backward=True))
    arrays = _arrays(plan, q, k, v, given)
    # An illegal row has NaN for its results, and sees nothing; a row that sees nothing has no weights.
    seen = lse != -jnp.inf
    common = common_of(dout, out, dlse, seen)
    arrays = arrays._replace(
        sinks=None,
        dout=dout.astype(q.dtype),
        lse=jnp.where(seen, lse * LOG2E, jnp.inf),
        common=jnp.where(seen, common, 0.0),
    )
    dq, row_slopes = kernels.differentiate_queries(plan, arrays)
    by_keys = arrays._replace(q_visits=query_visits(arrays.visits, plan.k_blocks))
    dk, dv = kernels.differentiate_keys(plan, by_keys)
    dbias = None
    if want_dbias and row_slopes is not None:
        dbias = row_slopes.sum(2)
        dbias = dbias.sum(0, keepdims=True) if given.bias is not None and given.bias.shape[0] == 1 else dbias
    elif want_dbias and static.bias_kind == DENSE:
        dbias = kernels.differentiate_bias(plan, arrays)
    return dq, dk, dv, dbias, sinks_gradient(given.sinks, lse, common)


@dataclass(frozen=True)
class _Tiling:
    """Queries and keys in a tile, and warps of a program."""

    block_q: int
    block_k: int
    warps: int


#: By bytes of a row of the widest tile: tiles of the forward pass, and of the backward pass. Compiled for
#: compute capability 9.0, kernels without options spill at most 56 bytes a thread, and take at most 96 KiB of
#: shared memory. Products of float32 run on the ordinary units, whose operands take more registers.
_TILINGS = {
    "half": (
        (128, _Tiling(128, 64, 8), _Tiling(64, 64, 4)),
        (256, _Tiling(128, 64, 8), _Tiling(64, 32, 4)),
        (512, _Tiling(64, 32, 8), _Tiling(32, 32, 8)),
    ),
    "single": (
        (256, _Tiling(64, 32, 8), _Tiling(32, 32, 4)),
        (512, _Tiling(32, 16, 8), _Tiling(32, 32, 8)),
        (1024, _Tiling(32, 16, 8), _Tiling(16, 16, 8)),
    ),
}


def _tiling(q: jax.Array, v: jax.Array, *, backward: bool) -> _Tiling:
    """Tiles for the head dims and the dtype; chosen by what compiles well, not yet by measurement."""
    row = max(power_of_two(q.shape[3]), power_of_two(v.shape[3])) * q.dtype.itemsize
    known = _TILINGS["single" if q.dtype.itemsize == 4 else "half"]
    forward_tiling, backward_tiling = next(tilings for most, *tilings in known if row <= most)
    return backward_tiling if backward else forward_tiling


def _plan(q: jax.Array, k: jax.Array, v: jax.Array, static: Static, tiling: _Tiling) -> Plan:
    q_len, k_len = q.shape[2], k.shape[2]
    return Plan(
        # What a kernel does not read must not make another kernel.
        static=replace(static, mask=None, want_lse=True),
        q_len=q_len,
        k_len=k_len,
        head_dim=q.shape[3],
        v_dim=v.shape[3],
        group=q.shape[1] // k.shape[1],
        block_q=min(tiling.block_q, power_of_two(q_len)),
        block_k=min(tiling.block_k, power_of_two(k_len)),
        warps=tiling.warps,
        interpret=interpret.get(),
    )


def _arrays(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, given: Operands) -> Arrays:
    """What the forward kernel reads, and every other one too."""
    bounds = legal(given.bounds, plan.k_len)
    words = jnp.stack(words_of_rows(given, plan.q_len, plan.k_len)) if plan.static.dropout_p else None
    visits = key_visits(bounds, plan.k_len, plan.block_q, plan.block_k)
    return Arrays(q, k, v, bounds, visits, given.bias, given.sinks, words, given.q_index, given.k_index)
