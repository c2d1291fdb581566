"""The compiled CPU kernel as a backend that can be tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnspan.call import Problem
from attnspan.kernels import cpu
from attnspan.kernels.tuned import device_name
from attnspan.tools.tune.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CpuBackend", "CpuConfig"]


@dataclass(frozen=True)
class CpuConfig:
    """Rows and keys of a block, and the most threads; 0 is the kernel's own choice."""

    block_q: int = 0
    block_k: int = 0
    threads: int = 0


class CpuBackend:
    """Calls of the compiled kernel, on as many threads as torch uses."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.threads = torch.get_num_threads()
        self.isa = cpu.isa()
        self.device = device_name(self.isa)

    def open(self, case: Case) -> dict[str, Any]:
        """Standard-normal inputs; q, k, v and gradients are stored as (B, S, H, D), as models do.

        Raises:
            ValueError: The kernel cannot run the case.
        """
        import torch

        sizes = (case.heads, case.heads, case.q_len, case.k_len, case.head_dim, case.head_dim)
        problem = Problem(1, *sizes, 1, case.dtype, "cpu")
        reason = cpu.supports(problem)
        if reason is not None:
            raise ValueError(reason)
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
        shapes = [(1, length, case.heads, case.head_dim) for length in (case.q_len, case.k_len)]
        q, k, v, dout = (
            torch.randn(shapes[i], generator=generator).to(dtype).transpose(1, 2) for i in (0, 1, 1, 0)
        )
        out, grads = torch.empty_like(q), tuple(torch.empty_like(x) for x in (q, k, v))
        lse = torch.empty(1, case.heads, case.q_len)
        bounds = torch.tensor(case.mask.spans(case.q_len, case.k_len).bounds)
        scale = case.head_dim**-0.5

        def make_call(config: CpuConfig) -> Callable[[], tuple[Tensor, ...]]:
            # The core does not look into its table if there is a configuration, even one of zeros.
            options = {"scale": scale, "num_threads": self.threads, "config": asdict(config)}

            def call() -> tuple[Tensor, ...]:
                if case.direction == "forward":
                    cpu.forward(q, k, v, bounds, out, lse, **options)
                    return (out,)
                cpu.backward(dout, None, q, k, v, out, lse, bounds, *grads, **options)
                return grads

            return call

        cpu.forward(q, k, v, bounds, out, lse, scale=scale, num_threads=self.threads)  # Backward reads it.
        rounding = torch.finfo(dtype).eps + 2.0**-24 * case.k_len**0.5  # of the dtype and of float32 sums
        expected = [x.float().clone() for x in make_call(CpuConfig())()]
        found = [CpuConfig(**config) for config in cpu.configs(problem, case.direction)]
        return {
            "make_call": make_call,
            "configs": [config for config in found if config.threads < self.threads],
            "default": CpuConfig(),
            "check": partial(_check, expected, 4 * rounding),
        }


def _check(expected: list[Tensor], allowed: float, result: tuple[Tensor, ...]) -> None:
    for x, y in zip(result, expected, strict=True):
        difference = float((x.float() - y).norm() / y.norm().clamp(min=1e-30))
        if not difference <= allowed:  # also NaN
            raise ValueError(f"result differs from the default's by {difference:.1e} of its norm")
