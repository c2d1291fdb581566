"""Kernels, one file each, and the choice between backends.

A kernel is a module with ``supports(problem) -> None | reason``, a forward and a backward function. Kernels
never import each other. `choose` picks one of a framework's backends, which `attnspan.backends` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attnspan.backends import Backend
from attnspan.call import Call, Problem
from attnspan.errors import BackendError, OptionError

__all__ = ["FIRST_TRITON", "Choice", "Explanation", "SlowPathWarning", "choose"]


#: The first version of Triton that has the features that attnspan's kernels and torch's compiler need.
FIRST_TRITON = "3.6"


class SlowPathWarning(UserWarning):
    """Warning that attention runs on a slower backend than its device has."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, and the reasons why each preferred backend does not."""

    name: str
    refusals: dict[str, str]  # name -> reason


def choose(
    problem: Problem, backends: Mapping[str, Backend], requested: str | None = None, *facts: Any
) -> Choice:
    """Choose the backend that runs a problem.

    Args:
        problem: The problem to compute.
        backends: Candidates by name, the preferred one first.
        requested: Name of the backend to use. None uses the first default backend of the problem's device
            that supports the problem.
        *facts: Further arguments of ``supports``.

    Raises:
        OptionError: If ``requested`` is not a candidate.
        BackendError: If the requested backend, or every default backend, does not support the problem.

    Example:
        >>> import attnspan.torch
        >>> from attnspan.backends import table
        >>> choose(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float64", "cpu"), table("torch")).name
        'math'
    """
    if requested is not None and requested not in backends:
        names, remedy = ", ".join(backends), "Leave out backend=, or the block of attnspan.backend"
        raise OptionError("backend", expected=f"None or one of {names}", got=repr(requested), remedy=remedy)
    refusals: dict[str, str] = {}
    for name, backend in backends.items():
        if requested is None and backend.runs_by_default_on(problem.device):
            reason = backend.against(problem, *facts)
        elif requested == name:
            reason = backend.supports(problem, *facts)
        else:
            continue
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
        isa = import_module(".cpu", __name__).isa() if chosen == "cpu" else None
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
