"""Which backend a call takes, why the others do not, and how much work it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._mistakes import refuse_keywords
from ..errors import DtypeError
from ..kernels import choose
from ..options import Bias
from ..problem import Problem, check_scale
from ._attention import _FULL, BACKENDS, AnyMask, Layout, lower_call
from ._options import Given
from .dtensor import ShardedMask
from .ops import visible_pairs


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``print`` it.

    Attributes:
        backend: Name of the backend that runs the call.
        refusals: For every other backend, why it does not.
        problem: Sizes, dtype and device of the call.
        pairs: Visible (query, key) pairs over all batch rows and query heads.
        coverage: ``pairs`` as a fraction of all pairs.
        flops: Floating-point operations of the forward pass (the backward pass has 2.5 times as many).
        threads: CPU threads that a kernel may use.
        isa: Instruction-set level of the CPU kernel, or None where it does not run.
        options: Softcap, bias, sinks and dropout in words.

    Example:
        >>> x = torch.randn(1, 2, 4, 8)
        >>> explain(x, x, x, backend="math").coverage
        1.0
    """

    backend: str
    refusals: dict[str, str]
    problem: Problem
    pairs: int
    coverage: float
    flops: int
    threads: int
    isa: str | None
    options: str = "none"

    def __str__(self) -> str:
        p = self.problem
        sizes = (
            f"B={p.batch} H={p.q_heads}/{p.kv_heads} S={p.q_len}x{p.k_len} D={p.head_dim}/{p.v_dim} {p.dtype}"
        )
        where = f", {self.isa}" if self.isa else ""
        lines = [
            f"attention {sizes} on {p.device}",
            f"  runs     {self.backend} ({self.threads} thread{'s' if self.threads != 1 else ''}{where})",
            *(f"  not      {name}: {reason}" for name, reason in self.refusals.items()),
            f"  mask     R={p.runs}, {self.pairs:,} visible pairs, {self.coverage:.1%} of all",
            *([f"  options  {self.options}"] if self.options != "none" else []),
            f"  forward  {self.flops / 1e9:.3f} GFLOP, backward {2.5 * self.flops / 1e9:.3f}",
        ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,  # noqa: ARG001 (no backend of torch minds)
    backend: str | None = None,
    **mistaken: Any,
) -> Explanation:
    """Say what `attention` would do with the same arguments, without doing it.

    Args:
        q: As for `attention`.
        k: As for `attention`.
        v: As for `attention`.
        mask: As for `attention`.
        scale: As for `attention`.
        softcap: As for `attention`.
        bias: As for `attention`.
        sinks: As for `attention`.
        dropout_p: As for `attention`.
        dropout_seed: As for `attention`.
        q_index: As for `attention`.
        k_index: As for `attention`.
        layout: As for `attention`.
        return_lse: As for `attention`.
        backend: As for `attention`.
        **mistaken: As for `attention`.

    Returns:
        The explanation.

    Raises:
        ValueError: As `attention` would.
        TypeError: As `attention` would.

    Example:
        >>> from attnspan import causal
        >>> x = torch.randn(1, 2, 4, 8, dtype=torch.float64)
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
            got=f"{type(mask).__name__}, which spreads a call over ranks",
            remedy="Call its own explain()",
        )
    given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    q, k, v, bounds, problem, _ = lower_call(q, k, v, mask, given, layout)
    check_scale(scale)
    chosen = choose(problem, BACKENDS, backend).name
    pairs = visible_pairs(q, k, bounds)
    total = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    return Explanation(
        backend=chosen,
        refusals={
            name: _refusal(other, problem, chosen, backend is not None)
            for name, other in BACKENDS.items()
            if name != chosen
        },
        problem=problem,
        pairs=pairs,
        coverage=pairs / total if total else 0.0,
        flops=problem.flops(pairs),
        threads=torch.get_num_threads(),
        isa=BACKENDS["cpu"].isa() if chosen == "cpu" else None,
        options=str(given),
    )


def _refusal(backend: Any, problem: Problem, chosen: str, asked: bool) -> str:
    reason = backend.supports(problem)
    if reason is not None:
        return str(reason)
    return "not asked for" if asked else f"slower than {chosen}"
