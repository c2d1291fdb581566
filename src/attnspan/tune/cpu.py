"""The compiled CPU kernel as something that can be tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnspan.kernels import cpu
from attnspan.kernels.tuned import CONFIG_FIELDS, device_name
from attnspan.problem import Problem
from attnspan.tune.cases import Case
from attnspan.tune.target import Bench

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CpuTarget"]

# Configurations differ by rounding alone: that of the dtype, and that of float32 sums, which walks at random.
_UNITS = 4.0
_SUM_ROUNDING = 2.0**-24


class CpuTarget:
    """Calls of the compiled kernel with explicit configurations.

    Args:
        threads: Threads that a call may use; None takes torch's number.

    Raises:
        ValueError: ``ATTNSPAN_ISA`` names a level that the build or the machine lacks.

    Example:
        >>> CpuTarget(threads=1).name
        'cpu'
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        import torch

        self.threads = torch.get_num_threads() if threads is None else threads
        self.isa = cpu.isa()
        self.device = device_name(self.isa)
        self.default: Mapping[str, int] = dict.fromkeys(CONFIG_FIELDS, 0)

    def refuses(self, case: Case) -> str | None:
        """None, or why the kernel cannot run the case.

        Args:
            case: The case.

        Example:
            >>> CpuTarget(threads=1).refuses(Case("forward", "float64", 1, 8, 8, 64, "full"))
            'it takes float32, bfloat16 and float16, not float64'
        """
        return cpu.supports(_problem(case))

    def configs(self, case: Case) -> Sequence[Mapping[str, int]]:
        """The configurations that are worth trying; as many threads as there are is no choice.

        Args:
            case: The case.
        """
        found = cpu.configs(_problem(case), case.direction)
        return [config for config in found if config["threads"] < self.threads]

    def open(self, case: Case) -> Bench:
        """Make the arrays of a case: standard-normal inputs, of one head after the other.

        Args:
            case: The case.

        Example:
            >>> target = CpuTarget(threads=1)
            >>> bench = target.open(Case("forward", "float32", 1, 8, 8, 16, "causal"))
            >>> [tuple(x.shape) for x in bench.make_call(target.default)()]
            [(1, 1, 8, 16)]
        """
        arrays = _Arrays(case, self.threads)
        make_call = arrays.forward if case.direction == "forward" else arrays.backward
        return Bench(make_call, _same_result(case))


def _problem(case: Case) -> Problem:
    heads, dim = case.heads, case.head_dim
    return Problem(1, heads, heads, case.q_len, case.k_len, dim, dim, case.spans.runs, case.dtype, "cpu")


class _Arrays:
    """Inputs and outputs of a case; q, out and their gradients are stored as (B, S, H, D), as models do."""

    def __init__(self, case: Case, threads: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)

        def normal(length: int) -> Tensor:
            shape = (1, length, case.heads, case.head_dim)
            return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)).transpose(1, 2)

        self.q, self.k, self.v = normal(case.q_len), normal(case.k_len), normal(case.k_len)
        self.dout = normal(case.q_len)
        self.out, self.dq = torch.empty_like(self.q), torch.empty_like(self.q)
        self.dk, self.dv = torch.empty_like(self.k), torch.empty_like(self.v)
        self.lse = torch.empty(1, case.heads, case.q_len)
        self.bounds = torch.from_numpy(case.spans.bounds).contiguous()
        self.threads = threads
        self.options = {"scale": case.head_dim**-0.5, "num_threads": threads}
        if case.direction == "backward":  # which needs what forward wrote
            self.forward(dict.fromkeys(CONFIG_FIELDS, 0))()

    def forward(self, config: Mapping[str, int]) -> Callable[[], tuple[Tensor, ...]]:
        explicit = self._explicit(config)

        def call() -> tuple[Tensor, ...]:
            cpu.forward(
                self.q, self.k, self.v, self.bounds, self.out, self.lse, **self.options, config=explicit
            )
            return (self.out,)

        return call

    def backward(self, config: Mapping[str, int]) -> Callable[[], tuple[Tensor, ...]]:
        given = (self.dout, None, self.q, self.k, self.v, self.out, self.lse, self.bounds)
        gradients, explicit = (self.dq, self.dk, self.dv), self._explicit(config)

        def call() -> tuple[Tensor, ...]:
            cpu.backward(*given, *gradients, **self.options, config=explicit)
            return gradients

        return call

    def _explicit(self, config: Mapping[str, int]) -> dict[str, int]:
        """Zeros alone would mean: look into the table of what was tuned before."""
        return {**config, "threads": config["threads"] or self.threads}


def _same_result(case: Case) -> Callable[[Any], str | None]:
    """A check that the results of all calls are those of the first, up to rounding."""
    import torch

    walk = _SUM_ROUNDING * max(case.k_len, case.q_len) ** 0.5
    allowed = _UNITS * (torch.finfo(getattr(torch, case.dtype)).eps + walk)
    first: list[Tensor] = []

    def check(result: tuple[Tensor, ...]) -> str | None:
        if not first:
            first.extend(x.float().clone() for x in result)
        for x, expected in zip(result, first, strict=True):
            difference = float((x.float() - expected).norm() / expected.norm().clamp(min=1e-30))
            if not difference <= allowed:  # a NaN is a difference, too
                return (
                    f"another result than the default's: {difference:.1e} of its norm, allowed {allowed:.1e}"
                )
        return None

    return check
