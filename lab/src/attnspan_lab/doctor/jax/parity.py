"""Comparison of a compiled step's results and gradients with float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from attnspan_lab.doctor.findings import Finding
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
from attnspan_lab.doctor.jax.interpret import equations, place_of_function, places_of
from attnspan_lab.doctor.jax.subject import Traced, replaced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, bad, is_float
from attnspan_lab.doctor.jax.watch import Watcher, watched
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.tolerances import ROUNDING, is_rounding
from attnspan_lab.doctor.words import error_text, first_line

__all__ = ["parity"]


def parity(traced: Traced, say: Callable[..., None]) -> None:
    """Compare results and gradients of the compiled step with float64."""
    missed = partial(_missed, say)
    try:
        found = _outcome(traced, say)
    except Exception as error:
        missed(f"the compiled step raises {first_line(error, 200)}")
        return
    if any(bad(x)[0] for x in found.results):
        missed("the step returns NaN")
        return  # The stage "eager" reports it.
    if any(bad(x)[0] for x in found.gradients):
        say(finding=_backward_nan(traced))
        return
    try:
        exact = reference(traced, gradients=bool(found.gradients))
    except Exception as error:
        missed(f"float64: {error_text(error)}")
        return
    mine = differences(found, exact)
    if any(map(np.isnan, mine)):
        missed("the step returns NaN in float64")
        return
    errors = [*mine][: 1 + bool(exact.gradients)]
    facts: dict[str, Any] = {"backend": "jax.jit", "against": "float64", "errors": errors}
    facts["checked"] = {
        n: f"compared with float64: they differ by {x:.1e} (relative error)"
        for n, x in zip(("results", "gradients"), errors, strict=False)
    }
    if not exact.gradients and not differentiable(traced):
        missed("the step has no floating-point argument", "gradients")
    floats = [x for x in (*traced.leaves, *jax.tree.leaves(traced.shapes)) if is_float(x)]
    eps = max(float(jnp.finfo(x.dtype).eps) for x in floats)  # type: ignore[no-untyped-call]
    if not max(mine) <= ROUNDING * eps:
        theirs = differences(reference(traced, wide=False, gradients=bool(exact.gradients)), exact)
        facts["eager errors"] = [*theirs]
        names = zip(("Results", "Gradients"), mine, theirs, strict=True)
        wrong = [x for x in names if not is_rounding(*x[1:], eps)]
        for name, own, like in wrong[:1]:
            what = f"{name} differ from float64 by {own:.1e} (relative error)"
            said = f"without the compiler and your own derivatives: {like:.1e}"
            rules = _rules(traced, exact.gradients, eps) if name == "Gradients" else []
            say(finding=_blamed(traced, rules, what, said))
    say(facts=facts)


def _missed(say: Callable[..., None], why: str, topic: str = "results and gradients") -> None:
    say(facts={"unchecked": {topic: why}})


def _outcome(traced: Traced, say: Callable[..., None]) -> Outcome:
    """Run the compiled step, with gradients if JAX has them."""
    # JAX differentiates no such loop backwards, for example in a function that generates tokens.
    loops = any(equations(traced.closed, "while"))
    try:
        return outcome(traced)
    except Exception as error:
        if not loops or "while_loop" not in str(error):
            _missed(say, f"the step cannot be differentiated: {first_line(error, 200)}", "gradients")
    return outcome(traced, gradients=False)


def _blamed(traced: Traced, rules: list[Place], what: str, evidence: str) -> Finding:
    """Describe a difference, given the lines of the user's derivatives that differ."""
    wrong = next(iter(watched(traced, None)[0].sums.found.values()), None) if rules else None
    if wrong is None:
        return finding("parity.rule" if rules else "parity", what, rules, evidence)
    values = {"remedy": wrong.remedy}
    return finding("parity.forward", what, (*wrong.places[:1], *rules), evidence, values=values)


def _rules(traced: Traced, exact: list[Any], eps: float) -> list[Place]:
    """Find the user's derivatives that differ from the exact one: the line of the rule, and of the call."""
    found = []
    for eqn in equations(traced.closed):
        if not attends(eqn):
            continue
        own = reference(traced, keep=lambda x, eqn=eqn: x is eqn).gradients  # type: ignore[misc]
        if not difference(own, exact) <= ROUNDING * eps:
            rule = eqn.params.get("bwd", eqn.params.get("jvp_jaxpr_fun"))
            found += [*place_of_function(getattr(rule, "debug_info", rule)), *places_of(eqn)[:1]]
    return found


def _backward_nan(traced: Traced) -> Finding:
    """Watch the backward pass, and find where its NaN comes from."""
    chosen = [i for i, x in enumerate(traced.leaves) if is_float(jnp.asarray(x))]

    def loss(*own: Any) -> Any:
        return objective(jaxpr_as_fun(traced.closed)(*replaced(traced.leaves, chosen, own)))

    leaves = [traced.leaves[i] for i in chosen]
    closed = jax.make_jaxpr(jax.grad(loss, argnums=tuple(range(len(leaves)))))(*leaves)
    watcher = Watcher()
    given = [Value(x, "argument", data=True) for x in leaves]
    results = watcher.run(closed.jaxpr, list(map(Value, closed.consts)), given)
    broken = next((x for x in results if x.nan), None)
    if broken is None:
        return finding("nan", "The compiled gradients contain NaN, and the same operators one by one do not")
    return nan_origin(broken, "the backward pass of this line")
