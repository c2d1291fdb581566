"""The stages of an examination in JAX. They have the names and the records of the stages for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.attention_costs import costs
from attnspan_lab.doctor.jax.causal_alignment import misaligned
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.clamped_slices import clamped
from attnspan_lab.doctor.jax.compiled import constants, host_calls, untraceable
from attnspan_lab.doctor.jax.constraints import found_mesh
from attnspan_lab.doctor.jax.donated_caches import copied_caches
from attnspan_lab.doctor.jax.head_split import split_wrongly
from attnspan_lab.doctor.jax.hidden_queries import hidden
from attnspan_lab.doctor.jax.hlo import Program
from attnspan_lab.doctor.jax.mesh import compare_mesh, has_shard_map, on_one_device
from attnspan_lab.doctor.jax.one_device import NotAlone
from attnspan_lab.doctor.jax.parity import parity as compare
from attnspan_lab.doctor.jax.recompiles import calls_jitted, recompiles_in, run_batches
from attnspan_lab.doctor.jax.scale_factors import scale_findings, unknown_scales
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.visible_padding import padding_of_others
from attnspan_lab.doctor.jax.visible_pairs import inverted, seen
from attnspan_lab.doctor.jax.watch import Attention, Watcher, watched
from attnspan_lab.doctor.sites import picture, sites
from attnspan_lab.doctor.words import counted, error_text

__all__ = ["STAGES"]

Say = Callable[..., None]


class _Stopped(Exception):
    """A stage cannot go on, for a reason that it says."""

    def __init__(self, **what: Any) -> None:
        self.what = what


def _traced(subject: JaxSubject, batch: Any) -> Traced:
    """Trace a batch, or stop with the reason why JAX cannot."""
    try:
        return Traced.of(subject, batch)
    except Exception as error:
        raise _Stopped(finding=untraceable(error, subject, batch)) from error


def eager(subject: JaxSubject, say: Say, backend: str) -> None:
    """Watch the step, one operator after the other."""
    del backend
    subject, coverage = subject.plain, Coverage()
    largest, counts, known = 0, list[int](), set[Any]()
    for batch in _distinct(subject)[:3]:
        traced = _traced(subject, batch)
        for x in host_calls(traced):
            say(finding=x)
        mapped = has_shard_map(traced)
        try:
            traced = on_one_device(subject, batch, traced) if mapped else traced
        except NotAlone as error:
            none = {"attention calls": 0, "sites": [], "largest tensor": 0}
            why = {"attention": f"it is inside of shard_map: {error}"}
            raise _Stopped(facts=none | {"unchecked": why}) from error
        try:
            size = subject.size(batch)
            watcher, results = watched(traced, size)
        except Exception as error:
            why = {"attention": f"the doctor cannot evaluate the step by operators: {error_text(error)}"}
            raise _Stopped(facts={"unchecked": why}) from error
        program = Program(traced.program().as_text() or "")
        trial = Trial(subject, batch, traced, tuple(watcher.calls))
        others = () if size is None else tuple(padding_of_others(trial, coverage))
        pairs = () if size is None else tuple(seen(trial, coverage))
        # A mask on the axis of the queries, or an inverted mask, also leaves queries without keys.
        lines = {x.places[:1] for x in pairs} & {x.places[:1] for x in watcher.calls if inverted(trial, x)}
        lines |= {x.places[:1] for x in others}
        empty = hidden(trial, results)
        found = (
            *watcher.findings(),
            *clamped(watcher.clamped, results, partial(watched, traced, size, None)),
            *costs(watcher.calls, program, subject, batch),
            *scale_findings(watcher.calls),
            *(x for x in empty if x.places[:1] not in lines),
            *pairs,
            *(() if size is None else (*misaligned(trial), *split_wrongly(trial))),
            *others,
        )
        # The number of a finding is for one step, of the first batch that has the finding.
        for x in found:
            # Devices divide the pairs among them, for example in a ring.
            divided = mapped and x.kind in ("unfused", "dense-mask")
            if x.key not in known and not divided:
                say(finding=x)
        known |= {x.key for x in found}
        largest = max(largest, watcher.largest)
        counts.append(len(watcher.calls))
        _cover(coverage, subject, batch, watcher.calls)
        facts: dict[str, Any] = {"attention calls": counts[0], "largest tensor": largest, **coverage.facts}
        if any(counts):
            facts["checked"] = {"attention": _counted(counts, watcher, mapped=mapped)} | facts["checked"]
        say(facts=facts | picture(x.visible for x in watcher.calls))
        if len(counts) == 1:
            say(facts={"sites": sites((next(iter(x.places), None), x.kernel) for x in watcher.calls)})


def _distinct(subject: JaxSubject) -> list[Any]:
    """Choose one batch of each shape."""

    def shapes(batch: Any) -> str:
        named = subject.named(batch).items()
        return str([(k, x if subject.is_static(k, x) else np.shape(x)) for k, x in named])

    return [x[0] for x in grouped(subject.batches, shapes).values()]


def _counted(counts: list[int], watcher: Watcher, *, mapped: bool) -> str:
    """Say how many attention calls a step makes, and how many its backward pass makes again."""
    said = f"{counted(counts[0], 'call')} a step"
    said += ", with shard_map over one device" * mapped
    said += " (each block counts)" * any(x.kind == "in blocks" for x in watcher.calls)
    if len(set(counts)) > 1:
        said += f" with the first batch, {', '.join(map(str, counts[1:]))} with batches of other shapes"
    return said + (f". The backward pass computes {len(watcher.again)} again" if watcher.again else "")


def _cover(coverage: Coverage, subject: JaxSubject, batch: Any, calls: list[Attention]) -> None:
    """Note checks that need no trial, and checks that were not possible, with the reason."""
    size, padding = subject.size(batch), subject.padding_names(batch)
    if not calls:
        coverage.missed("attention", "no call was seen")
    if why := unknown_scales(calls):
        coverage.missed("scale of scores", why)
    if subject.causal is None:
        coverage.missed("causality", 'not declared. Return {"causal": True} or False')
    elif not subject.causal:
        coverage.made("causality", "you declared that tokens may see later tokens")
    elif subject.has_several_sequences(batch):
        why = "the batch has several sequences, and the doctor does not know which are predicted"
        coverage.missed("causality", why)
    if size is None:
        coverage.missed("documents and padding", "the batch has no tokens (B, S) or (B, S, ...)")
        return
    # An encoder and a step that decodes one token have no packed documents, unless the batch says so.
    if subject.document_ids(batch) is None and subject.causal is not False and size[1] > 1:
        coverage.absent("documents", "the batch has one document, or no segment_ids")
    if subject.valid(batch) is None:
        unmasked = "the tokens have no mask (B, S) and no lengths (B,)"
        coverage.absent("padding", f"{', '.join(padding)} marks no padding" if padding else unmasked)
    for kind in sorted({x.kind for x in calls if x.visible is None}):
        coverage.missed(f"visible pairs of attention {kind}", "they cannot be read")


def compiled(subject: JaxSubject, say: Say, backend: str) -> None:
    """Run all batches under jit, and count compilations."""
    del backend
    subject = subject.plain
    traced = _traced(subject, subject.batches[0])
    run = run_batches(subject, subject.batches)
    if calls_jitted(subject, traced):
        run.again += run_batches(subject, subject.batches[:1], subject.fn).again
    many, one = len(subject.batches), len(_distinct(subject)) == 1 + run.recompiles
    facts = {
        "note": f"{counted(1 + run.recompiles, 'shape')} in {many} batches" if one and run.recompiles else "",
        "graphs": 1 + run.recompiles,
        "breaks": 0,
        "recompiles": run.recompiles,
        "compile seconds": run.compile_seconds,
        "step seconds": run.seconds,
        "timeline": [],
    }
    say(facts=facts)
    caches = copied_caches(traced, subject, subject.batches[0])
    for x in (*recompiles_in(run, subject), *constants(traced, run.seconds[0]), *caches):
        say(finding=x)


def parity(subject: JaxSubject, say: Say, backend: str) -> None:
    """Compare the compiled step with float64, and the step on the mesh with one device."""
    del backend
    traced = _traced(subject.plain, subject.batches[0])
    compare(traced, say)
    _on_mesh(subject, traced, say)


def _on_mesh(subject: JaxSubject, traced: Traced, say: Say) -> bool:
    """Compare the step on its mesh with one device. Return whether there is a mesh.

    A mesh that the step uses by itself has already run, so an error here is the doctor's.
    """
    mesh = found_mesh(subject, traced.closed) if subject.mesh is None else subject.mesh
    if mesh is None:
        return False
    try:
        compare_mesh(replace(subject, mesh=mesh), _staged(say, "ranks"))
    except Exception as error:
        if subject.mesh is not None:
            raise
        say(facts={"unchecked": {"the mesh of the step": f"the doctor failed: {error_text(error)}"}})
    return True


def _staged(say: Say, stage: str) -> Say:
    """Write the stage into findings that have none."""

    def staged(**what: Any) -> None:
        if (found := what.get("finding")) is not None:
            what["finding"] = replace(found, stage=found.stage or stage)
        say(**what)

    return staged


def ranks(subject: JaxSubject, say: Say, backend: str) -> None:
    """Compare the step on the mesh with the step on one device."""
    del backend
    if not _on_mesh(subject, _traced(subject.plain, subject.batches[0]), say):
        what, remedy = "No mesh to compare", 'Return the options "mesh" and "in_shardings" from the factory'
        say(finding=Finding("environment", what, remedy=remedy))


def _absent(name: str, subject: JaxSubject, say: Say, backend: str) -> None:
    del subject, backend
    what, remedy = f"{name} is not possible for JAX", "Leave it out"
    say(finding=Finding("environment", what, remedy=remedy))


def _run(name: str, stage: Callable[[JaxSubject, Say, str], None]) -> Callable[[JaxSubject, Say, str], None]:
    """Run a stage in the context of the subject's mesh. An error of the step is a finding."""

    def run(subject: JaxSubject, say: Say, backend: str) -> None:
        say = _staged(say, name)
        try:
            with subject.context:
                stage(subject, say, backend)
        except _Stopped as stopped:
            say(**stopped.what)
        except Exception as error:
            if (own := untraceable(error, subject, subject.batches[0])).places:
                say(finding=own)
                return
            # No line of the user's raised: the step runs, and the doctor cannot examine it.
            say(facts={"unchecked": {f"the stage {name}": f"the doctor failed: {error_text(error)}"}})

    return run


#: The function of each stage.
STAGES: dict[str, Callable[[JaxSubject, Say, str], None]] = {
    "eager": _run("eager", eager),
    "compiled": _run("compiled", compiled),
    "parity": _run("parity", parity),
    "ranks": _run("ranks", ranks),
    "cure": lambda *x: _absent("--try attnspan", *x),
    "features": lambda *x: _absent("The stage features", *x),
    "without attention": lambda *_: None,
}
