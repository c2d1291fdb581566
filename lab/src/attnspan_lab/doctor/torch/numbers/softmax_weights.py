"""Weights of attention that is written out: a softmax over another dim than the keys, and a mask after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.recording.calls import Step

__all__ = ["explained", "softmax_findings"]

_ROUNDING = 1e-2  # Weights of half precision add up to nearly 1.


def softmax_findings(step: Step, done: set[Place]) -> Iterator[Finding]:
    """Yield calls of self-attention whose weights do not add up to 1 for each query.

    Slots and capsules share their inputs by a softmax over queries. Their queries are not the inputs, so a
    call counts only if it has as many queries as keys.

    Args:
        step: The step.
        done: Lines that have a finding.
    """
    for call in step.calls:
        if call.is_torchs or call.summed is None or call.place is None or call.place in done:
            continue
        scores, dim = call.given["scores"], call.given["dim"] % call.given["scores"].dim()
        square = scores.shape[-1] == scores.shape[-2] > 1
        if not square or call.masked is not None or dim == call.contracted:
            continue
        if bool(((call.summed - 1).abs() < _ROUNDING).all()):
            continue
        done.add(call.place)
        low, high = float(call.summed.min()), float(call.summed.max())
        what = "The softmax runs over another dim than the one that its product with the values adds up"
        evidence = (
            f"the weights of a query add up to {low:.2g} to {high:.2g}, and not to 1",
            f"the scores have shape {tuple(scores.shape)}, and the softmax runs over dim {dim}",
        )
        yield Finding("softmax-axis", what, at(call.place), evidence)


def explained(finding: Finding, step: Step | None) -> Finding:
    """Name the line that masks weights after their softmax, if a lost mask comes from it."""
    if step is None or finding.kind not in ("leak", "mask-lost", "causality-lost") or not finding.places:
        return finding
    call = next((x for x in step.calls if x.place == finding.places[0] and x.masked is not None), None)
    if call is None:
        return finding
    cause = (
        "A mask sets weights to 0 after the softmax, which has already divided all weights by a sum over the "
        "hidden keys too"
    )
    ours = f". Or: p{finding.remedy[1:]}" if finding.remedy.startswith("Pass") else ""
    remedy = f"Hide pairs before the softmax: scores.masked_fill(hidden, float('-inf')){ours}"
    return replace(finding, cause=cause, remedy=remedy, places=at(call.masked, *finding.places))
