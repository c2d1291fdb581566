"""Dense masks of a model, collected over all batches, with a remedy that holds in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import Forms
from attnspan_lab.doctor.torch.masks.growth import grows, keys_of
from attnspan_lab.doctor.torch.masks.mask_copies import MaskCopies
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import counted, for_long

__all__ = ["DenseMasks"]

_SHARE = 0.01  # smallest share of all operators' time that is worth a word
_READ = "Fused kernels read all entries of the mask, also where it hides pairs"


def _is_torchs(call: Attention) -> bool:
    """Whether torch's function created the mask, as it does for is_causal where it stores scores."""
    made = call.mask[1] if call.mask is not None else None
    return call.kind == "sdpa" and call.stores_scores and made == call.place


@dataclass
class _Line:
    """A line that makes a mask, and the line that uses it.

    Attributes:
        call: The first call with the mask.
        many: Number of calls of its step with the mask.
        share: Share of the mask's time in the time of all operators.
        sizes: Numbers of keys, and of tokens of the batch.
    """

    call: Attention
    many: int
    share: float
    forms: Forms = field(default_factory=Forms)
    copies: MaskCopies = field(default_factory=MaskCopies)
    count: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def mended(self, finding: Finding) -> Finding:
        """Write the finding with the remedies that hold in all calls."""
        copied, remedy, tried = self.copies.texts()
        form = self.forms.remedy
        if remedy:  # One copy is always better. A form without any mask is better still.
            form = f"{remedy}. Or: {form[:1].lower()}{form[1:]}" if self.forms.holding else remedy
        evidence = (*finding.evidence, *filter(None, [copied]))
        tried = "; ".join(filter(None, [tried, self.forms.tried]))
        return replace(finding, evidence=evidence, remedy=form, tried=tried, count=self.count)


@dataclass
class DenseMasks:
    """Lines that make a mask with an entry for each pair of tokens.

    Attributes:
        lines: The lines that make and use a mask.
        calls: All calls of each line, with the line that makes their mask. Calls without a mask of pairs,
            such as a decode step, have None. A remedy changes all calls of a line.
    """

    lines: dict[tuple[Place | None, Place | None], _Line] = field(default_factory=dict)
    calls: dict[Place | None, list[tuple[Any, Attention, Declared]]] = field(default_factory=dict)

    def add(self, site: Sequence[Attention], said: Declared, seconds: float, length: int) -> None:
        """Collect the masks of the calls of one line, and try shorter forms.

        Args:
            site: Calls of one line.
            said: Facts of the batch.
            seconds: Time of all operators of the same step.
            length: Number of tokens of the batch, or 0 if it is unknown.
        """
        # Where torch's function stores scores, it also creates masks: these are not the user's.
        masked = [x for x in site if x.mask is not None and not _is_torchs(x)]
        for call in masked:
            assert call.mask is not None
            key = (call.mask[1], call.place)
            share = call.mask_seconds / seconds if seconds else 0.0
            line = self.lines.setdefault(key, _Line(call, len(masked), share))
            line.count += 1
            line.sizes.append((keys_of(call), length))
            line.forms.add(call, said)
            line.copies.add(call)
        made = [(x.mask and (x.mask[1],), x, said) for x in site if x.mask is None or x in masked]
        self.calls.setdefault(site[0].place, []).extend(made)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line."""
        for (made, place), x in self.lines.items():
            for own, call, said in self.calls.get(place, ()):
                if own != (made,):
                    x.forms.add_other(call, said)
            yield x.mended(_finding(x))


def _finding(line: _Line) -> Finding:
    call = line.call
    assert call.mask is not None
    shape, place, floating = call.mask
    bytes_now, is_growing = bytes_text(call.mask_bytes), grows(line.sizes)
    if is_growing:
        bytes_now = f"{bytes_now} here, {for_long(call.mask_bytes // max(prod(shape[-2:]), 1))}"
    used = f"used by {counted(line.many, 'call')} of a step"
    share = f"made in {seconds_text(call.mask_seconds)}, {line.share:.0%} of all operators' time, "
    evidence = (bytes_now, f"{share if line.share >= _SHARE else ''}{used}")
    kind = "bias" if floating else "mask"
    what = f"A {kind} with an entry for each pair of tokens is made here, shape {shape}"
    return Finding("dense-mask", what, at(place, call.place), evidence, "" if is_growing else _READ)
