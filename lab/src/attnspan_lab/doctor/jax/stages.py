"""The stages of an examination in JAX. They have the names and the records of the stages for torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.aligned import misaligned
from attnspan_lab.doctor.jax.alone import NotAlone
from attnspan_lab.doctor.jax.attention import costs
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.compiled import constants, host_calls, untraceable
from attnspan_lab.doctor.jax.constraints import found_mesh
from attnspan_lab.doctor.jax.donated import copied_caches
from attnspan_lab.doctor.jax.foreign import seen
from attnspan_lab.doctor.jax.hidden import hidden
from attnspan_lab.doctor.jax.hlo import Program
from attnspan_lab.doctor.jax.mesh import compare_mesh, has_shard_map, on_one_device
from attnspan_lab.doctor.jax.parity import parity as compare
from attnspan_lab.doctor.jax.recompiles import calls_jitted, recompiles_in, run_batches
from attnspan_lab.doctor.jax.scaled import scale_findings, unknown_scales
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.watch import Attention, watched
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
    subject = subject.plain
    largest, checked, unchecked = 0, dict[str, str](), dict[str, str]()
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
        for x in (
            *costs(watcher.calls, program, subject, batch),
            *scale_findings(watcher.calls),
            *hidden(watcher.calls, results, subject.valid(batch), traced, size),
            *(() if size is None else (*seen(trial), *misaligned(trial))),
        ):
            # Devices divide the pairs among them, for example in a ring.
            if not (mapped and x.kind in ("unfused", "dense-mask")):
                say(finding=replace(x, stage="eager"))
        largest = max(largest, watcher.largest)
        unchecked |= _unchecked(subject, batch, watcher.calls)
        said = f"{counted(len(watcher.calls), 'call')} a step{', with shard_map over one device' * mapped}"
        checked |= {"attention": said} if watcher.calls else {}
        facts = {"attention calls": len(watcher.calls), "sites": _sites(watcher.calls)}
        say(facts=facts | {"largest tensor": largest, "checked": checked, "unchecked": unchecked})
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


def _unchecked(subject: JaxSubject, batch: Any, calls: list[Attention]) -> dict[str, str]:
    """Say which checks were not possible, and why."""
    found = {}
    if not calls:
        found["attention"] = "no call was seen"
    if why := unknown_scales(calls):
        found["scale of scores"] = why
    if subject.causal is None:
        found["causality"] = 'not declared. Return {"causal": True} or False'
    elif subject.causal and subject.has_several_sequences(batch):
        found["causality"] = (
            "the batch has several sequences, and the doctor does not know which are predicted"
        )
    if subject.size(batch) is None:
        found["documents and padding"] = "the batch has no tokens (B, S) or (B, S, ...)"
    elif subject.document_ids(batch) is None:
        found["documents"] = "the batch has one document, or no segment_ids"
    unread = {x.kind for x in calls if x.visible is None}
    return found | {f"visible pairs of attention {x}": "they cannot be read" for x in sorted(unread)}


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
    facts = {
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


#: Stages, keyed by name.
STAGES: dict[str, Callable[[JaxSubject, Say, str], None]] = {
    "eager": _run("eager", eager),
    "compiled": _run("compiled", compiled),
    "parity": _run("parity", parity),
    "ranks": _run("ranks", ranks),
    "cure": lambda *x: _absent("--try attnspan", *x),
    "features": lambda *x: _absent("The stage features", *x),
    "without attention": lambda *_: None,
}
