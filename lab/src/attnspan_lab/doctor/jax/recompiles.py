"""Recompilations: the argument that changed, and a test of the remedy."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.interpret import equations, inner, is_own, place_of_function
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import numpy_of
from attnspan_lab.doctor.places import Place, lines_of

__all__ = ["Run", "calls_jitted", "place_of", "recompiles_in", "run_batches"]

#: Compilations for other shapes that are no finding: two lengths are usual.
_ALLOWED = 1
_Compiled = tuple[str, Place | None]


@dataclass
class Run:
    """Compilations of the calls with all batches.

    Attributes:
        compiled: For each batch, the functions that its first call compiled, with the user's line.
        again: The same for a second call with the same batch.
        seconds: Duration of each batch's first call.
        compile_seconds: Time of tracing and compilation.
        results: Results of each batch.
    """

    compiled: list[list[_Compiled]] = field(default_factory=list)
    again: list[list[_Compiled]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compile_seconds: float = 0.0
    results: list[Any] = field(default_factory=list)

    @property
    def recompiles(self) -> int:
        """Number of batches after the first one whose call compiled something."""
        return sum(bool(x) for x in self.compiled[1:])


@contextmanager
def _compilations() -> Iterator[tuple[list[_Compiled], list[float]]]:
    """Record compiled functions with the line that needs them, and the seconds of all compiler stages."""
    found: list[_Compiled] = []
    times: list[float] = []

    def listen(event: str, seconds: float, **more: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            times.append(seconds)
        if event.endswith("/compile/backend_compile_duration"):
            place = next((x for x in lines_of(sys._getframe(1)) if is_own(x.file)), None)
            found.append((str(more.get("fun_name", "")), place))

    jax.monitoring.register_event_duration_secs_listener(listen)  # type: ignore[arg-type]
    try:
        yield found, times
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)  # type: ignore[arg-type]


def run_batches(subject: JaxSubject, batches: list[Any], fn: Any = None) -> Run:
    """Call the function with all batches, twice with each. A function that is not jitted is jitted here."""
    run = Run()
    call = fn or (subject.fn if subject.is_jitted else _jitted(subject))
    for batch in batches:
        for names in (run.compiled, run.again):
            # A step with donate_argnums deletes the arrays that it gets.
            given, variables = jax.tree.map(_copy, (batch, subject.variables))
            with _compilations() as (found, times):
                start = time.perf_counter()
                results = jax.block_until_ready(subject.call(given, variables, fn=call))
            if names is run.compiled:
                run.seconds.append(time.perf_counter() - start)
                run.results.append(results)
            names.append(found)
            run.compile_seconds += sum(times)
    return run


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, jax.Array) else x


def calls_jitted(subject: JaxSubject, traced: Traced) -> bool:
    """Whether a function that is not jitted calls functions that the user jits inside of it."""
    jits = equations(traced.closed, "jit")
    return not subject.is_jitted and any(place_of_function(inner(x)[0].jaxpr.debug_info) for x in jits)


def _jitted(subject: JaxSubject, moving: str = "") -> Any:
    """Jit the function. Arguments that arrays cannot hold are static, except for the one named ``moving``."""
    fn = inspect.unwrap(subject.fn)
    known = list(inspect.signature(fn).parameters)
    first = subject.arguments(subject.batches[0])
    single = {k: x for k, x in first.items() if k in known and jax.tree.leaves(x) in ([x], [])}
    static = [k for k, x in single.items() if k != moving and subject.is_static(k, x) and x is not None]
    return jax.jit(fn, static_argnames=static)


def place_of(fn: Any) -> Place | None:
    """Find the line where a function is defined."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return Place(code.co_filename, code.co_firstlineno, code.co_name) if code is not None else None


def recompiles_in(run: Run, subject: JaxSubject) -> Iterator[Finding]:
    """Yield a finding for each change that recompiles, and for functions that compile in each call."""
    anew = [x for names in run.again for x in names]
    if anew:
        name, place = anew[0]
        what = f"{name} is compiled in each call, also for the same batch"
        yield finding("recompile.each", what, (place,), count=len(anew))
        return
    changes: dict[tuple[str, str], list[str]] = {}
    for i, names in enumerate(run.compiled):
        before = [subject.named(x) | _whole(subject, x) for x in subject.batches[:i]]
        if names and before:
            now = subject.named(subject.batches[i]) | _whole(subject, subject.batches[i])
            kind, name, said = min((_changed(x, now) for x in before), key=len, default=[("", "", "")])[0]
            changes.setdefault((kind, name), []).append(said)
    for (kind, name), texts in changes.items():
        if kind == "shape" and len(texts) <= _ALLOWED:
            continue
        what = f"{len(texts) + 1} programs are compiled, because the argument {name} changes"
        tried = _tried(kind, name, run, subject)
        failed = kind in ("static", "type") and "the same results" not in tried
        case = ".few" if failed else f".{kind}" if kind else ""
        more = {"tried": tried, "count": len(texts)}
        places = (place_of(subject.fn),)
        yield finding(f"recompile{case}", what, places, *[*dict.fromkeys(texts)][:4], **more)


