"""The stages of an examination in JAX. They have the names and the records of the stages for torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.attention import costs
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
from attnspan_lab.doctor.jax.shown_padding import padding_of_others
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.jax.visible_pairs import seen
from attnspan_lab.doctor.jax.watch import Attention, Watcher, watched
from attnspan_lab.doctor.words import counted

__all__ = ["STAGES"]

Say = Callable[..., None]


def _traced(subject: JaxSubject, batch: Any, say: Say, stage: str) -> Traced | None:
    """Trace a batch, or report why JAX cannot."""
    try:
        return Traced.of(subject, batch)
    except Exception as error:
        say(finding=untraceable(error, subject, batch, stage))
        return None


def eager(subject: JaxSubject, say: Say, backend: str) -> None:
    """Watch the step, one operator after the other."""
    del backend
    subject, coverage = subject.plain, Coverage()
    largest, counts, known = 0, list[int](), set[Any]()
    for batch in _distinct(subject)[:3]:
        traced = _traced(subject, batch, say, "eager")
        if traced is None:
            return
        for x in host_calls(traced):
            say(finding=replace(x, stage="eager"))
        mapped = has_shard_map(traced)
        try:
            traced = on_one_device(subject, batch, traced) if mapped else traced
        except NotAlone as error:
            why = f'it is inside of shard_map: {error}. Return "one_device", the function without shard_map'
            none = {"attention calls": 0, "sites": [], "largest tensor": 0}
            say(facts=none | {"unchecked": {"attention": why}})
            return
        try:
            watcher, results = watched(traced, subject.size(batch))
        except Exception as error:
            why = f"the doctor cannot evaluate the step by operators: {type(error).__name__}: {error}"[:200]
            say(facts={"unchecked": {"attention": why}})
            return
        program = Program(traced.program().as_text() or "")
        trial, size = Trial(subject, batch, traced, tuple(watcher.calls)), subject.size(batch)
        others = () if size is None else tuple(padding_of_others(trial, coverage))
        # A mask on the axis of the queries also leaves queries without keys.
        lines = {x.places[:1] for x in others}
        empty = hidden(watcher.calls, results, subject.valid(batch), traced, size)
        found = (
            *watcher.findings(),
            *clamped(watcher.clamped, results, traced, partial(_again, size=size)),
            *costs(watcher.calls, program, subject, batch),
            *scale_findings(watcher.calls),
            *(x for x in empty if x.places[:1] not in lines),
            *(() if size is None else (*seen(trial, coverage), *misaligned(trial), *split_wrongly(trial))),
            *others,
        )
        # The number of a finding is for one step, of the first batch that has the finding.
        for x in found:
            # Devices divide the pairs among them, for example in a ring.
            divided = mapped and x.kind in ("unfused", "dense-mask")
            if _key(x) not in known and not divided:
                say(finding=replace(x, stage="eager"))
        known |= set(map(_key, found))
        largest = max(largest, watcher.largest)
        counts.append(len(watcher.calls))
        _cover(coverage, subject, batch, watcher.calls)
        facts: dict[str, Any] = {"attention calls": counts[0], "largest tensor": largest, **coverage.facts}
        if any(counts):
            facts["checked"] = {"attention": _counted(counts, watcher, mapped=mapped)} | facts["checked"]
        say(facts=facts | ({"sites": _sites(watcher.calls)} if len(counts) == 1 else {}))
        if (picture := _picture(watcher.calls)) is not None:
            say(facts={"mask": picture})


def _distinct(subject: JaxSubject) -> list[Any]:
    """Choose one batch of each shape."""
    found: dict[Any, Any] = {}
    for batch in subject.batches:
        named = subject.named(batch).items()
        shapes = [(k, x if subject.is_static(k, x) else np.shape(x)) for k, x in named]
        found.setdefault(str(shapes), batch)
    return list(found.values())


def _again(traced: Traced, changed: set[Any], size: tuple[int, int] | None) -> list[Value]:
    return watched(traced, size, changed=changed)[1]


def _key(x: Finding) -> Any:
    return x.kind, x.severity, x.cause, x.places[:1] or x.what


def _counted(counts: list[int], watcher: Watcher, *, mapped: bool) -> str:
    """Say how many attention calls a step makes, and how many its backward pass makes again."""
    same = len(set(counts)) == 1
    said = f"{counted(counts[0], 'call')} a step"
    said += ", with shard_map over one device" * mapped
    said += " (each block counts)" if any(x.kind == "in blocks" for x in watcher.calls) else ""
    said += (
        ""
        if same
        else f" with the first batch, {', '.join(map(str, counts[1:]))} with batches of other shapes"
    )
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
        why = (
            f"{', '.join(padding)} marks no padding"
            if padding
            else "the tokens have no mask (B, S) and no lengths (B,)"
        )
        coverage.absent("padding", why)
    for kind in sorted({x.kind for x in calls if x.visible is None}):
        coverage.missed(f"visible pairs of attention {kind}", "they cannot be read")


def _sites(calls: list[Attention]) -> list[list[str]]:
    """Count the calls of each line."""
    names = {"written out": "written out, which stores all scores", "in blocks": "written out in blocks"}
    found = Counter((str(x.places[0]) if x.places else "?", names.get(x.kind, x.kind)) for x in calls)
    return [[place, kernel, str(count)] for (place, kernel), count in found.items()]


def _picture(calls: list[Attention]) -> list[str] | None:
    """Draw the mask of batch element 0 in the last call, as a string of 0 and 1 for each query."""
    shown = [x.visible for x in calls if x.visible is not None and max(x.visible.shape[1:]) <= 256]
    return ["".join("01"[int(x)] for x in row) for row in shown[-1][0].tolist()] if shown else None


def compiled(subject: JaxSubject, say: Say, backend: str) -> None:
    """Run all batches under jit, and count compilations."""
    del backend
    subject = subject.plain
    traced = _traced(subject, subject.batches[0], say, "compiled")
    if traced is None:
        return
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
        say(finding=replace(x, stage="compiled"))


def parity(subject: JaxSubject, say: Say, backend: str) -> None:
    """Compare the compiled step with float64, and the step on the mesh with one device."""
    del backend
    plain, batch = subject.plain, subject.batches[0]
    traced = _traced(plain, batch, say, "parity")
    if traced is not None:
        compare(traced, _staged(say, "parity"))
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
        why = f"the doctor failed: {type(error).__name__}: {error}"[:200]
        say(facts={"unchecked": {"the mesh of the step": why}})
        return True
    return True


def _staged(say: Say, stage: str) -> Say:
    """Write the stage into findings."""

    def staged(**what: Any) -> None:
        found = what.get("finding")
        say(**what | ({"finding": replace(found, stage=stage)} if isinstance(found, Finding) else {}))

    return staged


def ranks(subject: JaxSubject, say: Say, backend: str) -> None:
    """Compare the step on the mesh with the step on one device."""
    del backend
    traced = _traced(subject.plain, subject.batches[0], say, "ranks")
    if traced is not None and not _on_mesh(subject, traced, say):
        what, remedy = "No mesh to compare", 'Return the options "mesh" and "in_shardings" from the factory'
        say(finding=Finding("environment", what, remedy=remedy, stage="ranks"))


def _absent(name: str, subject: JaxSubject, say: Say, backend: str) -> None:
    del subject, backend
    what, remedy = f"{name} is not possible for JAX", "Leave it out"
    say(finding=Finding("environment", what, remedy=remedy))


def _run(name: str, stage: Callable[[JaxSubject, Say, str], None]) -> Callable[[JaxSubject, Say, str], None]:
    """Run a stage in the context of the subject's mesh. An error of the step is a finding."""

    def run(subject: JaxSubject, say: Say, backend: str) -> None:
        try:
            with subject.context:
                stage(subject, say, backend)
        except Exception as error:
            if (own := untraceable(error, subject, subject.batches[0], name)).places:
                say(finding=own)
                return
            # No line of the user's raised: the step runs, and the doctor cannot examine it.
            why = f"the doctor failed: {type(error).__name__}: {error}"[:200]
            say(facts={"unchecked": {f"the stage {name}": why}})

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
