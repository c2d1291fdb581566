"""Which backend a call takes, why the others do not, and how much work it is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from ..call import check_keywords, forwards_to
from ..errors import DtypeError, expect
from ..kernels import Explanation
from ..options import Given
from ..spans import Spans
from ._attention import _FULL, attention, lower_call
from ._choice import all_backends, choice_of
from ._front import JaxFront
from ._sharded import ShardedMask


@forwards_to(attention)
def explain(q: Array, k: Array, v: Array, **options: Any) -> Explanation:
    """Say what `attention` would do with the same arguments, without doing it.

    Args:
        q: As for `attention`, with values; as all.
        k: As for `attention`.
        v: As for `attention`.
        **options: Keywords of `attention`; some backends have no lse. A mask made by `shard` has an
            ``explain`` of its own.

    Returns:
        The explanation.

    Raises:
        ValueError: As `attention` would, and for arrays that are being traced.
        TypeError: As `attention` would.

    Example:
        >>> from attnspan import causal
        >>> x = jax.numpy.ones((1, 2, 4, 8))
        >>> explain(x, x, x, mask=causal(), backend="math").coverage
        0.625
    """
    check_keywords(explain, options)
    return _explain(q, k, v, **options)


def _explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    wanted, got = (
        "the mask of a call on one device",
        f"{type(mask).__name__}, which spreads a call over a mesh",
    )
    remedy, single = "Call sharded.explain() of what shard(...) made", not isinstance(mask, ShardedMask)
    expect(single, "explain: mask", wanted, got, remedy, error=DtypeError)
    mask = _FULL if mask is None else mask
    call, static = lower_call(JaxFront(), q, k, v, mask, Given(**options), scale, layout, return_lse)
    p, bounds = call.problem, call.bounds
    remedy, got = "Call it outside of jit, with arrays of the same shapes", "ones that are being traced"
    readable = not isinstance(bounds, jax.core.Tracer)
    expect(readable, "explain", "arrays whose values can be read", got, remedy)
    cost = int(Spans(np.asarray(bounds), p.k_len).cost().sum())  # NumPy always has 64 bits.
    pairs = cost * (p.batch // bounds.shape[0]) * (p.q_heads // bounds.shape[1])
    chosen = choice_of(p, static, backend).name
    return Explanation.of(call, all_backends(static), chosen, backend is not None, pairs)
