"""Functions that backends share, for one tile of scores or for all: softcap, dropout, derivatives."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnspan.call import Problem
from attnspan.call.dropout import scale_of_kept
from attnspan.jax.dropout import row_words
from attnspan.jax.part import JaxPart

#: Kernels for devices compute powers of two, so their scores and lse are in units of log2.
LOG2E, LN2 = math.log2(math.e), math.log(2)

#: Whether Pallas kernels run as plain array code (see `interpreted`).
interpret = ContextVar("attnspan_interpret", default=False)


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Pallas kernels as plain array code on CPU, for tests.

    Programs that were compiled outside of the block do not change.
    """
    token = interpret.set(True)
    try:
        yield
    finally:
        interpret.reset(token)


def symbols(problem: Problem) -> str | None:
    """Return None, or why a kernel whose grid is made at tracing time cannot run the problem."""
    known = all(isinstance(size, int) for size in (problem.batch, problem.q_len, problem.k_len))
    return None if known else "it needs concrete sizes, not symbols"


class InBlocks:
    """Sizes that are cut into tiles of ``block_q`` queries and ``block_k`` keys."""

    q_len: int
    k_len: int
    block_q: int
    block_k: int

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block_k)


def capped(x: Any, softcap: float) -> tuple[Any, Any]:
    """Return the softcapped scores and their derivative. None stands for a derivative of 1."""
    if not softcap:
        return x, None
    t = jnp.tanh(x / softcap)
    y = softcap * t
    if softcap > 1e4:  # Far below the cap, tanh changes nothing, but the quotient may underflow.
        y = jnp.where(jnp.abs(x) < 1e-4 * softcap, x, y)
    return y, 1 - t * t


def scores_of_products(products: Any, part: JaxPart) -> tuple[Any, Any]:
    """Return the scores in units of log2 and their derivative by scaled products. None stands for 1."""
    if not part.softcap:
        return products * np.float32(part.scale * LOG2E), None
    t = jnp.tanh(products * np.float32(part.scale / part.softcap))
    return t * np.float32(part.softcap * LOG2E), 1 - t * t


def gradients_of_scores(
    weights: Any, dweights: Any, common: Any, part: JaxPart, *, visible: Any, keep: Any, slope: Any
) -> tuple[Any, Any, Any]:
    """The backward pass of a tile. See `attnspan.reference.backward` for the formulas.

    Args:
        weights: Softmax weights. Their values are ignored where ``visible`` is False.
        dweights: dout . v of each pair.
        common: Result of `common_of`.
        part: The call, of which the numbers are read.
        visible: Visible pairs, None for all.
        keep: Pairs that dropout keeps, None for all.
        slope: Derivative of the softcap, None for 1.

    Returns:
        The weights after dropout, and the gradients of the scores after and before the softcap.
    """
    met = weights
    if keep is not None:
        factor = np.asarray(scale_of_kept(part.dropout_p), weights.dtype)
        dweights, met = jnp.where(keep, dweights * factor, 0), jnp.where(keep, weights * factor, 0)
    dx = weights * (dweights + common)
    if visible is not None:
        dx, met = jnp.where(visible, dx, 0), jnp.where(visible, met, 0)
    ds = dx if slope is None else dx * slope
    if visible is not None and slope is not None:
        ds = jnp.where(visible, ds, 0)  # A hidden score's slope may be NaN.
    return met, dx, ds


def common_of(dout: Any, out: Any, dlse: Any, alive: Any, wide: Any = jnp.float32) -> Any:
    """Return the common term of the gradients of a query's scores: dlse - sum(dout * out), (B, H, Sq).

    If a query sees no key (``alive`` is False), its dout is not read.
    """
    common = jnp.where(alive, -(dout.astype(wide) * out.astype(wide)).sum(-1), 0)
    return common if dlse is None else common + dlse.astype(wide)


def sinks_gradient(sinks: Any, lse: Any, common: Any) -> Any:
    """Return the gradient of the sinks. A sink is a key without a value: its weight times the common term."""
    if sinks is None:
        return None
    sinks = sinks.astype(common.dtype)[:, None]
    weight = jnp.where((sinks == -jnp.inf) | jnp.isnan(lse), 0, jnp.exp(sinks - lse))
    return jnp.where(weight == 0, 0, weight * common).sum((0, 2))


def positions_of(part: JaxPart) -> tuple[jax.Array, jax.Array]:
    """Return the global indices of queries (B|1, Sq) and keys (B|1, Sk), int32, of a "bhsd" part."""
    queries, keys, q_len, k_len = part.q_index, part.k_index, part.q.shape[2], part.k.shape[2]
    if queries is None:
        queries = jnp.arange(k_len - q_len, k_len, dtype=jnp.int32)[None]
    return queries, jnp.arange(k_len, dtype=jnp.int32)[None] if keys is None else keys


def by_distance(table: Any, queries: Any, keys: Any) -> jax.Array:
    """Return values of a distance table (Hq, 2L + 1) for indices (B|1, m), (B|1, n): (B|1, Hq, m, n)."""
    (heads, width), reach = table.shape, table.shape[1] // 2
    columns = jnp.clip(keys[:, None, :] - queries[:, :, None], -reach, reach) + reach
    # Gather from one axis, because on TPUs gathered columns of all heads would each fill 128 lanes.
    at = columns[:, None] + jnp.arange(heads, dtype=jnp.int32)[:, None, None] * width
    return table.reshape(-1)[at]  # type: ignore[no-any-return]


def words_of_rows(part: JaxPart) -> tuple[jax.Array, jax.Array]:
    """Return the two words per query that dropout hashes with its keys, uint32 (B, Hq, Sq)."""
    assert part.dropout_seed is not None, "dropout needs seeds"
    rows = positions_of(part)[0]
    return row_words(part.dropout_seed[..., :1], part.dropout_seed[..., 1:], rows[:, None, :])


def illegal_rows(bounds: jax.Array, k_len: int) -> jax.Array:
    """Return whether each query (B|1, H|1, Sq) has a span beyond the keys or before its previous span."""
    lo, hi = bounds[..., 0], bounds[..., 1]
    filled = lo < hi
    end = lax.cummax(jnp.where(filled, hi, 0), axis=3)
    before = jnp.pad(end, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
    return ((lo < 0) | (lo > hi) | (hi > k_len) | (filled & (lo < before))).any(-1)


def legal(bounds: jax.Array, k_len: int) -> jax.Array:
    """Return bounds whose illegal queries see nothing, marked by spans [-1, -1).

    Empty spans of other queries become [0, 0).
    """
    found = jnp.where((bounds[..., 0] < bounds[..., 1])[..., None], bounds, 0)
    return jnp.where(illegal_rows(bounds, k_len)[..., None, None], -1, found)
