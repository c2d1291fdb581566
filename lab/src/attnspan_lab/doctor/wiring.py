"""Checks that follow changed inputs through a model: axes, samples, other sequences and empty slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnspan_lab.doctor.axes import Axes
from attnspan_lab.doctor.calls import CannotRun, recorded
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.cross import cross_findings
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.samples import sample_findings
from attnspan_lab.doctor.slots import slot_findings
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.doctor.watch import Attention

__all__ = ["Wiring"]


@dataclass
class Wiring:
    """Checks of all batches. Each line is examined until it has a finding.

    Attributes:
        axes: The check of axes.
        crossed, emptied, mixed: Lines that have a finding.
    """

    axes: Axes = field(default_factory=Axes)
    crossed: set[Place] = field(default_factory=set)
    emptied: set[Place] = field(default_factory=set)
    mixed: set[Place] = field(default_factory=set)

    def findings(
        self, subject: Subject, batch: Any, calls: list[Attention], coverage: Coverage
    ) -> Iterator[Finding]:
        """Yield the findings of a batch.

        Args:
            subject, batch: The step.
            calls: Calls that the watcher saw in this step.
            coverage: Collects the checks.
        """
        lines = {x.place for x in calls if not x.kernel and x.place is not None}
        try:
            step = recorded(subject, batch, lines)
        except CannotRun as error:
            coverage.missed("axes", str(error))
            return
        for topic, check in (
            ("axes", lambda: self.axes.findings(step, coverage)),
            ("samples", lambda: sample_findings(step, coverage, self.mixed)),
            ("keys of another sequence", lambda: cross_findings(step, calls, self.crossed)),
            ("empty slots of a cache", lambda: slot_findings(step, self.emptied)),
        ):
            try:
                yield from check()
            except CannotRun as error:
                coverage.missed(topic, str(error))
