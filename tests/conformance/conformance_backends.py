"""The backends under test: how each runs a problem, its options and dtypes, what it declares unsupported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import conformance_jax
import numpy as np
import quick_triton  # noqa: F401
import torch
from eager_flex import eager
from samples.problems import DTYPES, Problem
from samples.torch_calls import counted_kernel_calls
from which_ran import counted

from attnspan.experimental import triton
from attnspan.jax.backends.tiles import interpreted
from attnspan.kernels import cpu
from attnspan.torch import attention

Results = dict[str, np.ndarray]

#: It holds softcap, sinks, dropout and a dense bias.
WIDEST = "everything, dense"


@dataclass
class Backend:
    """A backend of one framework's `attention`.

    Attributes:
        run: Gives results and gradients to every differentiable input, under the oracle's names.
        missing: Why it cannot run at all on this machine; "" where it can.
        unsupported: Reasons by the name of an option that it does not have; it has to refuse those by name.
            A cell that is not declared here has to pass.
        dtypes: Those that it takes.
        programs: Where each option is a program to compile: those that the ordinary run has besides `widest`.
        widest: The one that meets every mask.
        shapes: How many shapes the ordinary run has there. The kernels of Pallas have their own programs
            and shapes in tests/jax/test_backends.py.
        long: How many factors at a time the long run covers: of option, mask and dtype; of option, shape and
            dtype.
        within: What the backend needs around a call.
        ran: Cells that ran in this process, by option.
    """

    run: Callable[[Problem], Results]
    missing: str = ""
    unsupported: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    programs: tuple[str, ...] = ()
    widest: str = WIDEST
    shapes: int = 4
    long: tuple[int, int] = (3, 3)
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    ran: Counter[str] = field(default_factory=Counter)


def _torch(name: str, problem: Problem) -> Results:
    inputs = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    parameters = {n: x.detach().clone().requires_grad_() for n, x in problem.setting.parameters.items()}
    keywords, leaves = problem.keywords(parameters), {**inputs, **parameters}
    with counted_kernel_calls() as in_the_module, counted("torch") as runs:
        out, lse = attention(*inputs.values(), **keywords, return_lse=True, backend=name)
        dlse = torch.where(lse.isfinite(), problem.dlse, 0.0)
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), [problem.dout, dlse])
        assert set(runs) == {name} - {"cpu"}, "another backend ran"
    assert bool(in_the_module) == (name == "cpu" and lse.numel() > 0), "another backend ran"
    for gradient, leaf in zip(gradients, leaves.values(), strict=True):
        assert gradient.dtype == leaf.dtype
    assert out.dtype == problem.case.dtype
    assert lse.dtype == torch.float32
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {n: x.detach().double().numpy() for n, x in {"out": out, "lse": lse, **named}.items()}


NOT_COMPILED = "" if cpu.core is not None else "the compiled module is missing"
NO_HANDLERS = "" if hasattr(cpu.core, "xla_handlers") else "there is no compiled module in this process"


#: With WIDEST these hold all that options consist of, and each shape that a dense bias may have.
PARTS = (
    *("none", "alibi, signed, per batch row", "distance table", "everything, indices given"),
    *("dense, per head, float32", "dense, all heads", "dense, one for all", "dense, per key"),
    *("dense, per key, one for all", "dropout by seeds", "alibi, indices given"),
)
#: What plain JAX computes by ways of its own; tests/jax/test_backends.py has the rest.
OF_JAX = ("none", "distance table", "everything, indices given", "dense, per key, one for all")

#: Programs of JAX take a second or more to compile, so those back ends run fewer cells.
BACKENDS = {
    "torch:cpu": Backend(partial(_torch, "cpu"), missing=NOT_COMPILED),
    "torch:math": Backend(partial(_torch, "math")),
    # Dropout is three calls of FlexAttention, of the same mask.
    "torch:flex": Backend(partial(_torch, "flex"), programs=(WIDEST, *PARTS), widest="dense", within=eager),
    "torch:triton": Backend(
        partial(_torch, "triton"), programs=PARTS, shapes=4, long=(3, 3), within=triton.interpreted
    ),
    "jax:cpu": Backend(
        partial(conformance_jax.run, "cpu"), missing=NO_HANDLERS, programs=PARTS, shapes=4, long=(3, 2)
    ),
    "jax:xla": Backend(partial(conformance_jax.run, "xla"), programs=OF_JAX, shapes=2, long=(2, 1)),
    "jax:math": Backend(
        partial(conformance_jax.run, "math"), programs=(*OF_JAX, "dropout by seeds"), shapes=2, long=(2, 1)
    ),
    "jax:pallas": Backend(
        partial(conformance_jax.run, "pallas"),
        dtypes=("fp32", "bf16"),
        programs=("alibi, indices given",),
        shapes=0,
        long=(1, 1),
        within=interpreted,
    ),
}
