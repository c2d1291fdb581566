"""A document in a packed row against the same document alone. Only positions and leaks make a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, place_here
from attnspan_lab.doctor.torch.isolation.cutting import sample_of
from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.torch.recording.changes import evaluating
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Part", "different_module", "position_findings"]

_OF_LENGTH = (
    "The results depend on the length of the row, not on the place of the document in it",
    "Make scales and biases from the length of each document, not from the length of the row",
)
_MADE = (
    "Start positions again at 0 in each document, where the model makes them: "
    "index - torch.where(starts, index, 0).cummax(-1).values, with starts True at the first token of each "
    "document"
)
# Relative difference that is not rounding. Other lengths of a row change the order of sums.
_RESULT = "the result"
_SHARED = "if the segments are parts of one recording or text, positions may continue, and this is right"
_TOPIC = "positions of documents"


class Part(NamedTuple):
    """Neighbouring tokens of a batch: batch element, begin, end, and number of tokens of a row."""

    row: int
    start: int
    stop: int
    length: int

    @property
    def alone(self) -> Part:
        """The same tokens in a batch of their own."""
        return Part(0, 0, self.stop - self.start, self.stop - self.start)

    def cut(self, subject: Subject, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Take the tokens out of a batch."""
        found = self.picked(subject, batch, torch.arange(self.start, self.stop))
        if "position_ids" in found:
            found["position_ids"] = torch.arange(self.alone.length).expand_as(found["position_ids"])
        return found

    def picked(self, subject: Subject, batch: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
        """Take tokens of the row out of a batch.

        Raises:
            CannotRun: A tensor has an unknown layout.
        """
        if any(x.startswith("cu_") for x in batch):
            raise CannotRun("the doctor cannot take tokens out of the batch")
        return dict(sample_of(subject, batch, self.row).cut(dict(batch), index))

    def rows(self, x: Tensor) -> Tensor | None:
        """Take the rows of the tokens out of a result (B, S, ...), (1, S, ...) or (S, ...)."""
        if x.dim() > 1 and x.shape[1] == self.length:
            return x[self.row % len(x), self.start : self.stop].double()
        return x[self.start : self.stop].double() if x.dim() > 1 and len(x) == self.length else None


class Difference(NamedTuple):
    """The first module whose input differs, the line that called it, and the relative difference."""

    module: str
    places: tuple[Place, ...]
    size: float

    @property
    def text(self) -> str:
        """Name the module."""
        return f"the first module whose input differs: {self.module}"


def position_findings(subject: Subject, batch: Any, coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding if a document's results depend on its place in the row.

    Args:
        subject: A model without leaks between documents.
        batch: A batch of packed documents. Other batches give no finding.
        coverage: Collects the checks.
    """
    documents, tokens = subject.declared(batch).documents, subject.tokens(batch)
    if documents is None or tokens is None or not isinstance(batch, Mapping):
        return
    documents = documents.expand(tokens[1].shape[:2])
    part = _second(documents)
    if part is None:
        coverage.absent(_TOPIC, "the doctor cannot take a document out of the batch")
        return
    try:
        alone = part.cut(subject, batch)
        found = different_module(subject, batch, part, alone)
    except CannotRun as error:
        coverage.absent(_TOPIC, str(error))
        return
    coverage.made(_TOPIC, "a packed document, and the same document alone")
    if found is None:
        return
    what = "A packed document gets other results than the same document alone"
    size = f"relative difference {found.size:.1e}"
    evidence = f"tokens {part.start} to {part.stop - 1} of batch element {part.row}: {size}", found.text
    try:
        texts = _explained(subject, batch, documents, part, alone)
    except Exception:
        texts = "", "", ""  # The model does not run with the documents in another order.
    # Segments of one recording may share its time axis on purpose.
    severity, shared = ("", ()) if subject.is_causal else ("note", (_SHARED,))
    yield Finding("positions", what, found.places, (*evidence, *shared), *texts, severity=severity)


def different_module(
    subject: Subject, batch: Any, part: Part, other: Any, like: Part | None = None
) -> Difference | None:
    """Find the first module whose input differs between a part of a batch and the same tokens in another one.

    Args:
        subject: The model.
        batch, part: A batch, and the part of it.
        other, like: The other batch, and the same tokens in it. Default: the other batch has them alone.

    Raises:
        CannotRun: The model raises for the other batch.
    """
    like, found = like or part.alone, None
    with evaluating(subject.model):
        inputs = _inputs(subject, batch, part.length)
        try:
            others = _inputs(subject, other, like.length)
        except Exception as error:  # The model may hold data for the whole row.
            why = f"the model raises {type(error).__name__} for one document of the row alone"
            raise CannotRun(why) from error
    for name in (x for x in inputs if x in others):
        (x, places), (y, _) = inputs[name], others[name]
        there, here = part.rows(x), like.rows(y)
        if there is None or here is None or there.shape != here.shape:
            continue
        size = float((there - here).norm() / here.norm().clamp_min(1e-30))
        differs = size > ROUNDING.get(x.dtype, 1e-3)
        if differs and found is None:
            found = Difference(name, places, size)
        if name == _RESULT and not differs:
            return None  # Numbers of positions may differ where only their differences count.
    return found


def _explained(
    subject: Subject, batch: Mapping[str, Any], documents: Tensor, part: Part, alone: Any
) -> tuple[str, str, str]:
    """Write cause, remedy and trial: the document moves to the front, and positions start again."""
    _, start, stop, length = part
    order = torch.tensor([*range(start, stop), *range(start), *range(stop, length)])
    moved = part.picked(subject, batch, order)
    positions = batch.get("position_ids")
    if positions is not None and bool((positions == torch.arange(length)).all()):
        moved["position_ids"] = positions[:1]  # They count the tokens of the row.
    if different_module(subject, batch, part, moved, Part(0, 0, stop - start, length)) is None:
        return (*_OF_LENGTH, "at the front of the row, the document has the same results")
    if "position_ids" not in {**batch, **dict.fromkeys(subject.parameters)}:
        return "", _MADE, ""
    restarted = _restarted(documents)
    again = {**batch, "position_ids": restarted if positions is None else restarted.expand_as(positions)}
    left = different_module(subject, again, part, alone)
    tried = "with position_ids that start again in each document, "
    if left is None:
        return "", "", f"{tried}it has the same results as alone"
    remedy = f"{_MADE}. This model makes positions itself"
    return "", remedy, f"{tried}the relative difference is {left.size:.1e}"


def _restarted(documents: Tensor) -> Tensor:
    """Count the tokens of each document from 0."""
    index = torch.arange(documents.shape[1]).expand_as(documents)
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def _second(documents: Tensor) -> Part | None:
    """Find a second document. Padding has negative numbers."""
    for row, ids in enumerate(documents.tolist()):
        begins = [i for i, x in enumerate(ids) if i == 0 or x != ids[i - 1]]
        start, stop = (*begins, len(ids), len(ids))[1:3]
        if start < stop and ids[start] >= 0 and ids.count(ids[start]) == stop - start:
            return Part(row, start, stop, len(ids))
    return None


def _inputs(subject: Subject, batch: Any, length: int) -> dict[str, tuple[Tensor, tuple[Place, ...]]]:
    """Run the model, and return each module's first input with the line that called it, and the result."""
    found: dict[str, tuple[Tensor, tuple[Place, ...]]] = {}

    def note(name: str, *given: Any) -> None:
        x = next((y for y in tree_leaves(given) if isinstance(y, Tensor)), None)
        if name not in found and x is not None and length in x.shape[:2]:
            found[name] = x.detach().clone(), at(place_here())

    def before(name: str) -> Any:
        return lambda _, args, kwargs: note(name, args, kwargs)

    hooks = [
        module.register_forward_pre_hook(before(name), with_kwargs=True)
        for name, module in subject.model.named_modules()
    ]
    try:
        result = subject.results(subject.call(subject.model, batch), {})  # With the rows of padding.
    finally:
        for hook in hooks:
            hook.remove()
    note(_RESULT, list(result.values()))
    return found
