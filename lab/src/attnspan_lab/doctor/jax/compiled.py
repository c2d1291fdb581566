"""Findings on the traced and compiled step: lines that cannot be traced, calls to the host, constants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.captured_arrays import captured
from attnspan_lab.doctor.jax.interpret import equations, inner, is_own, places_of
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.places import Place, lines_of_error
from attnspan_lab.doctor.words import error_text

__all__ = ["constants", "host_calls", "untraceable"]

_READS: tuple[type[Exception], ...] = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_HOST = {
    "pure_callback": "calls Python",
    "io_callback": "calls Python",
    "debug_callback": "calls Python",
    "debug_print": "prints from the device",
    "infeed": "waits for data of the host",
    "outfeed": "sends data to the host",
}
#: Saved seconds of compilation that are a finding, and the work that makes a trial worth its time.
_SECONDS, _WORK = 0.25, 2**22
_BIG = 2**20  # bytes of an array that a step should not capture
_OF_MASK = """\
Describe a mask of pairs instead of storing it: is_causal=True, or mask=causal() with attnspan \
(and layout="bshd", if your arrays are (B, S, H, D)). Pass other arrays as arguments"""


def untraceable(error: BaseException, subject: JaxSubject, batch: Any, stage: str) -> Finding:
    """Describe an error of the step: of tracing, or of the step itself."""
    places = [x for x in lines_of_error(error) if is_own(x.file)][:3]
    if not isinstance(error, _READS) and "concrete value" not in str(error):
        what = f"The step raises {error_text(error)}"
        cause = "JAX cannot trace or run the step"
        remedy = "Fix this step first: the doctor needs a step that runs"
        return finding("error", what, places, cause=cause, remedy=remedy, stage=stage)
    what = "jax.jit cannot trace this line: Python needs the value of an array here"
    cause = (
        "A branch, a loop, a size, float() or NumPy reads the value. Outside of jit, the host waits for it"
    )
    remedy = (
        "Use jnp.where, jax.lax.cond or a fixed size. If the value is a number that you pass, make it static"
    )
    tried = _static_trial(subject, batch)
    more = {"cause": cause, "remedy": remedy, "tried": tried, "stage": stage}
    return finding("compile-error", what, places, evidence=(error_text(error),), **more)


def _static_trial(subject: JaxSubject, batch: Any) -> str:
    """Test which number must be static so that the step can be traced."""
    numbers = [k for k, x in subject.named(batch).items() if isinstance(x, (int, float))]
    for name in numbers:
        fn = getattr(subject.fn, "__wrapped__", subject.fn)
        try:
            Traced.of(replace(subject, fn=fn, static=(*subject.static, name)), batch)
        except Exception:
            continue
        return f'with static_argnames=("{name}",): the step can be traced. Each value compiles once'
    return ""


def host_calls(traced: Traced) -> Iterator[Finding]:
    """Yield the lines at which the compiled step calls the host, or moves arrays between memories."""
    found: Counter[tuple[str, tuple[Place, ...]]] = Counter()
    for eqn in equations(traced.closed):
        name = eqn.primitive.name
        if name in _HOST:
            found[f"The compiled step {_HOST[name]} here ({name})", places_of(eqn)[:2]] += 1
        if name == "device_put" and any(_moves(x) for x in eqn.params.get("devices", ())):
            found[_MOVED, places_of(eqn)[:2]] += 1
    for (what, places), count in found.items():
        more = {"cause": _MOVES, "remedy": _KEEP} if what == _MOVED else {}
        yield finding("sync", what, places, count=count, **more)


_MOVED = "The compiled step moves an array to another memory here (device_put)"
_MOVES = "The line asks for another kind of memory, and the array is copied there in each step"
_KEEP = "Keep the array in one kind of memory. If the copy is wanted, for example to save memory, leave it"


def _moves(target: Any) -> bool:
    if target is jax.memory.Space.Host:
        return True
    kind = getattr(target, "memory_kind", None)
    return target is not None and kind not in (None, "device", jax.devices()[0].default_memory().kind)


def constants(traced: Traced, seconds: float) -> Iterator[Finding]:
    """Yield arrays that XLA computes while it compiles, if that takes long, and large captured arrays."""
    users = {id(x): (x, place) for x, place in captured(traced.closed, _BIG)}
    arrays, lines = (
        zip(*sorted(users.values(), key=lambda x: -x[0].nbytes), strict=True) if users else ((), ())
    )
    if arrays:
        size = sum(x.nbytes for x in arrays)
        what = f"The step captures arrays of {bytes_text(size)}, which become constants of the program"
        cause = "The function uses arrays that are not its arguments. A compiled function keeps their values"
        remedy = "Pass the arrays as arguments, for example the parameters as the first one"
        remedy = _OF_MASK if any(x.dtype == bool and np.ndim(x) > 1 for x in arrays) else remedy
        evidence = tuple(f"{x.dtype}{list(x.shape)}" for x in arrays[:4])
        # Another array's line, then the callers of the first line.
        places = (*(x[0] for x in lines if x), *lines[0][1:2])
        yield finding("constant", what, places, evidence=evidence, cause=cause, remedy=remedy)
    work = _folded(traced)
    if max((x[0] for x in work), default=0) < _WORK or seconds < _SECONDS:
        return
    times = [_compile(traced, x) for x in ({}, {"xla_disable_hlo_passes": "constant_folding"})]
    if times[0] - times[1] >= _SECONDS:
        place = max(work, key=lambda x: x[0])[1]
        what = "XLA computes a constant here while it compiles"
        whole, part = map(seconds_text, times)
        said = (f"compiling takes {whole}, without constant folding {part}",)
        yield finding("constant", what, place, evidence=said)


def _compile(traced: Traced, options: dict[str, Any]) -> float:
    lowered = jax.jit(lambda *x: traced.run(*x)).lower(*traced.leaves)
    start = time.perf_counter()
    lowered.compile(compiler_options=options)
    return time.perf_counter() - start


def _literal(var: Any) -> bool:
    return isinstance(var, Literal)


def _folded(traced: Traced) -> list[tuple[int, tuple[Place, ...]]]:
    """List the work of operators that depend on no argument, with their lines."""
    found: list[tuple[int, tuple[Place, ...]]] = []

    def visit(jaxpr: Any, moving: set[Any], places: tuple[Place, ...]) -> None:
        for eqn in jaxpr.eqns:
            depends = any(not _literal(v) and v in moving for v in eqn.invars)
            at = places or places_of(eqn)[:1]
            if depends:
                moving.update(eqn.outvars)
            for x in inner(eqn) if eqn.primitive.name == "jit" else ():
                own = zip(x.jaxpr.invars, eqn.invars, strict=True)
                visit(x.jaxpr, {a for a, b in own if not _literal(b) and b in moving}, at)
            if not depends and not inner(eqn):
                found.append((_work(eqn), at))

    visit(traced.closed.jaxpr, set(traced.closed.jaxpr.invars), ())
    return found


def _work(eqn: Any) -> int:
    """Estimate the multiplications and additions of an operator."""
    sizes = [prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name != "dot_general":
        return max(sizes, default=0)
    contract = eqn.params["dimension_numbers"][0][0]
    return int(sizes[-1] * prod(eqn.invars[0].aval.shape[i] for i in contract))
