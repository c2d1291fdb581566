"""Findings on caches that a jitted step updates and returns, but that its caller does not donate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.flow import Flow
from attnspan_lab.doctor.jax.hlo import Program
from attnspan_lab.doctor.jax.interpret import is_jaxs, place_of_function, places_of
from attnspan_lab.doctor.jax.subject import FAST, JaxSubject, Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.words import counted

__all__ = ["copied_caches"]

_LEAST = 2**14  # bytes of an array whose copy is worth a finding
_WRITES = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")
_JIT = re.compile(r"\bjit\b")
_KEEPS = ("reshape", "squeeze", "transpose", "broadcast_in_dim", "copy", "sharding_constraint")


@dataclass(frozen=True)
class _Update:
    """An argument of a jaxpr, and the lines that write into it."""

    argument: int
    lines: tuple[Place, ...] = ()


def copied_caches(traced: Traced, subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield jitted functions that return an updated argument, which their callers could donate."""
    outer = traced.closed.jaxpr
    jits = [(i, x) for i, x in enumerate(outer.eqns) if x.primitive.name == "jit" and not is_jaxs(_of(x))]
    for site in grouped(jits, lambda x: str(_of(x[1]).jaxpr.debug_info.func_src_info)).values():
        first = site[0][1]
        pairs = [(i, x) for i, x in _caches(_of(first).jaxpr) if not first.params["donated_invars"][i]]
        names = _of(first).jaxpr.debug_info.arg_names or ()
        chosen = {_name(names, i) for i, _ in pairs}
        argument = [i for i in range(len(_of(first).in_avals)) if _name(names, i) in chosen]
        kept = {i for i in argument for at, x in site if _is_kept(outer, at, x, i)}
        # A caller that reads the old cache again cannot donate it.
        if pairs and not kept & {i for i, _ in pairs}:
            yield from _copied(site, pairs, argument, is_whole=not kept)
    if not jits and not subject.is_jitted:
        yield from _when_jitted(traced, subject, batch)


def _of(eqn: Any) -> Any:
    return eqn.params["jaxpr"]


def _name(names: Sequence[str], i: int) -> str:
    """Return the argument's name for a leaf such as cache.k or cache['k']."""
    return re.split(r"[.\[]", names[i])[0] if i < len(names) and names[i] else f"argument {i}"


def _caches(jaxpr: Any) -> list[tuple[int, _Update]]:
    """List arguments of which a result is the updated version, with their updates."""
    found: dict[int, _Update] = {}
    updates = _Updates(None).follow(jaxpr, [_Update(i) for i in range(len(jaxpr.invars))])
    also = {x.argument for x in updates if x is not None and not x.lines}  # The old array is a result too.
    for update, var in zip(updates, jaxpr.outvars, strict=True):
        if update is None or not update.lines or update.argument in also:
            continue
        own = jaxpr.invars[update.argument].aval
        if (own.shape, own.dtype) == (var.aval.shape, var.aval.dtype) and _bytes(own) >= _LEAST:
            found.setdefault(update.argument, update)
    return list(found.items())


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)


class _Updates(Flow[_Update | None]):
    """Follows the arguments of a jaxpr to the results that are updated versions of them."""

    def made(self, eqn: Any, facts: list[_Update | None], here: Place | None) -> _Update | None:
        name, first = eqn.primitive.name, next(iter(facts), None)
        if name in _WRITES and first is not None:
            return _Update(first.argument, first.lines + at(here))
        return first if name in _KEEPS else None


def _is_kept(outer: Any, at: int, eqn: Any, i: int) -> bool:
    """Whether the caller has an array of a call for itself: it uses it again, or captures it."""
    var = eqn.invars[i]
    if isinstance(var, Literal):
        return False
    later = [x for y in outer.eqns[at + 1 :] for x in y.invars] + list(outer.outvars)
    return any(x is var for x in (*later, *outer.constvars)) or sum(x is var for x in eqn.invars) > 1


