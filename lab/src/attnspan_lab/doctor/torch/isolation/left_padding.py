"""A padded sample against the same sample without its padding. Left padding must not move positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.torch.isolation.packing import first_difference
from attnspan_lab.doctor.torch.recording.calls import Step

__all__ = ["left_padding_findings"]


def left_padding_findings(step: Step, coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding if padding in front of a sample changes its results.

    Args:
        step: The step. Batches without left padding give no finding.
        coverage: Collects the checks.
    """
    subject, batch = step.subject, step.batch
    said, tokens = subject.declared(batch), subject.tokens(batch)
    if said.valid is None or tokens is None or said.documents is not None or not isinstance(batch, Mapping):
        return
    row = next((i for i, x in enumerate(said.valid) if not x[0] and x[-1]), None)
    if row is None:
        return
    valid, length = said.valid[row], tokens[1].shape[1]
    start = int((~valid).sum())
    if not bool(valid[start:].all()) or start >= length - 1:
        return
    padded, alone = (_cut(batch, length, row, x) for x in (0, start))
    if padded is None or alone is None:
        coverage.missed("left padding", "the doctor cannot take the padding out of the batch")
        return
    found = first_difference(subject, padded, alone, length, (0, start, length))
    coverage.made("left padding", "a padded sample, and the same sample without its padding")
    if found is None:
        return
    name, places, difference = found
    what = "Padding in front of a sample changes its results"
    evidence = (
        f"batch element {row}, with and without {start} tokens of padding: difference {difference:.1e}",
        f"the first module whose input differs: {name}",
    )
    cause = "Positions count the padding in front of the tokens"
    valid_tokens = f"({said.padding} == 0)" if "padding" in said.padding else said.padding
    remedy = f"Count positions from the first real token: ({valid_tokens}.cumsum(-1) - 1).clamp(min=0)"
    yield Finding("positions", what, places, evidence, cause, remedy)


def _cut(batch: Mapping[str, Any], length: int, row: int, start: int) -> dict[str, Any] | None:
    """Take a sample out of a batch, without the tokens before ``start``. None for an unknown layout."""
    found: dict[str, Any] = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            found[name] = x
        elif x.dim() > 3 and x.shape[-2:] == (length, length):
            found[name] = x[row % len(x), None, ..., start:, start:]
        elif x.dim() > 1 and x.shape[1] == length:
            found[name] = x[row % len(x), None, start:]
        elif length in x.shape:
            return None
        else:
            found[name] = x
    if start and "position_ids" in found and found["position_ids"].dim() == 2:
        found["position_ids"] = torch.arange(length - start)[None]
    return found
