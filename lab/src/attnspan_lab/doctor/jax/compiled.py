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

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.captured_arrays import captured
from attnspan_lab.doctor.jax.flow import Flow
from attnspan_lab.doctor.jax.interpret import equations, inner, is_own, places_of
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.places import Place, at, lines_of_error
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


def untraceable(error: BaseException, subject: JaxSubject, batch: Any) -> Finding:
    """Describe an error of the step: of tracing, or of the step itself."""
    places = [x for x in lines_of_error(error) if is_own(x.file)][:3]
    if not isinstance(error, _READS) and "concrete value" not in str(error):
        return finding("error", f"The step raises {error_text(error)}", places)
    what = "jax.jit cannot trace this line: Python needs the value of an array here"
    tried = _static_trial(subject, batch)
    return finding("compile-error", what, places, error_text(error), tried=tried)


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
    found: Counter[tuple[str, str, tuple[Place, ...]]] = Counter()
    for eqn in equations(traced.closed):
        name = eqn.primitive.name
        moves = name == "device_put" and any(_moves(x) for x in eqn.params.get("devices", ()))
        does = "moves an array to another memory" if moves else _HOST.get(name)
        if does is not None:
            what = f"The compiled step {does} here ({name})"
            found["sync.moved" if moves else "sync", what, places_of(eqn)[:2]] += 1
    for (case, what, places), count in found.items():
        yield finding(case, what, places, count=count)


def _moves(target: Any) -> bool:
    if target is jax.memory.Space.Host:
        return True
    kind = getattr(target, "memory_kind", None)
    return target is not None and kind not in (None, "device", jax.devices()[0].default_memory().kind)


def constants(traced: Traced, seconds: float) -> Iterator[Finding]:
    """Yield arrays that XLA computes while it compiles, if that takes long, and large captured arrays."""
    users = {id(x): (x, lines) for x, lines in captured(traced.closed, _BIG)}
    if users:
        found = sorted(users.values(), key=lambda x: -x[0].nbytes)
        size = sum(x.nbytes for x, _ in found)
        what = f"The step captures arrays of {bytes_text(size)}, which become constants of the program"
        has_mask = any(x.dtype == bool and np.ndim(x) > 1 for x, _ in found)
        # Another array's line, then the callers of the first line.
        places = (*(x for _, lines in found for x in lines[:1]), *found[0][1][1:2])
        said = [f"{x.dtype}{list(x.shape)}" for x, _ in found[:4]]
        yield finding("constant.captured-mask" if has_mask else "constant.captured", what, places, *said)
    folded = _Folded()
    folded.follow(traced.closed, [True] * len(traced.leaves))
    most, lines = max(folded.found, key=lambda x: x[0], default=(0, ()))
    if most < _WORK or seconds < _SECONDS:
        return
    times = [_compile(traced, x) for x in ({}, {"xla_disable_hlo_passes": "constant_folding"})]
    if times[0] - times[1] >= _SECONDS:
        whole, part = map(seconds_text, times)
        said = [f"compiling takes {whole}, without constant folding {part}"]
        yield finding("constant", "XLA computes a constant here while it compiles", lines, *said)


def _compile(traced: Traced, options: dict[str, Any]) -> float:
    lowered = jax.jit(lambda *x: traced.run(*x)).lower(*traced.leaves)
    start = time.perf_counter()
    lowered.compile(compiler_options=options)
    return time.perf_counter() - start


class _Folded(Flow[bool]):
    """Collects the work of operators that depend on no argument, with their lines."""

    def __init__(self) -> None:
        super().__init__(False)
        self.found: list[tuple[int, tuple[Place, ...]]] = []

    def made(self, eqn: Any, facts: list[bool], here: Place | None) -> bool:
        depends = any(facts)
        if not depends and not inner(eqn):
            self.found.append((_work(eqn), at(here)))
        return depends

    def entered(self, eqn: Any, inside: Any, facts: list[bool], here: Place | None) -> list[bool]:
        """Follow calls only. XLA folds no operators in loops."""
        return super().entered(eqn, inside, facts, here) if eqn.primitive.name == "jit" else []


def _work(eqn: Any) -> int:
    """Estimate the multiplications and additions of an operator."""
    sizes = [prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name != "dot_general":
        return max(sizes, default=0)
    contract = eqn.params["dimension_numbers"][0][0]
    return int(sizes[-1] * prod(eqn.invars[0].aval.shape[i] for i in contract))