def _whole(subject: JaxSubject, batch: Any) -> dict[str, Any]:
    """Name the arguments of a batch that have no leaves."""
    return {k: x for k, x in subject.arguments(batch).items() if x is None or not jax.tree.leaves(x)}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    """List what differs between two batches: kind, argument and description."""
    found = []
    for name in {**before, **now}:
        x, y = before.get(name), now.get(name)
        a, b = _signature(x), _signature(y)
        if (x is None) != (y is None):
            texts = (f"{x[1]} of shape {x[0]}" if x else "None" for x in (a, b))
            found.append(("structure", name, f"{name}: {', then '.join(texts)}"))
        elif a[0] != b[0]:
            found.append(("shape", name, f"{name}: shape {a[0]}, then {b[0]}"))
        elif a[1:] != b[1:]:
            found.append(("type", name, f"{name}: {a[1]}, then {b[1]}"))
    values = [k for k, x in now.items() if not hasattr(x, "shape") and before.get(k) != x]
    found += [
        ("static", k, f"{k}: {before[k]!r}, then {now[k]!r}") for k in values if k in before and not found
    ]
    return found or [("", "", "")]


def _signature(x: Any) -> tuple[Any, ...]:
    if x is None:
        return ()
    if not hasattr(x, "shape"):
        return (), f"a Python {type(x).__name__}"
    weak = " (weak type)" if getattr(x, "weak_type", False) else ""
    # JAX narrows dtypes of NumPy only.
    dtype = x.dtype if isinstance(x, jax.Array) else jax.dtypes.canonicalize_dtype(x.dtype)
    return tuple(x.shape), f"{dtype}{weak}"


def _tried(kind: str, name: str, run: Run, subject: JaxSubject) -> str:
    """Test the remedy of a recompilation, and describe the outcome."""
    try:
        batches, what = _mended(kind, name, subject)
        if kind == "static":
            again = run_batches(subject, batches, _jitted(subject, moving=name))
        else:
            if subject.is_jitted:
                subject.fn.clear_cache()  # type: ignore[attr-defined]
            again = run_batches(subject, batches)
    except Exception as error:
        if kind != "static":
            return ""
        text = type(error).__name__
        return f"with {name} as an array: {text}. Python needs its value"
    said = f"with {what}: {again.recompiles} recompilations instead of {run.recompiles}"
    same = all(_close(x, y) for x, y in zip(run.results, again.results, strict=True))
    others = "BUT OTHER RESULTS" + (": the step must hide the padding" if kind == "shape" else "")
    return f"{said}, {'the same results' if same else others}"


def _mended(kind: str, name: str, subject: JaxSubject) -> tuple[list[Any], str]:
    """Change all batches as a remedy says."""
    named = [subject.named(x) for x in subject.batches]
    if kind == "shape":
        arrays = {k: [x[k] for x in named] for k in named[0] if hasattr(named[0][k], "shape")}
        most = {k: np.max([x.shape for x in own], axis=0) for k, own in arrays.items()}

        def padded(key: str, x: Any) -> Any:
            if key not in most or x.shape == (*most[key],):
                return x
            return jnp.pad(jnp.asarray(x), [(0, int(n) - m) for n, m in zip(most[key], x.shape, strict=True)])

        long = max(most[name]) if most[name].size else 0
        return [subject.map(x, padded) for x in subject.batches], f"all batches padded to {long}"
    dtype = jnp.asarray(named[0][name]).dtype
    for x in named[1:]:
        dtype = jnp.promote_types(dtype, jnp.asarray(x[name]).dtype)

    def same(key: str, x: Any) -> Any:
        return jnp.asarray(np.asarray(x), dtype) if key == name else x

    return [subject.map(x, same) for x in subject.batches], f"{name} as an array of {dtype}"


def _close(x: Any, y: Any) -> bool:
    """Whether results are equal. Results of padding are left out."""
    pairs = zip(*(map(numpy_of, jax.tree.leaves(z)) for z in (x, y)), strict=True)
    return all(
        a.ndim == b.ndim
        and np.allclose(a, b[tuple(map(slice, a.shape))], rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in pairs
    )
