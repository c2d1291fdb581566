"""Work of a compiled function whose results nobody gets. Compilers delete such work."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from attnspan_lab.doctor.timing.body import Body

_LEAST = 0.05  # Smallest share of deleted work that counts.


def unused(body: Body) -> Iterator[tuple[str, float]]:
    """Yield each compiled function that a region calls, with the share of its products that is not used."""
    for function, arguments, options in body.calls():
        if "jax" in sys.modules and hasattr(function, "trace") and hasattr(function, "lower"):
            share = _of_jax(function, arguments, options)
        elif hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
            share = _of_torch(function, arguments, options)
        else:
            continue
        if share > _LEAST:
            yield getattr(function, "__name__", type(function).__name__), share


def _of_jax(function: Any, arguments: list[Any], options: dict[str, Any]) -> float:
    try:
        jaxpr = function.trace(*arguments, **options).jaxpr.jaxpr
    except Exception:  # Donated arrays are gone, for example.
        return 0.0
    all_, used = _products(jaxpr, [True] * len(jaxpr.outvars))
    return 1 - used / all_ if all_ else 0.0


def _products(jaxpr: Any, wanted: list[bool]) -> tuple[float, float]:
    """Count the work of all products and foreign calls of a jaxpr, and of those whose results are used."""
    live = {id(x) for x, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
    total = used = 0.0
    for eqn in reversed(jaxpr.eqns):
        results = [id(x) in live for x in eqn.outvars]
        is_used = any(results) or bool(eqn.effects)
        inner = [
            x for x in eqn.params.values() if hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
        ]
        work = reached = 0.0
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            work = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
            reached = work if is_used else 0.0
        elif eqn.primitive.name == "ffi_call":
            work = float(sum(math.prod(x.aval.shape) for x in eqn.invars))
            reached = work if is_used else 0.0
        for one in inner:
            one = getattr(one, "jaxpr", one)
            same = eqn.primitive.name in ("pjit", "jit") and len(one.outvars) == len(results)
            more, some = _products(one, results if same else [is_used] * len(one.outvars))
            work, reached = work + more, reached + (some if is_used else 0.0)
        total, used = total + work, used + reached
        if is_used:
            live |= {id(x) for x in eqn.invars}
    return total, used


def _of_torch(function: Any, arguments: list[Any], options: dict[str, Any]) -> float:
    """Return 1 if the function returns no tensor, and changes none of its arguments and parameters."""
    import torch
    from torch.utils._pytree import tree_leaves

    given = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
    given += list(function.parameters()) if isinstance(function, torch.nn.Module) else []

    def state() -> list[tuple[int, int]]:
        return [(x._version, -1 if x.grad is None else x.grad._version) for x in given]

    before = state()
    result = function(*arguments, **options)
    returns = any(isinstance(x, torch.Tensor) for x in tree_leaves(result))
    return 0.0 if returns or state() != before else 1.0
