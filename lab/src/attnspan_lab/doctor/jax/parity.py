"""Comparison of a compiled step's results and gradients with float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from attnspan_lab.doctor.jax.float64_reference import (
    Outcome,
    attends,
    difference,
    differences,
    differentiable,
    objective,
    outcome,
    reference,
)
from attnspan_lab.doctor.jax.hidden_queries import nan_origin
from attnspan_lab.doctor.jax.interpret import equations, is_own, places_of
from attnspan_lab.doctor.jax.subject import Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, bad, is_float
from attnspan_lab.doctor.jax.watch import Watcher, watched
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import first_line

__all__ = ["parity"]

# A step may have this many times the error of the same operators in its own dtypes.
_FACTOR, _FLOOR = 16.0, 128


def parity(traced: Traced, say: Callable[..., None]) -> None:
    """Compare results and gradients of the compiled step with float64."""
    # JAX differentiates no such loop backwards, for example in a function that generates tokens.
    loops = any(x.primitive.name == "while" for x in equations(traced.closed))
    try:
        found = _outcome(traced, loops, say)
    except Exception as error:
        say(
            facts={
                "unchecked": {"results and gradients": f"the compiled step raises {first_line(error, 200)}"}
            }
        )
        return
    if any(bad(x)[0] for x in found.results):
        say(facts={"unchecked": {"results and gradients": "the step returns NaN"}})
        return  # The stage "eager" reports it.
    if any(bad(x)[0] for x in found.gradients):
        say(finding=_backward_nan(traced))
        return
    try:
        exact = reference(traced, gradients=bool(found.gradients))
    except Exception as error:
        say(facts={"unchecked": {"results and gradients": f"float64: {type(error).__name__}: {error}"[:200]}})
        return
    mine = differences(found, exact)
    if not all(x == x for x in mine):
        say(facts={"unchecked": {"results and gradients": "the step returns NaN in float64"}})
        return
    errors = [*mine][: 1 + bool(exact.gradients)]
    facts: dict[str, Any] = {"backend": "jax.jit", "against": "float64", "errors": errors}
    facts["checked"] = {
        n: f"compared with float64: they differ by {x:.1e} (relative error)"
        for n, x in zip(("results", "gradients"), errors, strict=False)
    }
    if not exact.gradients and not differentiable(traced):
        facts["unchecked"] = {"gradients": "the step has no floating-point argument"}
    floats = [x for x in (*traced.leaves, *_results(traced)) if is_float(x)]
    eps = max(float(jnp.finfo(x.dtype).eps) for x in floats)  # type: ignore[no-untyped-call]
    if not max(mine) <= _FLOOR * eps:
        theirs = differences(reference(traced, wide=False, gradients=bool(exact.gradients)), exact)
        facts["eager errors"] = [*theirs]
        names = zip(("Results", "Gradients"), mine, theirs, strict=True)
        wrong = [(n, x, y) for n, x, y in names if not x <= _FACTOR * y + _FLOOR * eps]
        for name, own, like in wrong[:1]:
            what = f"{name} differ from float64 by {own:.1e} (relative error)"
            evidence = (f"without the compiler and your own derivatives: {like:.1e}",)
            places = _rules(traced, exact.gradients, eps) if name == "Gradients" else []
            places, cause, remedy = _blamed(traced, places)
            say(finding=finding("parity", what, places, evidence=evidence, cause=cause, remedy=remedy))
    say(facts=facts)


def _outcome(traced: Traced, loops: bool, say: Callable[..., None]) -> Outcome:
    """Run the compiled step, with gradients if JAX has them."""
    try:
        return outcome(traced)
    except Exception as error:
        if not loops or "while_loop" not in str(error):
            why = f"the step cannot be differentiated: {first_line(error, 200)}"
            say(facts={"unchecked": {"gradients": why}})
    return outcome(traced, gradients=False)


def _blamed(traced: Traced, rules: list[Place]) -> tuple[list[Place], str, str]:
    """Find the line, the cause and the remedy of a difference, given the lines of the user's derivatives."""
    if not rules:
        said = "The compiled step rounds more than the same operators one by one"
        return [], said, "Compute sums and softmax in float32"
    wrong = next(iter(watched(traced, None)[0].sums.found.values()), None)
    if wrong is None:
        return (
            rules,
            "The backward rule is not the derivative of the forward function: one of the two is wrong",
            "",
        )
    places = [*wrong.places[:1], *rules]
    cause = "The forward function is wrong at this line: its softmax weights do not add up to 1"
    return (
        places,
        cause,
        f"Correct the forward function first. The backward rule may be right. {wrong.remedy}",
    )


def _results(traced: Traced) -> list[Any]:
    return [x for x in jax.tree.leaves(traced.shapes) if jnp.issubdtype(x.dtype, jnp.floating)]


def _rules(traced: Traced, exact: list[Any], eps: float) -> list[Place]:
    """Find the user's derivatives that differ from the exact one: the line of the rule, and of the call."""
    found = []
    for eqn in equations(traced.closed):
        if not attends(eqn):
            continue
        own = reference(traced, keep=lambda x, eqn=eqn: x is eqn).gradients  # type: ignore[misc]
        if not difference(own, exact) <= _FLOOR * eps:
            rule = eqn.params.get("bwd", eqn.params.get("jvp_jaxpr_fun"))
            source = re.search(r"(\S+) at (.+):(\d+)$", str(getattr(rule, "debug_info", rule).func_src_info))
            place = [Place(source[2], int(source[3]), source[1])] if source and is_own(source[2]) else []
            found += [*place, *places_of(eqn)[:1]]
    return found


def _backward_nan(traced: Traced) -> Any:
    """Watch the backward pass, and find where its NaN comes from."""
    chosen = [i for i, x in enumerate(traced.leaves) if is_float(jnp.asarray(x))]

    def loss(*own: Any) -> Any:
        given = list(traced.leaves)
        for i, x in zip(chosen, own, strict=True):
            given[i] = x
        return objective(jaxpr_as_fun(traced.closed)(*given))

    leaves = [traced.leaves[i] for i in chosen]
    closed = jax.make_jaxpr(jax.grad(loss, argnums=tuple(range(len(leaves)))))(*leaves)
    watcher = Watcher()
    given = [Value(x, "argument", data=True) for x in leaves]
    results = watcher.run(closed.jaxpr, list(map(Value, closed.consts)), given)
    broken = next((x for x in results if x.nan), None)
    if broken is None:
        return finding("nan", "The compiled gradients contain NaN, and the same operators one by one do not")
    return nan_origin(broken, "the backward pass of this line")
