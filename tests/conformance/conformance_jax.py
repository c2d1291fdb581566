"""How a back end of JAX runs a cell: compiled, with all arrays as arguments, so that cells share programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from samples.jax_problems import seed_to_jax, to_jax
from samples.problems import Problem
from torch.utils._pytree import tree_map
from which_ran import counted

import attnspan as a
from attnspan.jax import attention

Arrays = dict[str, Any]

#: Keywords that are arrays without a gradient.
ARRAYS = {"dropout_seed", "q_index", "k_index"}

RUNS = 5  # the most of a mask of the suite


def run(name: str, problem: Problem) -> dict[str, np.ndarray]:
    """Results and gradients to every differentiable input, under the oracle's names."""
    leaves = {**problem.inputs, **problem.setting.parameters}
    built = problem.setting.build(problem.setting.parameters)
    arrays = {n: (seed_to_jax if n == "dropout_seed" else to_jax)(built[n]) for n in ARRAYS & built.keys()}
    given = {n: to_jax(x) for n, x in leaves.items()}
    call = _program(name, problem)
    with counted("jax") as runs:
        out, lse, gradients = call(given, _mask(problem), arrays, to_jax(problem.dout), to_jax(problem.dlse))
        # A program counts the functions that are traced, so one that is compiled already counts none.
        assert set(runs) == {name} or (not runs and call in _ran), "another backend ran"
    _ran.add(call)
    for n, gradient in gradients.items():
        assert gradient.dtype == given[n].dtype
    assert out.dtype == given["q"].dtype
    assert lse.dtype == jnp.float32
    results = {"out": out, "lse": lse, **{f"d{n}": gradients[n] for n in leaves}}
    return {n: np.asarray(x).astype(np.float64) for n, x in results.items()}


_programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
#: Programs whose backend was counted.
_ran: set[Callable[..., Any]] = set()


def _program(name: str, problem: Problem) -> Callable[..., Any]:
    """The call of one option, shape and dtype; the first problem of the kind says what is no array."""
    key = (name, replace(problem.case, mask=""), problem.case.mask if not problem.case.options else "")
    if key not in _programs:
        _programs[key] = jax.jit(partial(_differentiated, name, problem))
    return _programs[key]


def _differentiated(
    name: str, problem: Problem, leaves: Arrays, mask: Any, arrays: Arrays, dout: Any, dlse: Any
) -> Any:
    def call(leaves: Arrays) -> Any:
        keywords = {**problem.setting.build(leaves), **arrays}
        q, k, v = (leaves[n] for n in ("q", "k", "v"))
        return attention(
            q, k, v, mask=mask, scale=problem.case.factor, return_lse=True, backend=name, **keywords
        )

    (out, lse), transposed = jax.vjp(call, leaves)
    (gradients,) = transposed((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))
    return out, lse, gradients


def _mask(problem: Problem) -> a.Mask:
    """The mask as callers have it where there is no option, else its spans, in one shape for all."""
    case, bounds = problem.case, problem.bounds.numpy()
    if not case.options or case.mask == "random":
        return tree_map(to_jax, problem.mask)  # type: ignore[no-any-return]
    wide = np.zeros((case.batch, case.heads, case.q_len, RUNS, 2), np.int32)
    wide[..., : bounds.shape[3], :] = bounds
    given = problem.options.q_index
    rows = np.arange(case.k_len - case.q_len, case.k_len)[None] if given is None else given.numpy()
    rows = np.broadcast_to(rows, (case.batch, case.q_len))
    return a.Prepared(a.Spans(jnp.asarray(wide), case.k_len), jnp.asarray(rows, jnp.int32))
