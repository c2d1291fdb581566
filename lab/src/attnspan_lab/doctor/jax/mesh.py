"""Comparison of a step on a mesh with the step on one device: results, rows, gathers and repeated work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.constraints import REPEATED, constraints, unsharded, without_constraints
from attnspan_lab.doctor.jax.float64_reference import difference, reference
from attnspan_lab.doctor.jax.hlo import Program
from attnspan_lab.doctor.jax.interpret import equations, inner, places_of
from attnspan_lab.doctor.jax.mesh_exceptions import WITHIN, excused, orders, results_of
from attnspan_lab.doctor.jax.one_device import Alone, NotAlone, alone
from attnspan_lab.doctor.jax.recompiles import place_of
from attnspan_lab.doctor.jax.shard_map_causes import Blame, blamed, shifted
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced, is_spread
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.visible_pairs import rules
from attnspan_lab.doctor.jax.watch import Attention, watched
from attnspan_lab.doctor.places import Place

__all__ = ["compare_mesh", "has_shard_map", "on_one_device"]

_ROUNDING = 4  # errors of the mesh, in errors of one device, that are rounding
_CUTS = (
    "dynamic_slice",
    "slice",
    "gather",
    "concatenate",
    "rev",
    "all_gather",
    "ppermute",
    "all_to_all",
    "split",
)


def has_shard_map(traced: Traced) -> bool:
    """Whether a part of the step is written for each device."""
    return any(x.primitive.name == "shard_map" for x in equations(traced.closed))


def on_one_device(subject: JaxSubject, batch: Any, traced: Traced) -> Traced:
    """Trace a step with shard_map for one device.

    Raises:
        NotAlone: The step on one device may be another function.
    """
    single = alone(subject, batch, traced.closed)
    if single.numbers and not difference(results_of(traced), results_of(single.traced)) <= WITHIN:
        raise NotAlone("numbers in shard_map may be the number of devices")
    return single.traced


def compare_mesh(subject: JaxSubject, say: Callable[..., None]) -> None:
    """Run the first batch on the mesh, and report what differs from one device."""
    plain, batch = subject.plain, subject.batches[0]
    whole = plain.batches[0]
    placed = replace(subject, **_placed(subject, {"variables": subject.variables}))
    own = subject.with_arguments(batch, _placed(subject, subject.arguments(batch)))
    sharded = Traced.of(placed, own)
    mapped = has_shard_map(sharded) and subject.one_device is None
    why, single = "", None
    try:
        single = alone(plain, whole, sharded.closed) if mapped else None
    except NotAlone as reason:
        why = f"{reason}. {_RETURN}"
    held = single.traced if single is not None else Traced.of(plain, whole)
    one = without_constraints(held)
    results = [results_of(x) for x in (sharded, one)] if not why else []
    error, why = (0.0, why) if why else _against_one(results, one, single, sharded, subject.size(whole))
    compared = not why
    if why:
        say(facts={"unchecked": {"the mesh against one device": why}})
    leaks = _leaks(placed, own, sharded, (plain, whole, one) if results else None)
    if not error <= WITHIN or leaks[1]:
        say(finding=_rows(subject, sharded, error, leaks, results))
    for x in _unlike(subject, batch):
        say(finding=x)
    if not compared:
        return
    axes = ", ".join(f"{name} {size}" for name, size in subject.mesh.shape.items())
    said = f"results of {subject.mesh.size} devices ({axes}) were compared with one device"
    say(facts={"checked": {"mesh": said}})
    size = subject.size(batch) or (1, 1)
    calls, given = watched(held, subject.size(batch))[0].calls, list(constraints(sharded.closed))
    runs = sharded.program(), one.program()
    program, alone_program = (Program(x.as_text() or "") for x in runs)
    narrow = list(unsharded(calls, given, program, alone_program, subject.mesh.size))
    named = {x.places[0] for x in narrow}
    named |= {y for x in given if x.places[0] in named for y in x.made}
    flops = [float((x.cost_analysis() or {}).get("flops", 0.0)) for x in runs]
    gathers = _gathers(program, calls, one, sharded, size, subject.mesh.shape.values())
    gathers = (x for x in gathers if not named & {*x.places})
    for x in (*narrow, *gathers, *_repeated(subject, program, alone_program, flops, named, calls)):
        say(finding=x)


_RETURN = 'Return "one_device", the function without shard_map'


def _against_one(
    results: list[list[np.ndarray]],
    one: Traced,
    single: Alone | None,
    sharded: Traced,
    size: tuple[int, int] | None,
) -> tuple[float, str]:
    """Return the difference of the mesh from one device, and why they cannot be compared, or ""."""
    if why := _incomparable(*results):
        return 0.0, why
    error = _error(results, one)
    if not error > WITHIN or single is None:
        return error, ""
    right, why = excused(single, results[0], size)
    if not (right or why) and single.chosen and blamed(sharded.closed) is None:
        names = ", ".join(sorted(single.chosen))
        why = f"{names} in shard_map may give other results for another number of devices"
    return (0.0 if right or why else error), f"{why}. {_RETURN}" if why else ""


def _error(results: list[list[np.ndarray]], one: Traced) -> float:
    """Relative difference of the mesh from one device, or 0.0 if both round alike, as in bfloat16."""
    error = difference(*results)
    if error <= WITHIN:
        return error
    try:
        exact = reference(one).results
    except Exception:
        return error  # The step has no float64 version.
    mine, theirs = (difference(x, exact) for x in results)
    return 0.0 if mine <= _ROUNDING * theirs else error


def _incomparable(mesh: list[np.ndarray], one: list[np.ndarray]) -> str:
    """Say why the results of the mesh cannot be compared with the results of one device, or ""."""
    if [x.shape for x in mesh] != [x.shape for x in one]:
        return "the results have other shapes on one device"
    return "the results on one device contain NaN" if any(np.isnan(x).any() for x in one) else ""


def _placed(subject: JaxSubject, arguments: dict[str, Any]) -> dict[str, Any]:
    """Put each argument on the mesh by its spec. Others stay sharded as they are, or are replicated."""

    def put(name: str, value: Any) -> Any:
        if name not in subject.in_shardings and any(map(is_spread, jax.tree.leaves(value))):
            return value
        spec = subject.in_shardings.get(name, PartitionSpec())
        sharding = jax.tree.map(
            lambda x: x if isinstance(x, jax.sharding.Sharding) else NamedSharding(subject.mesh, x),
            spec,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return jax.device_put(value, sharding)

    still = {
        k
        for k, x in arguments.items()
        if not jax.tree.leaves(x) or subject.is_static(k, jax.tree.leaves(x)[0])
    }
    return {k: x if k in still else put(k, x) for k, x in arguments.items()}


def _leaks(
    subject: JaxSubject, batch: Any, traced: Traced, alone: tuple[JaxSubject, Any, Traced] | None
) -> tuple[str, str]:
    """Change the tokens of documents, or the last one, on the mesh and on one device.

    Returns:
        The problem and the changes of foreign results, if only the mesh has them.
    """

    def run(*leaves: Any) -> Any:
        own = zip(leaves, traced.leaves, strict=True)
        return traced.run(*(jax.device_put(x, y.sharding) if is_spread(y) else x for x, y in own))

    trial, length = Trial(subject, batch, traced, run=run), (subject.size(batch) or (0, 0))[1]
    for rule in rules(trial) if length else ():
        # Changed padding may change a mask. The comparison with one device finds a lost mask of padding.
        said = trial.changed(rule.groups, rule.only) if rule.kind != "mask-lost" else ""
        if not said or (alone and Trial(*alone).changed(rule.groups, rule.only)):
            continue
        # The last token may be at another place of the batch, in an order that balances the devices.
        places = orders(subject.mesh.shape.values(), length) if rule.kind == "causality-lost" else ()
        last = (np.broadcast_to(x == length - 1, rule.groups.shape).astype(int) for x in places)
        if all(trial.changed(x, 1) for x in last):
            return rule.what.replace(" here", " on the mesh"), said
    return "", ""


def _rows(
    subject: JaxSubject,
    traced: Traced,
    error: float,
    leaks: tuple[str, str],
    results: list[list[np.ndarray]],
) -> Finding:
    """Describe different results, with the line in shard_map, or the lines that cut by other rules."""
    differs = not error <= WITHIN
    evidence = [f"results differ from one device by {error:.1e} (relative error)"] if differs else []
    evidence += [leaks[1]] if leaks[1] else []
    what = "The mesh computes a different result than one device" if differs else leaks[0]
    mapped = [
        x for y in equations(traced.closed) if y.primitive.name == "shard_map" for x in places_of(y)[:1]
    ]
    blame = blamed(traced.closed)
    if blame is not None:
        places = (*blame.places, *mapped[:1])
        told = {"cause": blame.cause, "remedy": blame.remedy, "tried": _shifted(traced, blame, results)}
        return finding("rank-rows", what, places, evidence=tuple(evidence), **told)
    cuts = list(_cuts(subject, traced))
    both = {x[1] for x in cuts if x[0] == "data"} & {x[1] for x in cuts if x[0] == "tokens"}
    sides = [[x for x in cuts if x[0] == side and x[1] not in both] for side in ("data", "tokens")]
    places = tuple(x[2] for side in sides for x in side if x[2] is not None) or tuple(mapped[:1])
    has_data = bool(set(traced.names) - set(subject.tokens(subject.batches[0])))
    for name, side in zip(("the mask's data", "the tokens"), sides if has_data else ((), ()), strict=True):
        said = ", ".join(dict.fromkeys(f"{x[1]} at line {x[2].line}" if x[2] else x[1] for x in side))
        evidence += [f"only {name}: {said}"] if said else []
    # Without such lines, the doctor only knows that the results differ.
    more = {} if has_data and any(sides) else {"cause": _UNKNOWN, "remedy": _BISECT}
    return finding("rank-rows", what, places, evidence=tuple(evidence), **more)


def _shifted(traced: Traced, blame: Blame, results: list[list[np.ndarray]]) -> str:
    """Try positions that count from the first token of the sequence."""
    if blame.iota is None or not results:
        return ""
    try:
        error = difference(shifted(traced, blame.iota), results[1])
    except Exception:
        return ""  # The doctor cannot run the changed step, for example because of its loops.
    said = "equal" if error <= WITHIN else "still not equal"
    return f"with these positions, the results of the mesh and of one device are {said} ({error:.1e})"


_UNKNOWN = "The doctor finds no line that cuts or reorders only the tokens or only the mask's data"
_BISECT = """\
Return intermediate results from the step, and compare them on the mesh and on one device. Look for sums and \
collectives over the wrong axis, and for axis_index"""


def _cuts(subject: JaxSubject, traced: Traced) -> Iterator[tuple[str, str, Place | None]]:
    """Yield operators that cut or reorder tokens, or the mask's data: the side, the operator, the line."""
    tokens = set(subject.tokens(subject.batches[0]))
    sides: list[set[str]] = [set()] * traced.variables
    sides += [{"tokens"} if x in tokens else {"data"} for x in traced.names]

    def visit(
        jaxpr: Any, of: dict[Any, set[str]], at: Place | None
    ) -> Iterator[tuple[str, str, Place | None]]:
        for eqn in jaxpr.eqns:
            given = [set() if isinstance(v, Literal) else of.get(v, set()) for v in eqn.invars]
            here, name = at or next(iter(places_of(eqn)), None), eqn.primitive.name
            if name in _CUTS and len(given[0]) == 1:
                yield next(iter(given[0])), name, here
            if name == "shard_map":
                for side, spec in zip(given, eqn.params.get("in_specs", ()), strict=False):
                    if len(side) == 1 and any(spec):
                        yield next(iter(side)), f"in_specs {spec}", here
            of.update(dict.fromkeys(eqn.outvars, set().union(*given)))
            for x in inner(eqn) if name in ("jit", "shard_map", "remat2") else ():
                x = getattr(x, "jaxpr", x)
                own = dict(zip(x.invars, given, strict=True))
                yield from visit(x, own, here if name == "jit" else None)
                of.update({v: own.get(w, set()) for v, w in zip(eqn.outvars, x.outvars, strict=True)})

    yield from visit(traced.closed.jaxpr, dict(zip(traced.closed.jaxpr.invars, sides, strict=True)), None)


