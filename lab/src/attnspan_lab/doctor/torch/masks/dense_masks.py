"""Dense masks of a model, collected over all batches, with a remedy that holds in all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.forms import Forms
from attnspan_lab.doctor.torch.masks.growth import growing_dims
from attnspan_lab.doctor.torch.masks.mask_copies import MaskCopies
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import counted, for_long, lowered

__all__ = ["DenseMasks"]

_SHARE = 0.01  # smallest share of all operators' time that is worth a word
_READ = "Fused kernels read all entries of the mask, also where it hides pairs"


def _is_torchs(call: Attention) -> bool:
    """Whether torch's function made the mask, as it does where it stores scores."""
    return call.kind == "sdpa" and call.stores_scores and call.mask is not None and call.mask[1] == call.place


@dataclass
class _Line:
    """A line that makes a mask, and the line that uses it, with the calls that have this mask."""

    forms: Forms = field(default_factory=Forms)
    copies: MaskCopies = field(default_factory=MaskCopies)
    calls: list[Attention] = field(default_factory=list)

    def finding(self) -> Finding:
        """Write the finding with the remedies that hold in all calls."""
        call, dims = self.calls[0], growing_dims(self.calls)
        assert call.mask is not None
        shape, place, floating = call.mask
        size, kind = bytes_text(call.mask_bytes), "bias" if floating else "mask"
        of = "a query and a key" if dims == 1 else "tokens"
        if dims:
            size = f"{size} here, {for_long(call.mask_bytes // max(prod(shape[-dims:]), 1), dims)}"
        used = f"used by {counted(sum(x.step is call.step for x in self.calls), 'call')} of a step"
        if (share := call.mask_seconds / (call.step.seconds or 1.0)) >= _SHARE:
            used = f"made in {seconds_text(call.mask_seconds)}, {share:.0%} of all operators' time, {used}"
        copied, remedy, tried = self.copies.texts()
        if not remedy:
            remedy = self.forms.remedy
        elif self.forms.holding:  # One copy is always better. A form without any mask is better still.
            remedy = f"{remedy}. Or: {lowered(self.forms.remedy)}"
        return Finding(
            "dense-mask",
            f"A {kind} with an entry for each pair of {of} is made here, shape {shape}",
            at(place, call.place),
            tuple(filter(None, (size, used, copied))),
            "" if dims == 2 else _READ,
            remedy,
            "; ".join(filter(None, [tried, self.forms.tried])),
            count=len(self.calls),
            cost=sum(x.mask_bytes for x in self.calls),
        )


@dataclass
class DenseMasks:
    """Lines that make a mask with an entry for each pair of tokens.

    Attributes:
        lines: The lines that make and use a mask.
        calls: All calls of each line, also without a mask of pairs, such as a decode step. A remedy changes
            all calls of a line.
    """

    lines: dict[tuple[Place | None, Place | None], _Line] = field(default_factory=lambda: defaultdict(_Line))
    calls: dict[Place | None, list[Attention]] = field(default_factory=lambda: defaultdict(list))

    def add(self, calls: Sequence[Attention]) -> None:
        """Collect the masks of a step's calls, and try shorter forms."""
        for call in calls:
            if _is_torchs(call):
                continue
            self.calls[call.place].append(call)
            if call.mask is not None and call.mask_bytes:
                line = self.lines[call.mask[1], call.place]
                line.calls.append(call)
                line.forms.add(call)
                line.copies.add(call)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line."""
        for (_, place), line in self.lines.items():
            for call in self.calls[place]:
                if call not in line.calls:
                    line.forms.add_other(call)
            yield line.finding()
