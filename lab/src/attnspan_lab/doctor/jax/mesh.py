"""Comparison of the results of a step on a mesh and on one device, and the lines that cut by other rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.constraints import (
    without_constraints,
)
from attnspan_lab.doctor.jax.float64_reference import difference, reference
from attnspan_lab.doctor.jax.flow import Flow
from attnspan_lab.doctor.jax.interpret import equations, places_of
from attnspan_lab.doctor.jax.mesh_costs import MeshCosts
from attnspan_lab.doctor.jax.mesh_exceptions import WITHIN, excused, orders, results_of
from attnspan_lab.doctor.jax.one_device import Alone, Incomparable, NotAlone, alone
from attnspan_lab.doctor.jax.recompiles import place_of
from attnspan_lab.doctor.jax.shard_map_causes import Blame, blamed, shifted
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced, is_spread
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.visible_pairs import rules
from attnspan_lab.doctor.jax.watch import watched
from attnspan_lab.doctor.pairs import SEEN
from attnspan_lab.doctor.places import Place, at

__all__ = ["compare_mesh", "has_shard_map", "on_one_device"]

_SIDES = ("data", "tokens")
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
    return any(equations(traced.closed, "shard_map"))


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
    results, why = list[list[np.ndarray]](), ""
    try:
        single = alone(plain, whole, sharded.closed) if mapped else None
        held = single.traced if single is not None else Traced.of(plain, whole)
        one = without_constraints(held)
        results = [results_of(x) for x in (sharded, one)]
        error = _against_one(results, one, single, sharded, subject.size(whole))
    except Incomparable as reason:
        error, why = 0.0, str(reason)
        say(facts={"unchecked": {"the mesh against one device": why}})
    leaks = _leaks(placed, own, sharded, (plain, whole, one) if results else None)
    if not error <= WITHIN or leaks[1]:
        say(finding=_rows(subject, sharded, error, leaks, results))
    for x in _unlike(subject, batch):
        say(finding=x)
    if why:
        return
    axes = ", ".join(f"{name} {size}" for name, size in subject.mesh.shape.items())
    said = f"results of {subject.mesh.size} devices ({axes}) were compared with one device"
    say(facts={"checked": {"mesh": said}})
    for x in MeshCosts(subject, sharded, one, watched(held, subject.size(batch))[0].calls).findings():
        say(finding=x)


def _against_one(
    results: list[list[np.ndarray]],
    one: Traced,
    single: Alone | None,
    sharded: Traced,
    size: tuple[int, int] | None,
) -> float:
    """Return the difference of the mesh from one device.

    Raises:
        Incomparable: They cannot be compared.
    """
    if [x.shape for x in results[0]] != [x.shape for x in results[1]]:
        raise Incomparable("the results have other shapes on one device")
    if any(np.isnan(x).any() for x in results[1]):
        raise Incomparable("the results on one device contain NaN")
    error = _error(results, one)
    if not error > WITHIN or single is None:
        return error
    if excused(single, results[0], size):
        return 0.0
    if single.chosen and blamed(sharded.closed) is None:
        names = ", ".join(sorted(single.chosen))
        raise NotAlone(f"{names} in shard_map may give other results for another number of devices")
    return error


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

    first = {k: jax.tree.leaves(x)[:1] for k, x in arguments.items()}
    moving = {k for k, x in first.items() if x and not subject.is_static(k, x[0])}
    return {k: put(k, x) if k in moving else x for k, x in arguments.items()}


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
            return SEEN[rule.kind].replace(" here", " on the mesh"), said
    return "", ""


def _rows(
    subject: JaxSubject,
    traced: Traced,
    error: float,
    leaks: tuple[str, str],
    results: list[list[np.ndarray]],
) -> Finding:
    """Describe different results, with the line in shard_map, or the lines that cut by other rules."""
    evidence = ["", leaks[1]]
    what = leaks[0]
    if not error <= WITHIN:
        what = "The mesh computes a different result than one device"
        evidence[0] = f"results differ from one device by {error:.1e} (relative error)"
    mapped = [x for y in equations(traced.closed, "shard_map") for x in places_of(y)[:1]]
    blame = blamed(traced.closed)
    if blame is not None:
        places = (*blame.places, *mapped[:1])
        more = {"values": blame.values, "tried": _shifted(traced, blame, results)}
        return finding(f"rank-rows.{blame.case}", what, places, *evidence, **more)
    tokens, cuts = set(subject.tokens(subject.batches[0])), _Cuts()
    of_batch = [frozenset({"tokens" if x in tokens else "data"}) for x in traced.names]
    cuts.follow(traced.closed, [frozenset[str]()] * traced.variables + of_batch)
    names = [{x[1] for x in cuts.found if x[0] == side} for side in _SIDES]
    own = [x for x in cuts.found if x[1] not in names[0] & names[1]]
    sides = [[x for x in own if x[0] == side] for side in _SIDES]
    places = at(*(x[2] for side in sides for x in side)) or tuple(mapped[:1])
    has_data = not set(traced.names) <= tokens
    for name, side in zip(("the mask's data", "the tokens"), sides if has_data else ((), ()), strict=True):
        said = ", ".join(dict.fromkeys(f"{x[1]} at line {x[2].line}" if x[2] else x[1] for x in side))
        evidence += [f"only {name}: {said}"] if said else []
    # Without such lines, the doctor only knows that the results differ.
    case = "rank-rows" if has_data and any(sides) else "rank-rows.unknown"
    return finding(case, what, places, *evidence)


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


class _Cuts(Flow[frozenset[str]]):
    """Collects operators that cut or reorder only tokens, or only the mask's data: side, name and line."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.found: list[tuple[str, str, Place | None]] = []

    def made(self, eqn: Any, facts: list[frozenset[str]], here: Place | None) -> frozenset[str]:
        if eqn.primitive.name in _CUTS:
            self._note(facts[0], eqn.primitive.name, here)
        return frozenset[str]().union(*facts)

    def entered(
        self, eqn: Any, inside: Any, facts: list[frozenset[str]], here: Place | None
    ) -> list[frozenset[str]]:
        for sides, spec in zip(facts, eqn.params.get("in_specs", ()), strict=False):
            if any(spec):
                self._note(sides, f"in_specs {spec}", here)
        return super().entered(eqn, inside, facts, here)

    def _note(self, sides: frozenset[str], name: str, here: Place | None) -> None:
        self.found += [(side, name, here) for side in sides if len(sides) == 1]


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
            said = moved if any(specs[name]) else "each device holds all of it"
            case = "rank-replicated.in-shardings" if subject.in_shardings else "rank-replicated.argument"
            values = {"name": name, "tokens": tokens[0]}
            yield finding(case, what, (place_of(subject.fn),), said, values=values)


def _axes(spec: Any) -> tuple[Any, Any]:
    """Return the mesh axes of batch elements and of tokens."""
    spec = getattr(spec, "spec", spec) or ()
    return tuple([*spec, None, None][:2])  # type: ignore[return-value]
