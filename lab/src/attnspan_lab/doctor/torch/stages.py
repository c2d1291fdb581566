"""The stages of an examination. Each one runs in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.guarded import guarded, is_of_freed_graph, why_not_made
from attnspan_lab.doctor.places import lines_of_error
from attnspan_lab.doctor.sites import picture, sites
from attnspan_lab.doctor.torch.cost.gradients import TOPIC, gradient_findings
from attnspan_lab.doctor.torch.cost.inference_mode import with_no_grad
from attnspan_lab.doctor.torch.cost.kept_graphs import kept_findings
from attnspan_lab.doctor.torch.cost.randomness import random_findings
from attnspan_lab.doctor.torch.cost.recompiles import Trials, recompiles_in
from attnspan_lab.doctor.torch.isolation.packing import position_findings
from attnspan_lab.doctor.torch.masks.call_costs import findings_of, sites_of, with_caller
from attnspan_lab.doctor.torch.masks.dense_masks import DenseMasks
from attnspan_lab.doctor.torch.masks.written_out import written_findings
from attnspan_lab.doctor.torch.matrix import FACTORS, Cell, all_cells, covering, explained, failure, smallest
from attnspan_lab.doctor.torch.numbers.parity import parity
from attnspan_lab.doctor.torch.operand_checks import Wiring
from attnspan_lab.doctor.torch.ranks import compare_ranks
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import copied_model
from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog, compile_error
from attnspan_lab.doctor.torch.recording.watch import Watcher, watching
from attnspan_lab.doctor.torch.restored_state import State
from attnspan_lab.doctor.torch.steps import (
    compiled_form,
    copied,
    outcome_of,
    run_compiled,
    step_runs,
)
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.torch.swap import implementation, swapped
from attnspan_lab.doctor.words import counted, error_text, first_line
from attnspan_lab.zoo.step import Outcome, differences
from attnspan_lab.zoo.watch import profiled

__all__ = ["STAGES", "Say", "compiled", "cure", "eager", "features", "parity", "ranks"]

Say = Callable[..., None]
_OPERATOR = "attnspan::attention"
_KEPT_GRAPH = (
    "a batch is a decode step whose cache holds tensors of the graph of an earlier step. The backward pass "
    "of that step has freed the graph, so the doctor examined the decode step without gradients"
)


def eager(subject: Subject, say: Say, backend: str) -> None:
    """Watch the model's eager steps."""
    del backend
    checks = _Checks(Wiring(_unused(subject)))

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            say(finding=with_caller(finding, checks.calls))

    calls = largest = 0
    chosen = _distinct(subject)
    for batch in [*subject.more, *subject.batches]:
        if not any(batch is x for x in chosen):
            checks.add(subject, batch)
            continue
        with _repeatable(subject, batch) as error:
            if error is not None:
                runs = step_runs(subject, batch, backward=False)
                if runs and not subject.model.training and is_of_freed_graph(error):
                    checks.coverage.missed("gradients of decode steps", _KEPT_GRAPH)
                else:
                    tell([_raised(error)])
                if not runs:
                    return
            watcher = _watched(subject, batch, checks.coverage, backward=error is None)
            if watcher is None:
                continue
            tell(checks.findings(subject, batch, watcher, backward=error is None))
        say(facts=checks.coverage.facts)
        calls = max(calls, sum(not x.recomputed for x in watcher.calls))
        largest = max(largest, watcher.largest)
        kernels = sites((x.place, _kernel(x)) for x in watcher.calls)
        say(facts={"attention calls": calls, "sites": kernels, "largest tensor": largest})
        say(facts=picture(x.visible for x in watcher.calls))
    tell(checks.last())
    say(facts=checks.coverage.facts)


@contextmanager
def _repeatable(subject: Subject, batch: Any) -> Iterator[Exception | None]:
    """Run an eager step, and repeat it in the block from the state before it, such as an empty cache.

    Yields:
        The error of the step, or None.
    """
    subject.start, failed = State(subject.model), None
    try:
        with torch.compiler.set_stance("force_eager"):
            subject.step(subject.model, batch)
    except Exception as error:
        failed = error
    after = State(subject.model)
    try:
        yield failed
    finally:
        subject.start = None
        after.restore()


