"""The backends under test: how each runs a cell, which cells, and what it declares unsupported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import conformance_jax
import numpy as np
import torch
from conformance_cases import Problem
from jax.experimental.pallas import tpu as pltpu

from attnspan.kernels import cpu
from attnspan.torch import attention

Results = dict[str, np.ndarray]


@dataclass
class Backend:
    """A backend of one framework's `attention`.

    Attributes:
        run: Gives results and gradients to every differentiable input, under the oracle's names.
        missing: Why it cannot run at all on this machine; "" where it can.
        unsupported: Reasons by the name of an option that it does not have. A cell that is not declared
            here has to pass.
        share: "all" cells; "pairs" has each option with each mask and with each dtype, each mask with each
            dtype; "each" has every option, mask, shape and dtype somewhere.
        within: What the backend needs around a call.
        ran: Cells that ran in this process, by option.
    """

    run: Callable[[Problem], Results]
    missing: str = ""
    unsupported: dict[str, str] = field(default_factory=dict)
    share: str = "all"
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    ran: Counter[str] = field(default_factory=Counter)

    def refusal(self, option: str) -> str:
        return self.missing or self.unsupported.get(option, "")

    def takes(self, option: int, row: int, dtype: int, rows: int) -> bool:
        """Whether it runs a cell, by the numbers of its option, its mask or shape among `rows`, its dtype."""
        pair = (option + row) % 3 == dtype
        return self.share == "all" or (pair and (self.share == "pairs" or option % rows == row))


def _torch(name: str, problem: Problem) -> Results:
    inputs = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    parameters = {n: x.detach().clone().requires_grad_() for n, x in problem.setting.parameters.items()}
    out, lse = attention(*inputs.values(), **problem.keywords(parameters), return_lse=True, backend=name)
    dlse = torch.where(lse.isfinite(), problem.dlse, 0.0)
    leaves = {**inputs, **parameters}
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [problem.dout, dlse])
    for gradient, leaf in zip(gradients, leaves.values(), strict=True):
        assert gradient.dtype == leaf.dtype
    assert out.dtype == problem.cell.dtype
    assert lse.dtype == torch.float32
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {n: x.detach().double().numpy() for n, x in {"out": out, "lse": lse, **named}.items()}


NOT_COMPILED = "" if cpu.compiled() is not None else "the compiled module is missing"
NO_HANDLERS = "" if hasattr(cpu.compiled(), "xla_handlers") else "there is no compiled module in this process"

#: None declares anything: each has every option.
BACKENDS = {
    "torch:cpu": Backend(partial(_torch, "cpu"), missing=NOT_COMPILED),
    "torch:math": Backend(partial(_torch, "math")),
    "jax:ffi": Backend(partial(conformance_jax.run, "ffi"), missing=NO_HANDLERS),
    "jax:xla": Backend(partial(conformance_jax.run, "xla"), share="pairs"),
    "jax:math": Backend(partial(conformance_jax.run, "math"), share="pairs"),
    "jax:pallas": Backend(
        partial(conformance_jax.run, "pallas"), share="each", within=pltpu.force_tpu_interpret_mode
    ),
}
