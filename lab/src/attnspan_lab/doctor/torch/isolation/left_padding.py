"""A padded sample against the same sample without its padding. Left padding must not move positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.torch.isolation.declared import real_tokens
from attnspan_lab.doctor.torch.isolation.packing import Part, different_module
from attnspan_lab.doctor.torch.recording.calls import Step

__all__ = ["left_padding_findings"]

_TOPIC = "left padding"


def left_padding_findings(step: Step, coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding if padding in front of a sample changes its results.

    Args:
        step: The step. Batches without left padding give no finding.
        coverage: Collects the checks.
    """
    subject, batch = step.subject, step.batch
    said = subject.declared(batch)
    if said.valid is None or said.documents is not None or not isinstance(batch, Mapping):
        return
    row = next((i for i, x in enumerate(said.valid) if not x[0] and x[-1]), None)
    if row is None:
        return
    length, start = said.valid.shape[1], int((~said.valid[row]).sum())
    if not bool(said.valid[row, start:].all()) or start >= length - 1:
        return
    part = Part(row, start, length, length)
    padded, alone = part.picked(subject, batch, torch.arange(length)), part.cut(subject, batch)
    found = different_module(subject, padded, Part(0, start, length, length), alone)
    coverage.made(_TOPIC, "a padded sample, and the same sample without its padding")
    if found is None:
        return
    what = "Padding in front of a sample changes its results"
    size = f"difference {found.size:.1e}"
    evidence = f"batch element {row}, with and without {start} tokens of padding: {size}", found.text
    cause = "Positions count the padding in front of the tokens"
    shown = real_tokens(said.padding)
    remedy = f"Count positions from the first real token: ({shown}.cumsum(-1) - 1).clamp(min=0)"
    yield Finding("positions", what, found.places, evidence, cause, remedy)
