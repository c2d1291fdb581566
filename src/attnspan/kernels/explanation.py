"""The explanation of a call's backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attnspan.backends import Backend
from attnspan.call import Call, Problem


class SlowPathWarning(UserWarning):
    """Warning that attention runs on a slower backend than its device has."""


@dataclass(frozen=True)
class Explanation:
    """Result of ``explain``. You can ``print`` it.

    Attributes:
        backend: Name of the backend that runs the call.
        refusals: The reason why each other backend does not run the call, keyed by name.
        problem: The sizes of the call.
        pairs: Visible (query, key) pairs over all batch elements and query heads.
        options: Softcap, bias, sinks and dropout in words.
        isa: Instruction-set level of the CPU kernel, or None if it does not run.
        threads: CPU threads that a kernel may use, or None if the framework decides.
        kernel: Name of the kernel, if the backend calls a kernel of another library. Else None.

    Example:
        >>> import torch
        >>> from attnspan import causal
        >>> from attnspan.torch import explain
        >>> q = k = v = torch.zeros(1, 2, 4, 16)
        >>> explain(q, k, v, mask=causal(), backend="math").backend
        'math'
        >>> explain(q, k, v, mask=causal()).pairs  # 2 heads, 1 + 2 + 3 + 4 pairs each
        20
    """

    backend: str
    refusals: dict[str, str]
    problem: Problem
    pairs: int
    options: str = "none"
    isa: str | None = None
    threads: int | None = None
    kernel: str | None = None

    @classmethod
    def of(
        cls,
        call: Call,
        backends: Mapping[str, Backend],
        chosen: str,
        asked: bool,
        pairs: int,
        facts: tuple[Any, ...] = (),
        **rest: Any,
    ) -> Explanation:
        """Explain a call, with a reason for every other backend. ``asked``: the caller named the backend."""
        other = "not asked for" if asked else f"slower than {chosen}"
        refusals = {
            name: (x.refusal if asked else x.against)(call.problem, *facts) or other
            for name, x in backends.items()
            if name != chosen
        }
        isa = import_module("attnspan.kernels.cpu").isa() if chosen == "cpu" else None
        return cls(chosen, refusals, call.problem, pairs, str(call.given), isa, **rest)

    @property
    def coverage(self) -> float:
        """``pairs`` as a fraction of all pairs."""
        p = self.problem
        total = p.batch * p.q_heads * p.q_len * p.k_len
        return self.pairs / total if total else 0.0

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass (the backward pass has 2.5 times as many)."""
        return self.problem.flops(self.pairs)

    def __str__(self) -> str:
        p = self.problem
        sizes = (
            f"B={p.batch} H={p.q_heads}/{p.kv_heads} S={p.q_len}x{p.k_len} D={p.head_dim}/{p.v_dim} {p.dtype}"
        )
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        where = ", ".join(filter(None, (threads, self.isa, self.kernel)))
        lines = [
            f"attention {sizes} on {p.device}",
            f"  runs     {self.backend}{f' ({where})' if where else ''}",
            *(f"  not      {name}: {reason}" for name, reason in self.refusals.items()),
            f"  mask     R={p.runs}, {self.pairs:,} visible pairs, {self.coverage:.1%} of all",
            *([f"  options  {self.options}"] if self.options != "none" else []),
            f"  forward  {self.flops / 1e9:.3f} GFLOP, backward {2.5 * self.flops / 1e9:.3f}",
        ]
        return "\n".join(lines)
