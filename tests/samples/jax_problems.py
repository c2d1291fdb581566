"""The problems of tests/samples/problems.py as backends of JAX take them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from attnspan.call.dropout import dropout_seeds
from attnspan.call.options import Options
from attnspan.jax.part import JaxPart
from samples.problems import Problem


def to_jax(x: Any) -> Any:
    """A torch tensor as a JAX array of the same bits; 64-bit integers, which JAX may lack, as int32."""
    if not isinstance(x, Tensor):
        return x
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.contiguous().view(torch.int16).numpy()).view(jnp.bfloat16)
    return jnp.asarray(x.to(torch.int32).numpy() if x.dtype == torch.int64 else x.numpy())


def seed_to_jax(seed: Tensor) -> Any:
    """A seed as JAX takes it; those of rows and heads, which need 64 bits, as two words each."""
    if seed.ndim == 0:
        return to_jax(seed)
    words = torch.stack([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], -1)
    return jnp.asarray(words.numpy().astype(np.uint32))


def cotangents_of(problem: Problem) -> tuple[Any, Any]:
    """dout and dlse."""
    wide = torch.float64 if problem.case.dtype == torch.float64 else torch.float32
    return to_jax(problem.dout), to_jax(problem.dlse.to(wide))


def part_of(problem: Problem) -> JaxPart:
    """All other arrays and numbers; each batch row and head with its own seed."""
    case, options = problem.case, problem.options or Options()
    seeds = options.dropout_seed
    if seeds is not None:
        seeds = seeds if seeds.ndim else torch.tensor(dropout_seeds(seeds.numpy(), case.batch, case.heads))
        seeds = seed_to_jax(seeds)
    options = Options(*map(to_jax, options))._replace(dropout_seed=seeds)
    return JaxPart(*map(to_jax, (*problem.inputs.values(), problem.bounds)), case.factor, *options)
