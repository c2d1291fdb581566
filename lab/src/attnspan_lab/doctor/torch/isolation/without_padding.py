"""A padded sample against the same sample without its padding: the first operator that padding changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.isolation.declared import real_tokens
from attnspan_lab.doctor.torch.isolation.mixing_remedies import LOCAL, OF_LENGTH, of_call, of_operator
from attnspan_lab.doctor.torch.isolation.single_sample import PaddedSample, padded_samples
from attnspan_lab.doctor.torch.isolation.visible_pairs import OUTSIDE_OF_ATTENTION
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import CannotRun, Step
from attnspan_lab.doctor.torch.recording.trace import (
    Trace,
    apart,
    change_of,
    first_difference,
    forward_line,
    traced,
)
from attnspan_lab.doctor.words import counted

__all__ = ["alone_findings"]

_TOPIC = "samples without their padding"
_MOST = 8  # tensors that are tried


def alone_findings(
    step: Step, calls: list[Attention], coverage: Coverage, done: set[Place]
) -> Iterator[Finding]:
    """Yield a finding for each mask if a sample has other results without its padding.

    Args:
        step: The step. Its attention is not known to show padding.
        calls: Calls that the watcher saw.
        coverage: Collects the checks.
        done: Lines that have a finding. With such a line, the check is left out.
    """
    # Attention that shows padding explains all differences.
    for padded in () if done else padded_samples(step.subject, step.batch):
        try:
            found = _Alone(step, padded).finding(calls, coverage)
        except CannotRun as error:
            coverage.missed(_TOPIC, str(error))
            continue
        if found is not None and not done.intersection(found.places[:1]):
            done.update(found.places[:1])
            yield found


class _Alone:
    """Runs of one sample: with its padding, with other padding, and without."""

    def __init__(self, step: Step, padded: PaddedSample) -> None:
        self.step, self.padded = step, padded
        self.batch = padded.alone(step.batch, padded.sample.length)
        self.full, self.short = (traced(step, x) for x in (self.batch, padded.alone(step.batch, padded.real)))

    def finding(self, calls: list[Attention], coverage: Coverage) -> Finding | None:
        step, padded = self.step, self.padded
        if self._change(self.short) == 0:
            said = f"read from {padded.padding}: a sample has the same results without its padding"
            self._covered(coverage, said)
            return None
        if self.full[0].differs(step.again(self.batch)) > 0:
            coverage.missed(_TOPIC, "the model returns different results for the same batch")
            return None
        # A layer with a stride may see other windows without the padding, so some padding stays.
        fewer = padded.alone(step.batch, padded.rounded)
        changed, filled = (
            padded.alone(padded.changed(step.batch, x), padded.sample.length)
            for x in (padded.rounded, padded.real)
        )
        for batch, did in ((fewer, "with less padding"), (changed, "with other padding")):
            other = traced(step, batch)
            if change := self._change(other):
                self._covered(coverage, f"read from {padded.padding}")
                said = f"{did}, results of real tokens change by {change:.1e} (relative)"
                if self._change(traced(step, filled)) > 0:
                    return self._written(other, (said,), calls)
                said = f"{said}. Other numbers in the padding change no result"
                return self._of_length(other, said) or self._written(other, (said,), calls, by_length=True)
        why = "the results differ, perhaps because a layer with a stride sees other windows"
        coverage.missed(_TOPIC, why)
        return None

    def _covered(self, coverage: Coverage, said: str) -> None:
        for topic in ("padding", OUTSIDE_OF_ATTENTION, *(f"padding of {x}" for x in self.padded.names)):
            coverage.made(topic, said)

    def _change(self, other: tuple[Step, Trace], mended: Step | None = None) -> float:
        """Compare results of real tokens between two runs. A loss counts only without other results."""
        full, less, short = (x.results for x in (mended or self.full[0], other[0], self.short[0]))
        only_loss = all(x.dim() == 0 for x in full.values())
        names = [k for k, x in full.items() if k in less and k in short and (only_loss or x.dim())]
        pairs = [_common(full[k], less[k], short[k]) for k in names]
        return max((change_of(y, x) for x, y, *_ in filter(None, pairs) if apart(x, y)), default=0.0)

    @property
    def _padding(self) -> str:
        """Say how many tokens of the sample are padding."""
        padded, length = self.padded, self.padded.sample.length
        many = f"{length - padded.real} padded tokens of {length}"
        return f"batch element {padded.sample.row} has {many} ({padded.padding})"

    def _of_length(self, other: tuple[Step, Trace], change: str) -> Finding | None:
        """Write the finding for the first tensor without data of the batch that depends on the length.

        The trial gives it the numbers that it has without the padding.
        """
        runs, real = (self.full, other, self.short), self.padded.real
        others = [
            x
            for x in zip(*(x[1].others for x in runs), strict=False)
            if len({y.name for y in x}) == 1 and x[0].place is not None and _differs(*(y.out for y in x))
        ]
        for made in others[:_MOST]:
            outs = [x.out for x in made]
            mended = self.step.again(self.batch, mode=_Exchanged(outs[0], outs[2]))
            if self._change(self.short, mended) == 0:
                what = f"The padded length of {self.padded.names[0]} changes results of real tokens here"
                cause = (
                    f"{made[0].name} makes this tensor from the padded length. With fewer padded tokens, it "
                )
                cause += "has other numbers at the real tokens"
                remedy = "Make this tensor from the number of real tokens of each sample: "
                remedy += f"{real_tokens(self.padded.padding)}.sum(1)"
                tried = (
                    f"with the numbers that this tensor has for {counted(real, 'token')}, this sample has "
                )
                tried += "the same results as without its padding"
                evidence = self._padding, change
                return Finding("mask-lost", what, at(made[0].place), evidence, cause, remedy, tried)
        return None

    def _written(
        self,
        other: tuple[Step, Trace],
        evidence: tuple[str, ...],
        calls: list[Attention],
        *,
        by_length: bool = False,
    ) -> Finding:
        padded, runs = self.padded, (self.full, other, self.short)
        guilty = first_difference([x[1] for x in runs], _differs)
        place = guilty.place if guilty is not None else forward_line(self.step.subject.model)
        evidence = (self._padding, *evidence)
        part = "The padded length" if by_length else "Padding"
        what = f"{part} of {padded.names[0]} changes results of real tokens here"
        if any(x.place == place for x in calls):
            mask = self._mask_of(place)
            texts = of_call(padded.padding, mask)
            texts = OF_LENGTH if by_length else texts
            return Finding("mask-lost", what, at(place, mask), evidence, *texts)
        if guilty is not None:
            evidence += (f"the first operator that padding changes: {guilty.name}",)
        triples = zip(*(x[0].calls for x in runs), strict=False)
        hiding = [*(not _differs(*(x.result for x in y)) for y in triples), False].index(False)
        if hiding:
            said = f"attention hides the padding: {counted(hiding, 'call')} in front of this operator"
            verb = "gives" if hiding == 1 else "give"
            evidence += (f"{said} {verb} real tokens the same results",)
        texts = of_operator(padded.padding, "" if guilty is None else guilty.name, by_length=by_length)
        severity = "note" if guilty is not None and guilty.name in LOCAL else ""
        what = f"{what}, outside of attention"
        return Finding("mask-lost", what, at(place), evidence, *texts, severity=severity)

    def _mask_of(self, place: Place | None) -> Place | None:
        """Find the last line in front of a call that computes with the padding mask."""
        mask = self.step.subject.named(self.batch)[self.padded.padding]
        _, trace = traced(self.step, self.batch, [mask])
        lines = [x.place for x in trace.operators]
        before = lines[: lines.index(place)] if place in lines else []
        return before[-1] if before else None


class _Exchanged(TorchFunctionMode):
    """Gives a tensor the numbers that it has in a run with fewer tokens, where both have some."""

    def __init__(self, old: Tensor, new: Tensor) -> None:
        super().__init__()
        self.old, self.new = old, old.clone()
        both = tuple(slice(min(n)) for n in zip(old.shape, new.shape, strict=True))
        self.new[both] = new[both]

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        is_old = isinstance(out, Tensor) and out.dtype == self.old.dtype and torch.equal(out, self.old)
        return self.new if is_old else out


def _common(*given: Tensor) -> tuple[Tensor, ...] | None:
    """Cut results of several runs to their common sizes. None if they have other dims."""
    if len({x.dim() for x in given}) > 1:
        return None
    cut = tuple(slice(min(n)) for n in zip(*(x.shape for x in given), strict=True))
    return tuple(x[cut] for x in given)


def _differs(full: Tensor, other: Tensor, short: Tensor) -> bool:
    found = _common(full, other, short)
    return found is not None and apart(found[0], found[1])
