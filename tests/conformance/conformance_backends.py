"""The backends under test: how each runs a cell, and what it declares that it does not support."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from conformance_cases import Problem

from attnspan.kernels import cpu
from attnspan.torch import attention


@dataclass
class Backend:
    """A backend of `attnspan.torch.attention`.

    Attributes:
        name: As `attention` takes it.
        missing: Why it cannot run at all on this machine; "" where it can.
        unsupported: Reasons by the name of an option that it does not have. A cell that is not declared
            here has to pass.
        ran: Cells that ran in this process, by option.
    """

    name: str
    missing: str = ""
    unsupported: dict[str, str] = field(default_factory=dict)
    ran: Counter[str] = field(default_factory=Counter)

    def refusal(self, option: str) -> str:
        return self.missing or self.unsupported.get(option, "")

    def run(self, problem: Problem) -> dict[str, np.ndarray]:
        """Results and gradients to every differentiable input, under the oracle's names."""
        inputs = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
        parameters = {n: x.detach().clone().requires_grad_() for n, x in problem.setting.parameters.items()}
        out, lse = attention(
            *inputs.values(), **problem.keywords(parameters), return_lse=True, backend=self.name
        )
        dlse = torch.where(lse.isfinite(), problem.dlse, 0.0)
        leaves = {**inputs, **parameters}
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), [problem.dout, dlse])
        for gradient, leaf in zip(gradients, leaves.values(), strict=True):
            assert gradient.dtype == leaf.dtype
        assert out.dtype == problem.cell.dtype
        assert lse.dtype == torch.float32
        named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
        return {n: x.detach().double().numpy() for n, x in {"out": out, "lse": lse, **named}.items()}


#: The kernel declares nothing: it has every option.
BACKENDS = {
    "cpu": Backend("cpu", missing="" if cpu.compiled() is not None else "the compiled module is missing"),
    "math": Backend("math"),
}
