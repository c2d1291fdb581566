"""Combinations of compiler and checkpointing around a model, and the smallest combination that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog
from attnspan_lab.doctor.torch.steps import outcome_of
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text
from attnspan_lab.zoo.step import Outcome, differences

__all__ = [
    "FACTORS",
    "Cell",
    "Trial",
    "all_cells",
    "blocks_of",
    "compared",
    "covering",
    "explained",
    "failure",
    "smallest",
    "with_features",
    "without_raising",
]

#: The values of each feature. The first value is the plain one.
FACTORS = {
    "compile": ("none", "block", "whole"),
    "checkpoint": ("none", "selective", "full"),
    "order": ("inside", "around"),
}
_WITHIN = 128  # tolerance in roundings of the parameters' dtype, for the norm of the difference over the norm


@dataclass(frozen=True)
class Cell:
    """One combination. A subclass adds features, each with its plain value as the default.

    Args:
        compile: "none", "block" (each block by itself) or "whole".
        checkpoint: "none", "selective" (attention is saved) or "full".
        order: "inside" (checkpoints within compiled code) or "around" (checkpoints around it).
    """

    compile: str = "none"
    checkpoint: str = "none"
    order: str = "inside"

    @property
    def is_distinct(self) -> bool:
        """Whether no other cell describes the same run. The order needs both a compiler and checkpointing."""
        return self.order == "inside" or "none" not in (self.compile, self.checkpoint)

    def __str__(self) -> str:
        shown = [f"{f.name} {x}" for f in fields(self) if (x := getattr(self, f.name)) != f.default]
        return ", ".join(shown) or "plain"


C = TypeVar("C", bound=Cell)


def all_cells(kind: type[C], factors: Mapping[str, Sequence[str]]) -> list[C]:
    """List every combination of the features' values once."""
    cells = [kind(**dict(zip(factors, values, strict=True))) for values in product(*factors.values())]
    return [x for x in cells if x.is_distinct]


def covering(cells: Iterable[C]) -> list[C]:
    """Choose a few cells that cover each pair of values."""
    cells = list(cells)
    pairs = {x: set(combinations(vars(x).items(), 2)) for x in cells}
    missing, taken = set().union(*pairs.values()), []
    while missing:
        best = max(cells, key=lambda x: len(pairs[x] & missing))
        taken.append(best)
        missing -= pairs[best]
    return [x for x in cells if x in taken]


def smallest(failing: C, fails: Callable[[C], bool]) -> C:
    """Find the smallest part of a failing combination that still fails, by delta debugging.

    Args:
        failing: A cell that fails.
        fails: Returns whether a cell fails.
    """
    changed = True
    while changed:
        changed = False
        for feature in fields(failing):
            plain = replace(failing, **{feature.name: str(feature.default)})
            # The order has no meaning without both features.
            plain = plain if plain.is_distinct else replace(plain, order="inside")
            if plain != failing and fails(plain):
                failing, changed = plain, True
    return failing


def explained(least: Cell, failed: str) -> tuple[str, str, str]:
    """Write the finding, its cause and its remedy for the smallest combination that fails.

    Args:
        least: The combination.
        failed: Its failure.
    """
    if least == Cell():
        what = f"The eager step fails without any feature: {failed}"
        cause = "The model raises, is random in evaluation mode, or keeps state from step to step"
        return what, cause, "Make the eager step run and repeat first: without it, no feature can be compared"
    if "none" not in (least.compile, least.checkpoint):
        return f"The step fails with {least}, and with no smaller combination", "", ""
    remedy = "See the findings of the stage compiled, which name lines" if least.checkpoint == "none" else ""
    remedy = (
        remedy or "Compare the step with a step without checkpoints. Random numbers and state must repeat"
    )
    return f"The step fails with {least} alone", "This feature fails without the others", remedy


class Trial(Protocol):
    """A model, batches of one shape, and steps of it.

    Attributes:
        against: Name of the reference that results are compared with.
        changed: The difference of later batches from the first one, as the subject of a sentence.
    """

    model: nn.Module
    batches: list[Any]
    against: str
    changed: str

    def outcome(self, call: Callable[..., Any], number: int) -> Outcome:
        """Run a step of the batch with this number. ``call`` is the model, compiled or not."""


class _GivenModel:
    """The subject's own model and first batch, in evaluation mode."""

    against = "plain eager mode"
    changed = "the same batch"

    def __init__(self, subject: Subject) -> None:
        self.subject, self.model = subject, subject.model.eval()
        self.batches = subject.batches[:1] * 2

    def outcome(self, call: Callable[..., Any], number: int) -> Outcome:
        return outcome_of(self.subject, call, self.batches[number])


def failure(cell: Cell, subject: Subject, backend: str) -> str:
    """Run the subject's model with a cell's features. Return the failure, or ""."""

    def run() -> str:
        plain, trial = _GivenModel(subject.copy()), _GivenModel(subject.copy())
        want = plain.outcome(plain.model, 0)
        return compared(trial, with_features(cell, trial.model, backend), want)

    return without_raising(run)


def without_raising(run: Callable[[], str]) -> str:
    """Run after a reset of the compiler, and return its text or the error in one line."""
    torch._dynamo.reset()
    try:
        return run()
    except Exception as error:
        return error_text(error)


def compared(trial: Trial, call: Callable[..., Any], want: Outcome) -> str:
    """Check results and gradients, and that nothing breaks graphs or recompiles for other batches."""
    with CompilerLog() as first:
        found = trial.outcome(call, 0)
    if first.breaks:
        times = counted(len(first.breaks), "time")
        return f"the graph breaks {times}: {first.breaks[0].what.partition(': ')[2]}"
    output, gradient = differences(found, want)
    kinds = (x.dtype for x in trial.model.parameters() if x.is_floating_point())
    if not max(output, gradient) <= _WITHIN * torch.finfo(next(kinds, torch.float32)).eps:
        far = f"results are {output:.1e} away from {trial.against}, gradients {gradient:.1e}"
        return f"{far} (norm of the difference over the norm)"
    with CompilerLog() as log:
        for number in range(1, len(trial.batches)):
            trial.outcome(call, number)
    if log.graphs:
        reason = f": {log.recompiles[0].guard}" if log.recompiles else ""
        return f"{trial.changed} recompiles {counted(len(log.graphs), 'graph')}{reason}"
    return ""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the parts of a model that are compiled or checkpointed separately."""
    return [x for part in model.modules() if isinstance(part, nn.ModuleList) for x in part]


def with_features(cell: Cell, model: nn.Module, backend: str) -> Callable[..., Any]:
    """Apply a cell's features to the model. Blocks are changed in place."""
    whole, around = cell.compile == "whole", cell.order == "around"
    for block in blocks_of(model):
        if cell.checkpoint != "none" and not around:
            block.forward = partial(_checkpointed, block.forward, cell.checkpoint)
        if cell.compile == "block":
            block.forward = torch.compile(block.forward, backend=backend)
            if around:
                block.forward = partial(_checkpointed, block.forward, cell.checkpoint)
    call: Callable[..., Any] = torch.compile(model, backend=backend) if whole else model
    return partial(_checkpointed, call, cell.checkpoint) if whole and around else call


def _save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = partial(create_selective_checkpoint_contexts, _save_attention)


def _checkpointed(run: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    more: dict[str, Any] = {"context_fn": _CONTEXTS} if kind == "selective" else {}
    return checkpoint(run, *args, use_reentrant=False, **more, **kwargs)