def _copied(
    site: list[tuple[int, Any]],
    pairs: list[tuple[int, _Update]],
    argument: list[int],
    *,
    is_whole: bool,
) -> Iterator[Finding]:
    """Describe the copies of one jitted function, and try to donate the argument.

    ``is_whole`` says that no caller reads an array of the argument again.
    """
    eqn = site[0][1]
    jaxpr = _of(eqn)
    size = sum(_bytes(jaxpr.in_avals[i]) for i, _ in pairs)
    programs = [_compiled(jaxpr, x) for x in ((), tuple(argument))]
    shared = [_aliased(x) for x in programs]
    if shared[1] - shared[0] < size:
        return  # The compiler cannot use the donation.
    lines = tuple(dict.fromkeys(y for _, x in pairs for y in x.lines))
    names = list(dict.fromkeys(_name(jaxpr.jaxpr.debug_info.arg_names or (), i) for i in argument))
    shapes = [jaxpr.in_avals[i].shape for i, _ in pairs]
    copies = sum(x.name == "copy" and x.shape in shapes for x in Program(programs[0].as_text() or "").stored)
    writes = sum(len(x.lines) for _, x in pairs)
    evidence = (
        f"{bytes_text(size)} in {counted(len(pairs), 'array')}, for {counted(writes, 'update')} a call",
        f"the compiled program writes {bytes_text(shared[0])} of its results into arguments",
        f"it copies {counted(copies, 'array')} of these shapes" if copies else "",
    )
    case, more = "copy", {}
    if is_whole and all(_is_returned(jaxpr, i) for i in argument) and all(x.isidentifier() for x in names):
        case, code = "copy.donate", ", ".join(f'"{x}"' for x in names)
        more = {"values": {"names": code}, "tried": _tried(jaxpr, tuple(argument), programs, shared)}
    what = f"Each call copies a whole cache before it updates it: {', '.join(names)} is not donated"
    places = (*_jit_line(jaxpr.jaxpr.debug_info), *lines[:2], *places_of(eqn)[:1])
    yield finding(case, what, places, *evidence, count=len(site), **more)


def _is_returned(jaxpr: Any, i: int) -> bool:
    """Whether a result has the shape and dtype of an argument, so that the caller gets a new one."""
    own = jaxpr.in_avals[i]
    return any((x.shape, x.dtype) == (own.shape, own.dtype) for x in jaxpr.out_avals)


def _compiled(jaxpr: Any, donated: tuple[int, ...]) -> Any:
    made = jax.jit(jaxpr_as_fun(jaxpr), donate_argnums=donated, compiler_options=FAST, keep_unused=True)
    return made.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals)).compile()


def _aliased(program: Any) -> int:
    return int(getattr(program.memory_analysis(), "alias_size_in_bytes", 0))


def _tried(jaxpr: Any, donated: tuple[int, ...], programs: list[Any], shared: list[int]) -> str:
    """Run both programs on equal made-up arrays, and describe what the donation gives."""
    try:
        results = [jax.tree.map(np.asarray, x(*map(_made, jaxpr.in_avals))) for x in programs]
    except Exception as error:
        said = f"the results were not compared ({type(error).__name__})"
    else:
        pairs = zip(*results, strict=True)
        equal = all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)
        said = f"results on made-up arrays are {'equal' if equal else 'not equal'}"
    many = counted(len(donated), "array")
    return f"with {many} donated, it writes {bytes_text(shared[1])} into arguments, and {said}"


def _made(aval: Any) -> Any:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.zeros(aval.shape, aval.dtype)
    return jnp.asarray(np.random.default_rng(0).standard_normal(aval.shape), aval.dtype)


def _jit_line(debug_info: Any) -> tuple[Place, ...]:
    """Find the decorator of a jitted function, the only line with jax.jit(function), or the function."""
    return tuple(map(_jitted_at, place_of_function(debug_info)))


def _jitted_at(place: Place) -> Place:
    name, known = place.function.rpartition(".")[2], _jits(place.file)
    found = known.get((name, place.line)) or known.get((name, 0), [])
    return Place(place.file, found[0] if len(found) == 1 else place.line, name)


@cache
def _jits(file: str) -> dict[tuple[str, int], list[int]]:
    """Lines of jit without donation: by the function's name and its decorator's line, or the name and 0."""
    found: dict[tuple[str, int], list[int]] = {}
    for x in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))) if Path(file).is_file() else ():
        if isinstance(x, ast.FunctionDef) and x.decorator_list:
            own = [y.lineno for y in x.decorator_list if _JIT.search(ast.unparse(y))]
            found[x.name, x.decorator_list[0].lineno] = own
        if isinstance(x, ast.Call) and x.args and _JIT.search(ast.unparse(x.func)):
            if any("donate" in str(y.arg) for y in x.keywords):
                continue
            own_name = getattr(x.args[0], "attr", getattr(x.args[0], "id", "<lambda>"))
            found.setdefault((own_name, 0), []).append(x.lineno)
    return found


def _when_jitted(traced: Traced, subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield a note on caches in the arguments of a step that is not jitted."""
    for i, update in _caches(traced.closed.jaxpr):
        leaf = traced.leaves[i]
        own = [k for k, x in subject.arguments(batch).items() if any(leaf is y for y in jax.tree.leaves(x))]
        if i >= traced.variables and own:
            what = f"When you jit this step, donate {own[0]}: otherwise each call copies the whole array"
            size, values = bytes_text(_bytes(traced.closed.in_avals[i])), {"name": own[0]}
            yield finding("copy.not-jitted", what, update.lines[:2], size, values=values, severity="note")
