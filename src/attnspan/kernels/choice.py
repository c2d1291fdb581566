"""The choice of a call's backend, and its explanation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attnspan.backends import Backend, defaults, table
from attnspan.call import Call, Problem
from attnspan.errors import BackendError, OptionError


class SlowPathWarning(UserWarning):
    """Warning that attention runs on a slower backend than its device has."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, and the reasons why each preferred backend does not."""

    name: str
    refusals: dict[str, str]  # name -> reason


def choose(problem: Problem, framework: str, requested: str | None = None, *facts: Any) -> Choice:
    """Choose the backend that runs a problem.

    Args:
        problem: The problem to compute.
        framework: "torch" or "jax".
        requested: Name of the backend to use. None uses the first default backend of the problem's device
            that supports the problem.
        *facts: Further arguments of ``supports``.

    Raises:
        OptionError: If no backend has the name ``requested``.
        BackendError: If the requested backend, or every default backend, does not support the problem.

    Example:
        >>> import attnspan.torch
        >>> choose(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float64", "cpu"), "torch").name
        'math'
    """
    backends = table(framework)
    if requested is not None and requested not in backends:
        names, remedy = ", ".join(backends), "Leave out backend=, or the block of attnspan.backend"
        raise OptionError("backend", expected=f"None or one of {names}", got=repr(requested), remedy=remedy)
    refusals: dict[str, str] = {}
    for name in defaults(framework, problem.device) if requested is None else (requested,):
        backend = backends[name]
        reason = backend.supports(problem, *facts)
        if reason is None and requested is None and backend.limit is not None:
            reason = backend.limit(problem)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    raise BackendError(
        f"backend={requested!r}",
        expected="a backend that can run the call",
        got="; ".join(f"{name}: {reason}" for name, reason in refusals.items()),
        remedy="Change what the reason names, or choose another by backend= or attnspan.backend",
    )


@dataclass(frozen=True)
class Explanation:
    """Result of ``explain``. You can ``print`` it.

    Attributes:
        backend: Name of the backend that runs the call.
        refusals: The reason for every other backend, by name, why it does not run the call.
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
            name: (x.supports if asked else x.against)(call.problem, *facts) or other
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
