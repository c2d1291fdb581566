"""A document in a packed row against the same document alone. Only positions and leaks make a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, place_here
from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.torch.subject import Subject

_Part = tuple[int, int, int, int]  # batch element, begin, end, and tokens of a row
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
    length = tokens[1].shape[1]
    place = _second(documents.expand(len(tokens[1]), length))
    alone = None if place is None else _alone(batch, length, *place)
    if place is None or alone is None:
        coverage.absent("positions of documents", "the doctor cannot take a document out of the batch")
        return
    row, start, stop = place
    try:
        packed, where, own = _inputs_of_both(subject, batch, alone, length, place)
    except CannotRun as error:
        coverage.absent("positions of documents", str(error))
        return
    coverage.made("positions of documents", "a packed document, and the same document alone")
    part = (row, start, stop, length)
    differs = _difference(packed, part, own, (0, 0, stop - start, stop - start))
    if differs is None:
        return
    name, difference = differs
    what = "A packed document gets other results than the same document alone"
    evidence = (
        f"tokens {start} to {stop - 1} of batch element {row}: relative difference {difference:.1e}",
        f"the first module whose input differs: {name}",
    )
    try:
        texts = _explained(subject, batch, documents.expand(len(tokens[1]), length), part, packed, own)
    except Exception:
        texts = "", "", ""  # The model does not run with the documents in another order.
    # Segments of one recording may share its time axis on purpose.
    severity, shared = ("", ()) if subject.is_causal else ("note", (_SHARED,))
    yield Finding("positions", what, where[name], (*evidence, *shared), *texts, severity=severity)


def first_difference(
    subject: Subject, batch: Any, alone: Any, length: int, place: tuple[int, int, int]
) -> tuple[str, tuple[Place, ...], float] | None:
    """Find the first module whose input differs between a part of a row and the same part alone.

    Args:
        subject: The model.
        batch, alone: The batch, and the part alone.
        length: Number of tokens of the batch.
        place: Batch element, begin and end of the part.

    Returns:
        Name of the module, the line that called it, and the relative difference.

    Raises:
        CannotRun: The model raises for the part alone.
    """
    row, start, stop = place
    packed, where, own = _inputs_of_both(subject, batch, alone, length, place)
    differs = _difference(packed, (row, start, stop, length), own, (0, 0, stop - start, stop - start))
    return None if differs is None else (differs[0], where[differs[0]], differs[1])


def _inputs_of_both(
    subject: Subject, batch: Any, alone: Any, length: int, place: tuple[int, int, int]
) -> tuple[dict[str, Tensor], dict[str, tuple[Place, ...]], dict[str, Tensor]]:
    """Return the modules' inputs for a batch, the lines of the modules, and the inputs for a part alone."""
    _, start, stop = place
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        packed, where = _inputs(subject, batch, length)
        try:
            own, _ = _inputs(subject, alone, stop - start)
        except Exception as error:  # The model may hold data for the whole row.
            why = f"the model raises {type(error).__name__} for one document of the row alone"
            raise CannotRun(why) from error
    return packed, where, own


def _difference(
    one: Mapping[str, Tensor], part: _Part, other: Mapping[str, Tensor], like: _Part
) -> tuple[str, float] | None:
    """Find the first module whose input differs in a part of the rows, with the relative difference."""
    found = None
    for name, x in one.items():
        if name not in other:
            continue
        there, here = _rows(x, *part), _rows(other[name], *like)
        if there is None or here is None or there.shape != here.shape:
            continue
        difference = float((there - here).norm() / here.norm().clamp_min(1e-30))
        differs = difference > ROUNDING.get(x.dtype, 1e-3)
        if differs and found is None:
            found = name, difference
        if name == _RESULT and not differs:
            return None  # Numbers of positions may differ where only their differences count.
    return found


