"""Rotary positions: with equal tokens, scores must depend on the distance of query and key alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding, texts_of
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.isolation.axes import source_of
from attnspan_lab.doctor.torch.numbers.rotary_tables import Tables
from attnspan_lab.doctor.torch.recording.attention_call import HIDDEN
from attnspan_lab.doctor.torch.recording.calls import Call, Step

__all__ = ["rotary_findings"]

_ROUNDING, _TURNED = 1e-4, 1e-2  # Relative spread of scores, and of norms that no rotation changes so much.
_LONGEST = 256  # positions that are compared
_TOPIC = "rotary positions"


def rotary_findings(step: Step, coverage: Coverage, done: set[Place]) -> Iterator[Finding]:
    """Yield lines with rotary tables whose scores of equal tokens depend on more than the distance.

    Args:
        step: The step. Padding and packed documents move positions, so such samples are not used.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    found, said = step.subject.tokens(step.batch), step.subject.declared(step.batch)
    if found is None or said.documents is not None or found[1].shape[1] < 4:
        return
    name, tokens = found
    valid = torch.ones(tokens.shape[:2]).bool() if said.valid is None else said.valid
    row = next((i for i, x in enumerate(valid.expand(tokens.shape[:2])) if bool(x.all())), None)
    if row is None or not any(_fits(x, tokens) for x in step.calls):
        return
    batch = step.subject.with_tokens(step.batch, name, tokens[:, :1].expand_as(tokens).clone())
    tables, swapped = Tables(tokens.shape[1]), Tables(tokens.shape[1], swap=True)
    again = step.again(batch, mode=tables)
    first: dict[Place | None, Call] = {}
    for call in again.calls:
        if _fits(call, tokens) and tables.places and call.place not in done:
            first.setdefault(call.place, call)
    for place, call in first.items():
        norms, off = _measured(again, call, row)
        if off is None:
            continue  # Positions were added to the tokens, or do not reach these queries.
        if off < _ROUNDING:
            coverage.made(_TOPIC, "with equal tokens, scores depend on distances alone")
            continue
        done.update(at(place))
        other = step.again(batch, mode=swapped)
        after = _measured(other, other.calls[call.number], row)[1]
        yield _finding(at(*tables.places[:1], place), off, norms, after)


def _measured(step: Step, call: Call, row: int) -> tuple[float, float | None]:
    """Measure the spread of the norms of queries, and of scores of one distance. None if it says nothing."""
    if not call.is_torchs:  # Only scores are known. Inputs take the place of values.
        source = source_of(step, call)
        scores = call.rows[row, :, :_LONGEST, :_LONGEST].double()
        shown = scores[scores > HIDDEN]
        moved = source is None or _spread(step.inputs[source][row][None].double()) > _ROUNDING
        same = not shown.numel() or bool(shown.max() - shown.min() <= _ROUNDING * shown.abs().max())
        return 0.0, None if moved or same else _along_diagonals(scores)
    q, k, v = (call.given[x][row, :, :_LONGEST].double() for x in ("query", "key", "value"))
    norms = _spread(q.norm(dim=-1))
    if _spread(v) > _ROUNDING or _spread(q) <= _ROUNDING:
        return norms, None
    return norms, _along_diagonals(q @ k.repeat_interleave(len(q) // len(k), 0).mT)


def _fits(call: Call, tokens: Tensor) -> bool:
    """Whether a call has a query and a key for each token, in exact numbers."""
    if call.rows.dim() != 4 or call.rows.dtype not in (torch.float32, torch.float64):
        return False
    return call.q_len == call.k_len == tokens.shape[1] and len(call.rows) == len(tokens)


def _spread(x: Tensor) -> float:
    """Return the largest difference along the positions (dim 1), relative to the largest number."""
    return float((x.amax(1) - x.amin(1)).max() / x.abs().max().clamp_min(1e-30))


def _along_diagonals(scores: Tensor) -> float:
    """Return the largest relative difference of visible scores (H, S, S) of one distance."""
    length, hidden = scores.shape[-1], scores <= HIDDEN
    low, high = (scores.masked_fill(hidden, x) for x in (torch.inf, -torch.inf))
    numbers = range(1 - length, length)
    most = max(
        float((high.diagonal(i, 1, 2).amax(-1) - low.diagonal(i, 1, 2).amin(-1)).max()) for i in numbers
    )
    return most / float(scores[~hidden].abs().max())


def _finding(places: tuple[Place, ...], off: float, norms: float, swapped: float | None) -> Finding:
    evidence = (
        f"with the same token at all positions, scores of one distance differ by {off:.1e} (relative)",
        *((f"norms of queries differ by {norms:.1e}",) if norms else ()),
        "values or inputs are equal at all positions, so positions come from these tables alone",
    )
    what = "Rotary positions do not rotate here: scores do not depend on the distance alone"
    if swapped is not None and swapped < _ROUNDING:
        tried = f"with tables of the other order of pairs, scores of one distance differ by {swapped:.1e}"
        return Finding("rope", what, places, evidence, tried=tried)
    severity = "" if norms > _TURNED else "note"
    if severity:
        what = "Scores do not depend on the distance alone here. Positions in two dims do so on purpose"
    return Finding("rope", what, places, evidence, *texts_of("rope", "inexact"), severity=severity)
