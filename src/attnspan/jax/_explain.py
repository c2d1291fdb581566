"""Which back end a call takes, why the others do not, and how much work it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from .._mistakes import refuse_keywords
from ..errors import DtypeError, OptionError
from ..kernels import cpu
from ..options import Bias
from ..problem import Problem
from ..spans import Spans
from ._attention import _FULL, AnyMask, Layout, lower_call
from ._choice import choice_of
from ._ops import MODULES, module_of
from ._options import Given
from ._sharded import ShardedMask


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``print`` it.

    Attributes:
        backend: Name of the back end that runs the call.
        refusals: For every other back end, why it does not.
        problem: Sizes, dtype and platform of the call.
        pairs: Visible (query, key) pairs over all batch rows and query heads.
        coverage: ``pairs`` as a fraction of all pairs.
        flops: Floating-point operations of the forward pass (the backward pass has 2.5 times as many).
        isa: Instruction-set level of the CPU kernel, or None where it does not run.
        options: Softcap, bias, sinks and dropout in words.

    Example:
        >>> x = jax.numpy.ones((1, 2, 4, 8))
        >>> explain(x, x, x, backend="math").coverage
        1.0
    """

    backend: str
    refusals: dict[str, str]
    problem: Problem
    pairs: int
    coverage: float
    flops: int
    isa: str | None
    options: str = "none"

    def __str__(self) -> str:
        p = self.problem
        sizes = (
            f"B={p.batch} H={p.q_heads}/{p.kv_heads} S={p.q_len}x{p.k_len} D={p.head_dim}/{p.v_dim} {p.dtype}"
        )
        lines = [
            f"attention {sizes} on {p.device}",
            f"  runs     {self.backend}{f' ({self.isa})' if self.isa else ''}",
            *(f"  not      {name}: {reason}" for name, reason in self.refusals.items()),
            f"  mask     R={p.runs}, {self.pairs:,} visible pairs, {self.coverage:.1%} of all",
            *([f"  options  {self.options}"] if self.options != "none" else []),
            f"  forward  {self.flops / 1e9:.3f} GFLOP, backward {2.5 * self.flops / 1e9:.3f}",
        ]
        return "\n".join(lines)


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Array | None = None,
    q_index: Array | None = None,
    k_index: Array | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **mistaken: Any,
) -> Explanation:
    """Say what `attention` would do with the same arguments, without doing it.

    Args:
        q: As for `attention`, with values; as all.
        k: As for `attention`.
        v: As for `attention`.
        mask: As for `attention`; what `shard` makes has an ``explain`` of its own.
        scale: As for `attention`.
        softcap: As for `attention`.
        bias: As for `attention`.
        sinks: As for `attention`.
        dropout_p: As for `attention`.
        dropout_seed: As for `attention`.
        q_index: As for `attention`.
        k_index: As for `attention`.
        layout: As for `attention`.
        return_lse: As for `attention`; some back ends have no lse.
        backend: As for `attention`.
        **mistaken: As for `attention`.

    Returns:
        The explanation.

    Raises:
        ValueError: As `attention` would, and for arrays that are being traced.
        TypeError: As `attention` would.

    Example:
        >>> from attnspan import causal
        >>> x = jax.numpy.ones((1, 2, 4, 8))
        >>> print(explain(x, x, x, mask=causal(), backend="math").backend)
        math
    """
    if mistaken:
        refuse_keywords(explain, mistaken)
    mask = _FULL if mask is None else mask
    if isinstance(mask, ShardedMask):
        raise DtypeError(
            "explain: mask",
            expected="the mask of a call on one device",
            got=f"{type(mask).__name__}, which spreads a call over a mesh",
            remedy="Call sharded.explain() of what shard(...) made",
        )
    given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    call = lower_call(q, k, v, mask, given, layout, scale, return_lse)
    problem, bounds = call.problem, call.operands.bounds
    if isinstance(bounds, jax.core.Tracer):
        raise OptionError(
            "explain",
            expected="arrays whose values can be read",
            got="ones that are being traced",
            remedy="Call it outside of jit, with arrays of the same shapes",
        )
    chosen = choice_of(problem, call.static, backend).name
    cost = int(Spans(np.asarray(bounds), problem.k_len).cost().sum())  # NumPy always has 64 bits.
    pairs = cost * (problem.batch // bounds.shape[0]) * (problem.q_heads // bounds.shape[1])
    total = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    return Explanation(
        backend=chosen,
        refusals={
            name: _refusal(name, call, chosen, backend is not None) for name in MODULES if name != chosen
        },
        problem=problem,
        pairs=pairs,
        coverage=pairs / total if total else 0.0,
        flops=problem.flops(pairs),
        isa=cpu.isa() if chosen == "ffi" else None,
        options=str(given),
    )


def _refusal(name: str, call: Any, chosen: str, asked: bool) -> str:
    reason = module_of(name).supports(call.problem, call.static)
    if reason is not None:
        return str(reason)
    return "not asked for" if asked else f"slower than {chosen}"
