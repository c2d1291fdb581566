"""Reference of a step: its jaxpr in float64, differentiated without the user's rules for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.jax.interpret import OPAQUE, Interpreter, bind, equations, inner
from attnspan_lab.doctor.jax.subject import FAST, Traced, replaced, wide
from attnspan_lab.doctor.jax.values import is_float

__all__ = [
    "Outcome",
    "attends",
    "difference",
    "differences",
    "differentiable",
    "objective",
    "outcome",
    "reference",
]

_OPAQUE = (*OPAQUE, "shard_map")
# Their parameters have a jaxpr of one dtype.
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}
_NARROW = ("bitcast_convert_type", "custom_jvp_call", "custom_vjp_call", *_OPAQUE)


@dataclass(frozen=True)
class Outcome:
    """Floating-point results and gradients of a step, as float64."""

    results: list[np.ndarray]
    gradients: list[np.ndarray]


def attends(eqn: Any) -> bool:
    """Whether an equation calls a function with its own derivative that writes out attention."""
    names = {x.primitive.name for j in inner(eqn) for x in equations(j)}
    own = eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call")
    return own and {"dot_general", "exp"} <= names and not names & set(_OPAQUE)


class _Reference(Interpreter):
    """Evaluates a jaxpr in float64, or in its own dtypes.

    Args:
        wide: Compute in float64.
        keep: Whether to keep a derivative that the user wrote. Other rules, such as relu's, are always kept.
    """

    def __init__(self, wide: bool, keep: Callable[[Any], bool]) -> None:
        super().__init__()
        self.wide, self.keep = wide, keep

    def value(self, array: Any, sources: Sequence[Any] = ()) -> Any:
        del sources
        if not self.wide or not is_float(array):
            return array
        # JAX would compile the conversion for each shape.
        concrete = not isinstance(array, jax.core.Tracer)
        return jnp.asarray(np.asarray(array, np.float64)) if concrete else array.astype(jnp.float64)

    def call(self, eqn: Any, values: list[Any]) -> list[Any]:
        own = eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call")
        entered = not own or (attends(eqn) and not self.keep(eqn))
        return super().call(eqn, values) if entered else self.apply(eqn, values)

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if not self.wide:
            return bind(eqn, values)
        if name == "reduce_precision":
            return values
        if name in _SCATTERS:
            kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [_SCATTERS[name](*values, **{x: eqn.params[x] for x in kept})]
        if name not in _NARROW:
            params = {k: jnp.float64 if _is_float_type(v) else v for k, v in eqn.params.items()}
            try:
                return bind(eqn.replace(params=params), values)
            except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
                pass  # The operator has no float64 version, or a part of it has other dtypes.
        narrow = [
            x.astype(v.aval.dtype) if is_float(x) else x for x, v in zip(values, eqn.invars, strict=True)
        ]
        return [self.value(x) for x in bind(eqn, narrow)]


def _is_float_type(value: Any) -> bool:
    return isinstance(value, (np.dtype, type)) and bool(jnp.issubdtype(value, jnp.floating))


def objective(results: Sequence[Any]) -> Any:
    """Weigh all floating-point results to one number."""
    return sum(
        (x * np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype)).sum() for x in results if is_float(x)
    )


def differentiable(traced: Traced) -> list[int]:
    """List the leaves whose gradients are compared: of the variables, or else of the batch."""
    chosen = range(traced.variables) if traced.variables else range(len(traced.leaves))
    return [i for i in chosen if is_float(jnp.asarray(traced.leaves[i]))]


def _outcome(
    traced: Traced,
    run: Callable[[list[Any]], Any],
    leaves: list[Any],
    options: dict[str, Any] | None = None,
    gradients: bool = True,
) -> Outcome:
    """Run the step and its gradients in one program, or one operator after the other if it has loops."""
    chosen = differentiable(traced) if gradients else []

    def loss(own: list[Any]) -> Any:
        results = run(replaced(leaves, chosen, own))
        return objective(results), [x for x in results if is_float(x)]

    whole = jax.value_and_grad(loss, has_aux=True) if chosen else lambda own: (loss(own), [])
    own = [leaves[i] for i in chosen]
    try:
        (_, results), slopes = jax.jit(whole, compiler_options=options)(own)
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        (_, results), slopes = whole(own)
    return Outcome(wide(results), wide(slopes))


def outcome(traced: Traced, *, gradients: bool = True) -> Outcome:
    """Run the compiled step and its gradients."""
    return _outcome(traced, lambda leaves: traced.run(*leaves), traced.leaves, gradients=gradients)


def reference(
    traced: Traced,
    *,
    wide: bool = True,
    keep: Callable[[Any], bool] = lambda _: False,
    gradients: bool = True,
) -> Outcome:
    """Run the step's jaxpr without a compiler, in float64 or in its own dtypes."""
    with jax.enable_x64(wide):
        made = _Reference(wide, keep)
        leaves = [made.value(x) for x in traced.typed]
        return _outcome(traced, lambda given: made.enter(traced.closed, given), leaves, FAST, gradients)


def differences(found: Outcome, want: Outcome) -> tuple[float, float]:
    """Relative errors of results and gradients, the largest of all arrays."""
    return difference(found.results, want.results), difference(found.gradients, want.gradients)


def difference(found: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Relative error of arrays, the largest of all. Arrays of tiny norm count by the largest norm."""
    norms = [float(np.linalg.norm(x)) for x in want]
    floor = 1e-3 * max(norms, default=0.0) + 1e-30
    pairs = zip(found, want, norms, strict=True)
    return max((float(np.linalg.norm(x - y)) / max(n, floor) for x, y, n in pairs), default=0.0)