@dataclass
class _Checks:
    """Checks of eager steps, and their record over all batches."""

    wiring: Wiring
    coverage: Coverage = field(default_factory=Coverage)
    masks: DenseMasks = field(default_factory=DenseMasks)
    calls: list[Attention] = field(default_factory=list)

    def findings(
        self, subject: Subject, batch: Any, watcher: Watcher, *, backward: bool
    ) -> Iterator[Finding]:
        """Yield the findings of a watched step.

        Args:
            subject, batch: The step.
            watcher: Its record.
            backward: Whether the step runs a backward pass.
        """
        coverage, leaks = self.coverage, False
        self.calls += watcher.calls
        parameters = dict(subject.model.named_parameters())
        has_gradients = any(x.grad is not None for x in parameters.values())
        left = [k for k, x in parameters.items() if x.requires_grad and x.grad is None]
        self.wiring.record(subject, batch, watcher.calls, coverage)
        for finding in findings_of(watcher, subject, batch, self.masks, coverage, self.wiring.step):
            leaks = leaks or finding.kind in ("leak", "mask-lost")
            yield self.wiring.explained(finding)
        yield from self.wiring.findings(watcher.calls, coverage, leaks=leaks)
        if not leaks:
            yield from guarded("positions", position_findings(subject, batch, coverage), coverage)
        if backward:
            yield from guarded("random numbers", random_findings(subject, batch), coverage)
            yield from guarded("kept tensors", kept_findings(subject, batch), coverage)
        if has_gradients:
            yield from guarded(TOPIC, gradient_findings(subject, batch, left, coverage), coverage)
            coverage.made("gradients", "the backward pass ran")
        else:
            why = "no parameter has a gradient" if backward else "the backward pass raises"
            coverage.absent("gradients", why)

    def add(self, subject: Subject, batch: Any) -> None:
        """Run the forward pass of another batch. Remedies of masks must also hold in its calls."""
        watcher = _watched(subject, batch, self.coverage, backward=False)
        if watcher is not None:
            self.calls += watcher.calls
            for site in sites_of(watcher, subject, batch):
                self.masks.add(site)

    def last(self) -> Iterator[Finding]:
        """Yield the findings on all batches."""
        yield from written_findings(self.calls)
        yield from guarded("dense masks", self.masks.findings(), self.coverage)
        yield from self.wiring.last(self.coverage)


def _watched(subject: Subject, batch: Any, coverage: Coverage, *, backward: bool) -> Watcher | None:
    """Run a step again, and watch it. None if it raises, although it did not raise the first time."""
    try:
        with watching(subject.rows(batch), subject.named(batch)) as watcher, torch.set_grad_enabled(backward):
            subject.step(subject.model, batch, backward=backward)
    except Exception as error:
        coverage.missed("attention", why_not_made(error))
        return None
    return watcher


def _unused(subject: Subject) -> torch.nn.Module | None:
    """Copy the model before its first call. None if the model cannot be copied."""
    try:
        return copied_model(subject.model)
    except Exception:
        return None


def _kernel(call: Attention) -> str:
    """Name the kernel of a call. Recomputations have names of their own."""
    again = ", in the backward pass" if call.recomputed else ""
    return f"{call.kernel or f'{call.kind}, which stores all scores'}{again}"


def _distinct(subject: Subject) -> list[Any]:
    """Choose a batch of each of three shapes, and a second one with other masks or documents.

    A model that keeps masks by shape is right for the first batch of a shape, and wrong for the second one.
    """
    found: dict[Any, Any] = {}
    second: list[Any] = []
    for batch in [*subject.more, *subject.batches]:
        named = subject.named(batch)
        first = found.setdefault(tuple((k, tuple(x.shape)) for k, x in named.items()), batch)
        if first is not batch and not second and _masks_of(subject, first) != _masks_of(subject, batch):
            second = [batch]
    return [*list(found.values())[:3], *second]


def _masks_of(subject: Subject, batch: Any) -> list[Any]:
    """List the documents and the padding of a batch as plain numbers."""
    said = subject.declared(batch)
    return [None if x is None else x.tolist() for x in (said.documents, said.valid)]


def _raised(error: BaseException) -> Finding:
    remedy = ""
    if is_of_freed_graph(error):
        remedy = (
            "If you train with these steps, detach the tensors that the model keeps from the step before: "
            "x.detach(). If they are decode steps, return the model in evaluation mode: model.eval()"
        )
    if "FlexAttention does not support backward on CPU" in str(error):
        remedy = "Train on a GPU, or call attnspan.torch.attention, which has a backward pass on CPU"
    what = f"The model's eager step raises {error_text(error)}"
    return Finding("error", what, tuple(lines_of_error(error)[:3]), remedy=remedy)


def compiled(subject: Subject, say: Say, backend: str) -> None:
    """Compile the model, unless it compiles itself, and run all batches."""
    before = copied(subject)
    log, error, seconds = run_compiled(subject, backend)
    ran = f"{counted(len(seconds), 'batch', 'batches')} of {len(subject.batches)}, traced with {backend}"
    say(facts=_counts(log) | _times(log, seconds) | {"checked": {"compiler": ran}})
    if error is not None:
        say(finding=with_no_grad(compile_error(error), before, backend))
    trials = Trials(log, before, backend)
    for finding in log.breaks:
        say(finding=trials.of_break(finding))
    for finding in recompiles_in(log) if len(seconds) == len(subject.batches) else ():
        say(finding=trials.of_recompile(finding))