def _explained(
    subject: Subject,
    batch: Mapping[str, Any],
    documents: Tensor,
    part: _Part,
    packed: Mapping[str, Tensor],
    alone: Mapping[str, Tensor],
) -> tuple[str, str, str]:
    """Write cause, remedy and trial: the document moves to the front, and positions start again."""
    _, start, stop, length = part
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        first, _ = _inputs(subject, _moved(batch, *part), length)
        if _difference(packed, part, first, (0, 0, stop - start, length)) is None:
            return (*_OF_LENGTH, "at the front of the row, the document has the same results")
        if "position_ids" not in {**batch, **dict.fromkeys(subject.parameters)}:
            return "", _MADE, ""
        again = {
            **batch,
            "position_ids": _restarted(documents).expand_as(batch.get("position_ids", documents)),
        }
        restarted, _ = _inputs(subject, again, length)
    left = _difference(restarted, part, alone, (0, 0, stop - start, stop - start))
    tried = "with position_ids that start again in each document, "
    if left is None:
        return "", "", f"{tried}it has the same results as alone"
    return (
        "",
        f"{_MADE}. This model makes positions itself",
        f"{tried}the relative difference is {left[1]:.1e}",
    )


def _restarted(documents: Tensor) -> Tensor:
    """Count the tokens of each document from 0."""
    index = torch.arange(documents.shape[1]).expand_as(documents)
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def _moved(batch: Mapping[str, Any], row: int, start: int, stop: int, length: int) -> dict[str, Any]:
    """Keep one row of a batch, and move a document to its front."""
    order = torch.tensor([*range(start, stop), *range(start), *range(stop, length)])
    found = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() > 3 and x.shape[-2:] == (length, length):
            found[name] = x[row % len(x), None][..., order, :][..., order]
        elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length:
            continues = name == "position_ids" and bool((x == torch.arange(length)).all())
            found[name] = x[row % len(x), None][:, slice(None) if continues else order]
    return found


def _second(documents: Tensor) -> tuple[int, int, int] | None:
    """Find the batch element, begin and end of a second document. Padding has negative numbers."""
    for row, ids in enumerate(documents.tolist()):
        begins = [i for i, x in enumerate(ids) if i == 0 or x != ids[i - 1]]
        start, stop = (*begins, len(ids), len(ids))[1:3]
        if start < stop and ids[start] >= 0 and ids.count(ids[start]) == stop - start:
            return row, start, stop
    return None


def _alone(batch: Mapping[str, Any], length: int, row: int, start: int, stop: int) -> dict[str, Any] | None:
    """Cut a document out of a batch. None if a tensor has an unknown layout."""
    found: dict[str, Any] = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            found[name] = x
        elif x.dim() > 3 and x.shape[-2:] == (length, length):
            found[name] = x[row % len(x), None, ..., start:stop, start:stop]
        elif x.dim() > 1 and x.shape[1] == length:
            found[name] = x[row % len(x), None, start:stop]
        elif length in x.shape or name.startswith("cu_"):
            return None
        else:
            found[name] = x
    if "position_ids" in found:
        found["position_ids"] = torch.arange(stop - start).expand_as(found["position_ids"])
    return found


def _rows(x: Tensor, row: int, start: int, stop: int, length: int) -> Tensor | None:
    """Take a document's rows of a result (B, S, ...), (1, S, ...) or (S, ...)."""
    if x.dim() > 1 and x.shape[1] == length:
        return x[row % len(x), start:stop].double()
    return x[start:stop].double() if x.dim() > 1 and len(x) == length else None


def _inputs(
    subject: Subject, batch: Any, length: int
) -> tuple[dict[str, Tensor], dict[str, tuple[Place, ...]]]:
    """Run the model. Return each module's first input and the line that called it, and the result."""
    found: dict[str, Tensor] = {}
    lines: dict[str, tuple[Place, ...]] = {}

    def note(name: str, *given: Any) -> None:
        x = next((y for y in tree_leaves(given) if isinstance(y, Tensor)), None)
        if name not in found and x is not None and length in x.shape[:2]:
            place = place_here()
            found[name], lines[name] = x.detach().clone(), () if place is None else (place,)

    def before(name: str) -> Any:
        return lambda _, args, kwargs: note(name, args, kwargs)

    hooks = [
        module.register_forward_pre_hook(before(name), with_kwargs=True)
        for name, module in subject.model.named_modules()
    ]
    training = [x for x in subject.model.modules() if x.training]
    subject.model.eval()  # Dropout is no difference.
    try:
        result = subject.results(subject.call(subject.model, batch), {})  # With the rows of padding.
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    note(_RESULT, list(result.values()))
    return found, lines
