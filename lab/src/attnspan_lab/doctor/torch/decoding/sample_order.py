"""Samples in another order: results must have the same order. A table may be read along the batch axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.findings import Finding, texts_of
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import CannotRun, Step
from attnspan_lab.doctor.torch.recording.trace import apart, first_difference, forward_line, traced

__all__ = ["placed_findings"]


def placed_findings(step: Step, rows: int, length: int, done: set[Place]) -> Iterator[Finding]:
    """Yield a finding if a sample's results depend on its place in the batch.

    Args:
        step: The step. Samples do not change the results of other samples.
        rows, length: Batch size, and number of tokens of a sample.
        done: Lines that have a finding.

    Raises:
        CannotRun: The doctor cannot reverse the samples of the batch.
    """
    batch = _reversed(step.batch, rows, length)
    other = step.again(batch)
    found = [(x, other.results.get(k)) for k, x in step.results.items() if _has_samples(x, rows)]
    pairs = [(x, y.flip(0)) for x, y in found if y is not None and y.shape == x.shape]
    if not any(apart(x, y) for x, y in pairs) or step.differs(step.again()) > 0:
        return
    traces = [traced(step, x)[1] for x in (step.batch, batch)]
    if any(x.draws for x in traces):
        raise CannotRun("the model draws random numbers in evaluation mode")

    def differs(x: Tensor, y: Tensor) -> bool:
        dims = [i for i, n in enumerate(x.shape) if n == rows]
        is_part = not dims or x.shape[0] == 1  # One sample in a loop: another dim has this size by chance.
        return x.shape == y.shape and not is_part and all(apart(x, y.flip(i)) for i in dims)

    guilty = first_difference(traces, differs)
    place = forward_line(step.subject.model) if guilty is None else guilty.place
    if place in done:
        return
    done.update(at(place))
    evidence = [
        f"with the {rows} samples in reversed order, results of a sample change by "
        f"{max(distance(y, x) for x, y in pairs):.1e} (relative), and no sample changes another one"
    ]
    if guilty is not None:
        evidence.append(f"the first operator whose rows depend on the order: {guilty.name}")
    what = "A sample's results depend on its place in the batch"
    yield Finding("sample-axis", what, at(place), tuple(evidence), *texts_of("sample-axis", "order"))


def _has_samples(x: Tensor, rows: int) -> bool:
    """Whether a result has a row for each sample. Scores of all pairs of samples (B, B) do not count."""
    return x.dim() > 0 and len(x) == rows and x.shape != (rows, rows)


def _reversed(batch: Any, rows: int, length: int) -> Any:
    """Reverse the samples of a batch."""

    def turned(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) == 1:
            return x
        # Positions (S,) and masks (S, S) belong to all samples.
        is_shared = len(x) != rows and set(x.shape) == {length}
        if len(x) != rows and not is_shared:
            raise CannotRun(f"a tensor of shape {tuple(x.shape)} has no row for each sample")
        if list(x.shape).count(rows) > 1:
            raise CannotRun(f"several dims of a tensor of shape {tuple(x.shape)} may be the batch")
        return x if is_shared else x.flip(0)

    return tree_map(turned, batch)