def without_attention(subject: Subject, say: Say, backend: str) -> None:
    """Compile the model with the identity instead of attention, to test whether attention causes a failure.

    The result counts only if no attention call is left.
    """
    seen = _attention_in(subject)
    say(facts={"lines": sorted({line for x in seen for line in x.lines})})
    with swapped("identity"), implementation(subject.model, "identity"):
        left = _attention_in(subject)
        if left or not seen:
            kernels = ", ".join(sorted({x.kernel or x.kind for x in left}))
            say(facts={"left": kernels or "no attention call was observed"})
            return
        log, error, _ = run_compiled(subject, backend)
    say(facts=_counts(log))
    for finding in (*([] if error is None else [compile_error(error)]), *log.breaks):
        say(finding=finding)


def _attention_in(subject: Subject) -> list[Attention]:
    """List the attention calls of a forward pass."""
    batch = subject.batches[0]
    with watching(subject.rows(batch)) as watcher, torch.no_grad():
        subject.step(subject.model, batch, backward=False)
    return watcher.calls


def _counts(log: CompilerLog) -> dict[str, int]:
    return {"graphs": log.forward_graphs, "breaks": len(log.breaks), "recompiles": len(log.recompiles)}


def _times(log: CompilerLog, seconds: list[float]) -> dict[str, Any]:
    return {
        "compile seconds": log.compile_seconds,
        "step seconds": seconds,
        "timeline": [(x.function, x.start, x.end, x.forward, x.operators) for x in log.graphs],
    }


def cure(subject: Subject, say: Say, backend: str) -> None:
    """Run compiled steps with the model's own attention and with attnspan's, and compare."""
    after, left = copied(subject), list[Finding]()
    with swapped("attnspan"), implementation(after.model, "attnspan"):
        eager(after, lambda **what: left.append(what["finding"]) if "finding" in what else None, backend)
        found, out, failures = _measured(after, backend)
    # The model's own attention may crash the process, so attnspan's results are reported first.
    say(facts={"attnspan": found, "left": [x.label for x in (*left, *failures)]})
    before, want, _ = _measured(subject, backend)
    say(facts={"own": before})
    if after is subject:
        why = "the model cannot be copied, so the steps with attnspan's attention may have changed it"
        say(facts={"unchecked": {"differences from attnspan's attention": why}})
        return
    if want is None or out is None:
        return
    output, gradient = differences(out, want)
    say(facts={"difference": [output, gradient]})


def _measured(subject: Subject, backend: str) -> tuple[dict[str, Any], Outcome | None, list[Finding]]:
    """Measure breaks, recompilations and graphs of all batches, and time and memory of the last step."""
    log, error, _ = run_compiled(subject, backend)
    found: dict[str, Any] = {**_counts(log), "error": first_line(error, 200) if error else ""}
    failures = [*log.breaks, *recompiles_in(log)]
    if error is not None:
        return found, None, [compile_error(error), *failures]
    model, batch = compiled_form(subject.model, backend), subject.batches[-1]
    with torch.set_grad_enabled(step_runs(subject, batch)):
        outcome = outcome_of(subject, model, batch)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            subject.step(model, batch)
            seconds.append(time.perf_counter() - start)
        _, calls, peak = profiled(lambda: subject.step(model, batch))
    found |= {"step seconds": min(seconds), "peak bytes": peak, "attnspan calls": calls.get(_OPERATOR, 0)}
    return found, outcome, failures


def features(subject: Subject, say: Say, backend: str) -> None:
    """Combine compiler and checkpointing, and find the smallest combination that fails."""
    known: dict[Cell, str] = {}

    def said_of(cell: Cell) -> str:
        if cell not in known:
            known[cell] = failure(cell, subject, backend)
            say(cell={**asdict(cell), "ranks": "one", "result": known[cell]})
        return known[cell]

    failing = next((x for x in covering(all_cells(Cell, FACTORS)) if said_of(x)), None)
    if failing is not None:
        least = smallest(failing, lambda x: bool(said_of(x)))
        what, cause, remedy = explained(least, said_of(least))
        say(finding=Finding("combination", what, (), (said_of(least),), cause, remedy))


def ranks(subject: Subject, say: Say, backend: str) -> None:
    """Compare the model's step on two ranks with the step on one."""
    del backend
    step = subject.expected.get("step")
    if step is None:
        what = "No step to compare: the third value of the factory has no 'step'"
        remedy = "Return a function step(batch, mesh) that returns named tensors"
        say(finding=Finding("environment", what, remedy=remedy))
        return
    for finding in compare_ranks(subject):
        say(finding=finding)


#: The function of each stage.
STAGES: dict[str, Callable[[Subject, Say, str], None]] = {
    "eager": eager,
    "compiled": compiled,
    "without attention": without_attention,
    "parity": parity,
    "cure": cure,
    "features": features,
    "ranks": ranks,
}
