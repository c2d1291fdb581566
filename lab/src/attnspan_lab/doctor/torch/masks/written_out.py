"""Attention that is written out, collected over all batches. A remedy must hold for all calls of a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.growth import keys_of, scores_text
from attnspan_lab.doctor.torch.masks.written_remedy import remedy_of_written
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import counted

__all__ = ["WrittenOut"]


@dataclass
class WrittenOut:
    """Lines with attention that is written out, with their calls and the tokens of their batches."""

    lines: dict[Place | None, list[tuple[Attention, int]]] = field(default_factory=dict)
    first: dict[Place | None, int] = field(default_factory=dict)

    def add(self, site: Sequence[Attention], length: int) -> None:
        """Collect the calls of one line.

        Args:
            site: Calls of one line in one step.
            length: Number of tokens of the batch, or 0 if it is unknown.
        """
        call = site[0]
        if call.kind == "written out" and call.stores_scores and not call.in_multihead:
            self.lines.setdefault(call.place, []).extend((x, length) for x in site)
            self.first.setdefault(call.place, len(site))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line."""
        for place, found in self.lines.items():
            calls = [x for x, _ in found]
            first = calls[: self.first[place]]
            again = sum(x.recomputed for x in first)
            many = counted(len(first) - again, "call")
            many += f" and {again} more in the backward pass" if again else ""
            size = scores_text(calls[0], [(keys_of(x), length) for x, length in found])
            what = "Attention is written out here: scores and weights of all pairs are stored"
            places = at(place, next((x.weights_used for x in calls if x.weights_used), None))
            remedy = remedy_of_written(calls)
            yield Finding("unfused", what, places, (f"{many}; {size}",), "", remedy, count=len(calls))
