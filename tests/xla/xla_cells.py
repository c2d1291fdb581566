"""Cells of the conformance suite on XLA tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch_xla
from samples import problems
from samples.parts import Case
from samples.problems import Problem, make
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnspan.xla import attention

#: Relative error of an exponential in float32.
EXPONENTIAL = 1.2e-7


def on_xla(x: Any) -> Any:
    """A structure whose tensors are on the XLA device."""
    device = torch_xla.device()
    return tree_map_only(Tensor, lambda leaf: leaf.detach().to(device), x)


def run(problem: Problem, places: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Results and gradients of one call, under the oracle's names."""
    inputs = {name: on_xla(x).requires_grad_() for name, x in problem.inputs.items()}
    parameters = {name: on_xla(x).requires_grad_() for name, x in problem.setting.parameters.items()}
    keywords = problem.keywords(parameters)
    others = {name: on_xla(keywords[name]) for name in keywords if name not in ("bias", "sinks")}
    out, lse = attention(*inputs.values(), **{**keywords, **others}, return_lse=True, **(places or {}))
    dlse = torch.where(lse.isfinite(), on_xla(problem.dlse), 0.0)
    leaves = {**inputs, **parameters}
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [on_xla(problem.dout), dlse])
    for gradient, leaf in zip(gradients, leaves.values(), strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.shape == leaf.shape
    assert out.dtype == problem.case.dtype
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    results = {"out": out, "lse": lse, **named}
    torch_xla.sync()
    return {name: x.detach().cpu().double().numpy() for name, x in results.items()}


def check(case: Case, places: Mapping[str, Any] | None = None) -> None:
    """Compare a problem with the oracle, within what roundings explain."""
    problem = make(case)
    got = run(problem, places)
    assert got.keys() == {"out", "lse", "dq", "dk", "dv", *(f"d{x}" for x in problem.setting.parameters)}
    problems.check(case, got, exponential=EXPONENTIAL)
