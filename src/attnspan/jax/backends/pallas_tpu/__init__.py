"""The back end "pallas": our span kernels for TPUs, forward and backward, whatever the mask.

They run on any machine under `interpreting`, slowly, for tests.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ....call import Problem
from ....options import DENSE, DISTANCE
from .. import Gradients, Operands, Static
from . import backward as kernels
from .forward import forward as run_forward
from .launch import plainly
from .lists import clean
from .sizes import LANES, chosen, configs
from .tile import Tile

__all__ = ["backward", "configs", "forward", "interpreting", "supports"]

#: The largest head dim: with it tiles of 128 x 128 fit into vector memory with room to spare.
MAX_HEAD_DIM = 512

#: Most spans of a row. Those of 512 rows are 1 MiB then, twice.
MAX_RUNS = 256

#: A distance table becomes a dense bias here, of at most this many elements (64 MiB).
MOST_TABLE_PAIRS = 2**24

_interpreting = ContextVar("_interpreting", default=False)


#: Tuned blocks are looked up by the mask, where words say it.
READS_MASK = True


@contextmanager
def interpreting(simulated: bool = True) -> Iterator[None]:
    """Inside, the kernels run on CPU. Memory behind the end of an array is NaN in both ways of it.

    Args:
        simulated: In JAX's TPU interpret mode, which simulates a core's memories and copies. Else as plain
            array code, of which a call takes a thousandth of the time.

    Example:
        >>> problem = Problem(1, 1, 1, 4, 4, 64, 64, 1, "float32", "cpu")
        >>> with interpreting():
        ...     print(supports(problem, Static(scale=1.0)))
        None
    """
    inside, plain = _interpreting.set(True), plainly.set(not simulated)
    try:
        with pltpu.force_tpu_interpret_mode() if simulated else nullcontext():
            yield
    finally:
        plainly.reset(plain)
        _interpreting.reset(inside)


def supports(problem: Problem, static: Static) -> str | None:
    """Return None, or why the kernels cannot run the problem.

    Example:
        >>> supports(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float32", "gpu"), Static(scale=1.0))
        'it runs on TPUs, not on gpu'
        >>> supports(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float16", "tpu"), Static(scale=1.0))
        'it takes float32 and bfloat16, which TPUs compute in, not float16'
    """
    pairs = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    if problem.device != "tpu" and not (problem.device == "cpu" and _interpreting.get()):
        return f"it runs on TPUs, not on {problem.device}"
    if problem.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, which TPUs compute in, not {problem.dtype}"
    if max(problem.head_dim, problem.v_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if problem.runs > MAX_RUNS:
        return f"it takes up to {MAX_RUNS} spans a row, not {problem.runs}"
    if 0 in (problem.batch, problem.q_len, problem.k_len, problem.runs):
        return "it takes no empty arrays"
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
    config: Mapping[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend.

    Args:
        q: (B, Hq, Sq, D), float32 or bfloat16.
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, Dv).
        given: The other arrays.
        static: The numbers of the call.
        config: One of `configs`; None for the tuned one, or else the default.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and lse float32 (B, Hq, Sq), natural logarithm; both are NaN in rows
        of illegal bounds.

    Example:
        >>> x, bounds = jnp.ones((1, 1, 2, 8)), jnp.array([[0, 1], [0, 2]], jnp.int32).reshape(1, 1, 2, 1, 2)
        >>> with interpreting():
        ...     out, lse = forward(x, x, x, Operands(bounds), Static(scale=1.0))
        >>> [round(float(each), 3) for each in lse.ravel()]
        [8.0, 8.693]
    """
    tile = _tile(q, k, v, given, static, "forward", config)
    given = _expanded(given, static, q.shape[2], k.shape[2])
    return run_forward(tile, q, k, v, clean(given.bounds, k.shape[2]), given)


def backward(
    dout: jax.Array,
    dlse: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    given: Operands,
    out: jax.Array,
    lse: jax.Array,
    static: Static,
    want_dbias: bool,
    config: Mapping[str, int] | None = None,
) -> Gradients:
    """The gradients of sum(out * dout) + sum(lse * dlse).

    Args:
        dout: (B, Hq, Sq, Dv).
        dlse: (B, Hq, Sq), or None for zeros.
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        given: As in `forward`.
        out: As `forward` returned it.
        lse: As `forward` returned it.
        static: As in `forward`.
        want_dbias: Whether the bias's gradient is wanted; that of a dense one has a kernel of its own.
        config: As in `forward`; all kernels share it.

    Returns:
        dq, dk, dv in the dtypes of q, k, v; the gradient of the bias, float32, in its shape, and that of the
        sinks, float32, or None. Rows of illegal bounds have none.

    Example:
        >>> x, bounds = jnp.ones((1, 1, 2, 8)), jnp.array([[0, 1], [0, 2]], jnp.int32).reshape(1, 1, 2, 1, 2)
        >>> call = x, x, x, Operands(bounds)
        >>> @jax.jit
        ... def gradients(*call):
        ...     return backward(x, None, *call, *forward(*call, Static(1.0)), Static(1.0), False)
        >>> with interpreting():
        ...     dq, dk, dv, *_ = gradients(*call)
        >>> [round(float(x), 3) for x in dv[0, 0, :, 0]]
        [1.5, 0.5]
    """
    tile = _tile(q, k, v, given, static, "backward", config)
    bounds = clean(given.bounds, k.shape[2])
    illegal = bounds[..., 0, 0] < 0
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta = delta if dlse is None else delta - dlse.astype(jnp.float32)
    delta = jnp.where(illegal, 0, delta)
    finite_lse = jnp.where(illegal | (lse == -jnp.inf), 0, lse)
    expanded = _expanded(given, static, q.shape[2], k.shape[2])
    inputs = kernels.Inputs(q, k, v, dout.astype(q.dtype), bounds, finite_lse, delta, expanded)
    dq, dslopes = kernels.d_queries(tile, inputs)
    dk, dv = kernels.d_keys(tile, inputs)
    dbias = None
    if want_dbias and static.bias_kind:
        dbias = _d_bias(tile, inputs, given, static, dslopes)
    dsinks = None
    if given.sinks is not None:
        sinks = given.sinks.astype(jnp.float32)[:, None]
        weights = jnp.where(illegal | (sinks == -jnp.inf), 0, jnp.exp(sinks - lse))
        dsinks = -(weights * delta).sum((0, 2))
    return dq, dk, dv, dbias, dsinks


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


def _tile(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    given: Operands,
    static: Static,
    direction: str,
    config: Mapping[str, int] | None,
) -> Tile:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    sizes = (batch, heads, kv_heads, q_len, k_len, head_dim, v_dim, given.bounds.shape[3])
    size = config or chosen(Problem(*sizes, str(q.dtype), "tpu"), static, direction)
    block_q, block_k = (
        min(size[name], -(-length // LANES) * LANES)
        for name, length in (("block_q", q_len), ("block_k", k_len))
    )
    static = replace(static, bias_kind=DENSE) if static.bias_kind == DISTANCE else static
    return Tile(block_q, block_k, q_len, k_len, heads, heads // kv_heads, static)


def _expanded(given: Operands, static: Static, q_len: int, k_len: int) -> Operands:
    """With a dense bias in the place of a distance table, as kernels cannot look up an element per pair."""
    if static.bias_kind != DISTANCE:
        return given
    return given._replace(bias=_by_distance(given.bias, given, q_len, k_len))


def _by_distance(table: Any, given: Operands, q_len: int, k_len: int) -> jax.Array:
    """The values of a distance table, (B|1, Hq, Sq, Sk)."""
    q_index, k_index = given.q_index, given.k_index
    if q_index is None:
        q_index = jnp.arange(k_len - q_len, k_len, dtype=jnp.int32)[None]
    if k_index is None:
        k_index = jnp.arange(k_len, dtype=jnp.int32)[None]
    reach = table.shape[1] // 2
    distance = (k_index[:, None, :] - q_index[:, :, None]).clip(-reach, reach) + reach
    # Of one axis: gathered columns of all heads would each fill 128 lanes.
    heads, width = table.shape
    at = distance[:, None] + jnp.arange(heads, dtype=jnp.int32)[:, None, None] * width
    return table.reshape(-1)[at]  # type: ignore[no-any-return]