def _unlike(subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield arguments of the batch that are not sharded like the tokens."""
    named, size = subject.arguments(batch), subject.size(batch)
    fits = {k: x for k, x in named.items() if np.shape(x)[:2] == size}
    given = {k: getattr(x, "sharding", None) if is_spread(x) else None for k, x in fits.items()}
    specs = {k: _axes(subject.in_shardings.get(k, given[k])) for k in fits}
    tokens = [x for x in subject.tokens(batch) if x in specs]
    for name in specs if tokens else ():
        want = specs[tokens[0]]
        if specs[name] != want:
            what = f"{name} is sharded as {specs[name]}, and {tokens[0]} as {want}"
            moved = "the partitioner moves the array to the devices that need it, in each step"
            evidence = (moved if any(specs[name]) else "each device holds all of it",)
            remedy = f"Give {name} the PartitionSpec of {tokens[0]}"
            cause = (
                "in_shardings gives them different specs"
                if subject.in_shardings
                else "You place them differently"
            )
            places = (place_of(subject.fn),)
            yield finding("rank-replicated", what, places, evidence=evidence, cause=cause, remedy=remedy)


def _axes(spec: Any) -> tuple[Any, Any]:
    """Return the mesh axes of batch elements and of tokens."""
    spec = getattr(spec, "spec", spec) or ()
    return tuple([*spec, None, None][:2])  # type: ignore[return-value]


def _gathers(
    program: Program,
    calls: list[Attention],
    one: Traced,
    sharded: Traced,
    size: tuple[int, int],
    axes: Iterable[int],
) -> Iterator[Finding]:
    """Yield all-gathers that the partitioner inserted: of attention's operands, and of other large arrays."""
    lines, tokens = {x for y in calls for x in y.lines}, prod(size)
    lengths = {size[1], *(size[1] // n for n in axes)} - {0, 1}
    asked = {
        x for y in equations(sharded.closed) if y.primitive.name == "all_gather" for x in places_of(y)[:1]
    }
    held = {prod(x.shape): x.places[0] for x in constraints(sharded.closed) if x.places}
    whole: dict[Place, set[int]] = {}
    for y in equations(one.closed):
        for place in places_of(y)[:1]:
            sizes = whole.setdefault(place, set())
            sizes.update(prod(getattr(v.aval, "shape", ())) for v in (*y.invars, *y.outvars))
    own = one.leaves[: one.variables]
    # A loop over layers takes a part of stacked weights in each step.
    weights = {np.size(x) for x in own} | {np.size(x) // len(x) for x in own if np.ndim(x) and len(x)}
    found: dict[tuple[str, Place], list[Any]] = {}
    for x in program.stored:
        large = x.name.startswith("all-gather") and x.size > 4 * tokens and x.size not in weights
        if large and x.places and x.places[0] not in asked:
            # The partitioner gives a gather the line of the product that needs it, or that made it.
            result = any(sum(n in lengths for n in y) > 1 for y in program.factors(x))
            kind = "rank-gather" if x.places[0] in lines and not result else "rank-replicated"
            if kind == "rank-replicated" and x.size not in whole.get(x.places[0], ()):
                continue  # The devices of one axis of the mesh share an array that others split.
            found.setdefault((kind, x.places[0]), []).append(x)
    for (kind, place), many in found.items():
        what = "An operand of attention is gathered whole on each device here"
        what = what if kind == "rank-gather" else "An array is gathered whole on each device here"
        total = bytes_text(sum(x.bytes for x in many))
        shapes = ", ".join(dict.fromkeys(f"{x.dtype}{list(x.shape)}" for x in many))
        evidence = (f"{len(many)} all-gathers of the compiled program, {total} on each device: {shapes}",)
        constraint = held.get(many[0].size) if kind == "rank-replicated" else None
        yield finding(kind, what, (constraint, place), evidence=evidence, count=len(many))


def _repeated(
    subject: JaxSubject,
    program: Program,
    alone: Program,
    flops: list[float],
    named: set[Place],
    calls: list[Attention],
) -> Iterator[Finding]:
    """Yield products whose work several devices repeat, if the step repeats much. Named lines are known."""
    devices = subject.mesh.size
    if flops[1] <= 0 or flops[0] * devices <= REPEATED * flops[1]:
        return
    more = {k: x * devices - alone.work.get(k, 0) for k, x in program.work.items()}
    more = {k: x for k, x in more.items() if program.work[k] * devices > REPEATED * alone.work.get(k, 0)}
    if set(more) & named and not set(more) - named:
        return
    more = {k: x for k, x in more.items() if k not in named}
    share = flops[0] / flops[1]
    what = f"Each of {devices} devices computes {share:.0%} of the step's operations"
    evidence = (f"equal shares are {1 / devices:.0%}",)
    attention = {place for call in calls for place in call.places}
    lines = sorted(more, key=lambda x: (x not in attention, -more[x]))
    places: list[Place | None] = [*lines[:2], place_of(subject.fn)][:2]
    cause = "An array is not sharded along an axis of the mesh, so each device computes all of it"
    cause = cause if more else "Devices repeat work. The doctor finds no product that several of them compute"
    remedy = "Shard the batch, the heads or the sequence along this axis of the mesh"
    yield finding("rank-replicated", what, places, evidence=evidence, cause=cause, remedy=remedy)
