"""Calls of the compiled kernel on problems."""

from __future__ import annotations

import torch
from samples.problems import Case, Problem, check, oracle
from torch import Tensor

from attnspan.call.options import Options
from attnspan.kernels import cpu


def run(
    problem: Problem,
    config: dict[str, int] | None = None,
    backward: dict[str, int] | None = None,
    threads: int = 2,
) -> dict[str, Tensor]:
    """Both directions; without one of its own, backward has the configuration with square blocks.

    Results are NaN before the kernel writes them, and `out` is stored (B, S, H, D).
    """
    case, options = problem.case, problem.options or Options()
    out = torch.full((case.batch, case.q_len, case.heads, case.v_dim), torch.nan, dtype=case.dtype)
    out = out.transpose(1, 2)
    lse = torch.full(problem.dlse.shape, torch.nan, dtype=torch.float64)
    grads = {f"d{name}": torch.full_like(x, torch.nan) for name, x in problem.inputs.items()}
    call = {"scale": case.factor, "num_threads": threads, "options": problem.options}
    cpu.forward(*problem.inputs.values(), problem.bounds, out, lse, **call, config=config)
    if config and backward is None:
        backward = {**config, "block_q": config["block_k"]}
    wanted = {"dbias": options.bias if options.bias_kind else None, "dsinks": options.sinks}
    extra = {n: torch.full(x.shape, torch.nan) for n, x in wanted.items() if x is not None}
    given = (problem.dout, problem.dlse, *problem.inputs.values(), out, lse, problem.bounds)
    cpu.backward(*given, *grads.values(), **call, config=backward, **extra)
    return {"out": out, "lse": lse, **grads, **extra}


def forward(problem: Problem, threads: int = 2, **call: object) -> tuple[Tensor, Tensor]:
    """out and lse."""
    case = problem.case
    shape = (case.batch, case.heads, case.q_len)
    out, lse = torch.full((*shape, case.v_dim), torch.nan, dtype=case.dtype), torch.full(shape, torch.nan)
    call = {"scale": case.factor, "num_threads": threads, "options": problem.options, **call}
    cpu.forward(*problem.inputs.values(), problem.bounds, out, lse, **call)
    return out, lse


def check_run(case: Case, got: dict[str, Tensor]) -> None:
    """Compare with the oracle, within what roundings explain."""
    extra, exponential = 0.0, None
    if case.options:
        # Scores with their biases are up to this large, and exponents have the absolute error of such floats.
        sizes = abs(oracle(case)[0]["lse"])
        extra = 2**-24 * max(1.0, float(sizes[sizes < 1000].max()))
        exponential = 2e-6 if case.dtype == torch.float16 else None
    check(case, got, extra, exponential)
