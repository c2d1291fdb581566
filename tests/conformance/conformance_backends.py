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
from conformance_cases import DTYPES, OPTIONS, Problem

from attnspan.jax.backends.tiles import interpreted
from attnspan.kernels import cpu
from attnspan.torch import attention

Results = dict[str, np.ndarray]


@dataclass
class Backend:
    """A backend of one framework's `attention`.

    Attributes:
        run: Gives results and gradients to every differentiable input, under the oracle's names.
        missing: Why it cannot run at all on this machine; "" where it can.
        unsupported: Reasons by the name of an option that it does not have; it has to refuse those by name.
            A cell that is not declared here has to pass.
        dtypes: Those that it takes.
        masks: How many cells of options under masks run: "all"; "pairs" has each option with each mask, in
            one dtype; "once" has every mask with an option, and every dtype. This is of the long run.
        shapes: The same of options in shapes; with "once" in both, every option is with a mask or a shape.
        programs: Where each option is a program to compile: those that the ordinary run has besides WIDEST.
        few_shapes: How many shapes the ordinary run has there. The kernels of Pallas have their own programs
            and shapes in tests/jax/test_pallas_*.py.
        within: What the backend needs around a call.
        ran: Cells that ran in this process, by option.
    """

    run: Callable[[Problem], Results]
    missing: str = ""
    unsupported: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    masks: str = "all"
    shapes: str = "all"
    programs: tuple[str, ...] = ()
    few_shapes: int = 4
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    ran: Counter[str] = field(default_factory=Counter)

    def takes(self, share: str, option: int, row: int, dtype: str, first: int) -> bool:
        """Whether it runs a cell, by the numbers of its option and of its mask or shape, its dtype.

        `first` is the option that comes with the first row where each comes once.
        """
        if share == "all":
            return dtype in self.dtypes
        turn = option if share == "pairs" else row
        here = share == "pairs" or option == (first + row) % len(OPTIONS)
        return here and self.dtypes[turn % len(self.dtypes)] == dtype


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


NOT_COMPILED = "" if cpu.core is not None else "the compiled module is missing"
NO_HANDLERS = "" if hasattr(cpu.core, "xla_handlers") else "there is no compiled module in this process"

DISTANCES = ("T5", "distance table", "everything", "everything, indices given")
ATOMICS = "it has no biases by distance: the gradient of a table would need atomics"

#: It holds softcap, sinks, dropout and a dense bias.
WIDEST = "everything, dense"
#: With WIDEST these hold all that options consist of, and each shape that a dense bias may have.
PARTS = (
    "none",
    "alibi, signed, per batch row",
    "distance table",
    "everything, indices given",
    "dense, float32",
    "dense, all heads",
    "dense, one for all",
    "dense, per key",
    "dense, per key, one for all",
    "dropout by seeds",
    "alibi, indices given",
)
#: What plain JAX computes by ways of its own; tests/jax/testxla.py and test_math_jax.py have the rest.
OF_JAX = ("none", "distance table", "everything, indices given", "dense, per key, one for all")

#: Programs of plain JAX take a second or more to compile, so those back ends run fewer cells.
BACKENDS = {
    "torch:cpu": Backend(partial(_torch, "cpu"), missing=NOT_COMPILED),
    "torch:math": Backend(partial(_torch, "math")),
    "jax:cpu": Backend(
        partial(conformance_jax.run, "cpu"), missing=NO_HANDLERS, shapes="pairs", programs=PARTS, few_shapes=4
    ),
    "jax:xla": Backend(
        partial(conformance_jax.run, "xla"),
        masks="pairs",
        shapes="once",
        programs=OF_JAX,
        few_shapes=2,
    ),
    "jax:math": Backend(
        partial(conformance_jax.run, "math"),
        masks="pairs",
        shapes="once",
        programs=(*OF_JAX, "dropout by seeds"),
        few_shapes=2,
    ),
    "jax:pallas": Backend(
        partial(conformance_jax.run, "pallas"),
        dtypes=("fp32", "bf16"),
        masks="once",
        shapes="once",
        programs=("alibi, indices given",),
        few_shapes=0,
        within=interpreted,
    ),
    "jax:pallas_gpu": Backend(
        partial(conformance_jax.run, "pallas_gpu"),
        unsupported=dict.fromkeys(DISTANCES, ATOMICS),
        masks="once",
        shapes="once",
        programs=("alibi, indices given", "dense, per key, one for all"),
        few_shapes=0,
        within=interpreted,
    ),
}
