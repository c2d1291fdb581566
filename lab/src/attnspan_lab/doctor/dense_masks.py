"""Dense masks of a model, collected over all batches, with a remedy that holds in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.attention_call import Attention
from attnspan_lab.doctor.declared import Declared
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.remedies import Forms
from attnspan_lab.doctor.words import counted

__all__ = ["LONG", "DenseMasks"]

LONG = 32_768  # tokens, for which memory is predicted


def _is_torchs(call: Attention) -> bool:
    """Whether torch's function created the mask, as it does for is_causal where it stores scores."""
    made = call.mask[1] if call.mask is not None else None
    return call.kind == "sdpa" and call.stores_scores and made == call.place


@dataclass
class _Line:
    finding: Finding
    forms: Forms = field(default_factory=Forms)
    count: int = 0


@dataclass
class DenseMasks:
    """Lines that make a mask with an entry for each pair of tokens."""

    lines: dict[tuple[Place | None, Place | None], _Line] = field(default_factory=dict)

    def add(self, site: Sequence[Attention], said: Declared, seconds: float) -> None:
        """Collect the masks of the calls of one line, and try shorter forms.

        Args:
            site: Calls of one line.
            said: Facts of the batch.
            seconds: Time of all operators of the same step.
        """
        # Where torch's function stores scores, it also creates masks: these are not the user's.
        masked = [x for x in site if x.mask is not None and not _is_torchs(x)]
        for call in masked:
            assert call.mask is not None
            key = (call.mask[1], call.place)
            line = self.lines.setdefault(key, _Line(_finding(call, len(masked), seconds)))
            line.count += 1
            line.forms.add(call, said)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line."""
        for x in self.lines.values():
            yield replace(x.finding, remedy=x.forms.remedy, tried=x.forms.tried, count=x.count)


def _finding(call: Attention, many: int, seconds: float) -> Finding:
    assert call.mask is not None
    shape, place, floating = call.mask
    long = call.mask_bytes // max(prod(shape[-2:]), 1) * LONG**2
    share = f", {call.mask_seconds / seconds:.0%} of all operators' time" if seconds else ""
    evidence = (
        f"{bytes_text(call.mask_bytes)}; {bytes_text(long)} at {LONG:,} tokens",
        f"made in {seconds_text(call.mask_seconds)}{share}, used by {counted(many, 'call')}",
    )
    kind = "bias" if floating else "mask"
    what = f"A {kind} with an entry for each pair of tokens is made here, shape {shape}"
    return Finding("dense-mask", what, at(place, call.place), evidence)
