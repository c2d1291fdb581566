"""Checks that follow changed inputs through a model: axes, samples, other sequences and empty slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.guarded import guarded
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.cost.loops import loop_findings
from attnspan_lab.doctor.torch.decoding.no_cache import cache_findings
from attnspan_lab.doctor.torch.decoding.own_key import own_key_findings
from attnspan_lab.doctor.torch.decoding.prefill_parity import decode_findings
from attnspan_lab.doctor.torch.decoding.state import state_findings
from attnspan_lab.doctor.torch.isolation.axes import axis_findings
from attnspan_lab.doctor.torch.isolation.cache_slots import slot_findings
from attnspan_lab.doctor.torch.isolation.ignored_inputs import ignored_findings
from attnspan_lab.doctor.torch.isolation.left_padding import left_padding_findings
from attnspan_lab.doctor.torch.isolation.needless_padding import needless_findings
from attnspan_lab.doctor.torch.isolation.samples import sample_findings
from attnspan_lab.doctor.torch.isolation.visible_padding import padding_findings
from attnspan_lab.doctor.torch.isolation.without_padding import alone_findings
from attnspan_lab.doctor.torch.masks.cross_attention import cross_findings
from attnspan_lab.doctor.torch.masks.head_order import order_findings
from attnspan_lab.doctor.torch.numbers.equal_queries import EqualQueries
from attnspan_lab.doctor.torch.numbers.one_key import OneKey
from attnspan_lab.doctor.torch.numbers.position_digits import counting_findings
from attnspan_lab.doctor.torch.numbers.rotary import rotary_findings
from attnspan_lab.doctor.torch.numbers.scale_factors import scale_findings
from attnspan_lab.doctor.torch.numbers.softmax_weights import explained, softmax_findings
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import CannotRun, Step, recorded
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Wiring"]


@dataclass
class Wiring:
    """Checks of all batches. Each line is examined until it has a finding.

    Attributes:
        unused: A copy of the model that no call has changed, or None if the model cannot be copied.
        one_key, equal: Checks that need the calls of all batches.
        done: Lines that have a finding or, for axes, were checked, for each check.
        read: Inputs that were examined: a result depends on them, or they have a finding.
        step: The step of the present batch, or None if it cannot be repeated.
    """

    unused: nn.Module | None = None
    one_key: OneKey = field(default_factory=OneKey)
    equal: EqualQueries = field(default_factory=EqualQueries)
    done: dict[str, set[Place]] = field(default_factory=lambda: defaultdict(set))
    read: set[str] = field(default_factory=set)
    step: Step | None = None

    def record(self, subject: Subject, batch: Any, calls: list[Attention], coverage: Coverage) -> None:
        """Run the step of a batch in evaluation mode, and record its attention calls.

        Args:
            subject, batch: The step.
            calls: Calls that the watcher saw in this step.
            coverage: Collects the checks.
        """
        lines = {x.place for x in calls if not x.kernel and x.place is not None}
        self.step = None
        try:
            self.step = recorded(replace(subject, model=self.unused or subject.model), batch, lines)
        except CannotRun as error:
            for topic in ("axes", "samples"):
                coverage.missed(topic, str(error))

    def explained(self, finding: Finding) -> Finding:
        """Add what the record knows about a finding, and note its line."""
        self.done[finding.kind].update(finding.places[:1])
        return explained(finding, self.step)

    def findings(self, calls: list[Attention], coverage: Coverage, *, leaks: bool) -> Iterator[Finding]:
        """Yield the findings of the recorded step.

        Args:
            calls: Calls that the watcher saw in this step.
            coverage: Collects the checks.
            leaks: Whether tokens already see others that they must not see.
        """
        yield from guarded("order of heads", order_findings(calls), coverage)
        step, done = self.step, self.done
        if step is None:
            return
        self.one_key.add(step)
        self.equal.add(step)
        padded, own = done["mask-lost"], done["causal-alignment"]

        def decoded() -> Iterator[Finding]:
            found = done["slots"] | own | done["causality-lost"] | padded
            yield from decode_findings(step, coverage, explained=bool(found))

        yield from self._made(
            coverage,
            ("inputs", ignored_findings(step, calls, coverage, self.read)),
            ("axes", axis_findings(step, coverage, done["axes"])),
            ("axes", softmax_findings(step, done["softmax"])),
            ("samples", sample_findings(step, coverage, done["samples"])),
            ("keys of another sequence", cross_findings(step, calls, done["cross"])),
            ("scale of scores", scale_findings(step, coverage, done["scale"])),
            ("loops of attention", loop_findings(step, calls, done["loop"])),
            ("padding that no sample needs", needless_findings(step, calls, coverage, done["padding"])),
            ("empty slots of a cache", slot_findings(step, calls, done["slots"])),
            ("repeated prefixes", cache_findings(step, done["no-cache"])),
            ("digits of positions", counting_findings(step, coverage)),
            ("rotary positions", rotary_findings(step, coverage, done["rope"])),
            ("padding", padding_findings(step, calls, coverage, padded)),
            ("padding", () if leaks else alone_findings(step, calls, coverage, padded)),
            ("own keys", own_key_findings(step, calls, own)),
            ("state", state_findings(step, coverage)),
            ("decoding", decoded()),
            ("left padding", () if leaks else left_padding_findings(step, coverage)),
        )

    def last(self, coverage: Coverage) -> Iterator[Finding]:
        """Yield the findings on the calls of all batches."""
        yield from self._made(coverage, ("keys", self.one_key.findings()), ("queries", self.equal.findings()))

    @staticmethod
    def _made(coverage: Coverage, *checks: tuple[str, Iterable[Finding]]) -> Iterator[Finding]:
        for topic, check in checks:
            yield from guarded(topic, check, coverage)
