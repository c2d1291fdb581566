"""Attention that is written out. A remedy must hold for all calls of a line, in all batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.growth import scores_bytes, stored_text
from attnspan_lab.doctor.torch.masks.written_remedy import remedy_of_written
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["written_findings"]


def written_findings(calls: Iterable[Attention]) -> Iterator[Finding]:
    """Yield a finding for each line that writes attention out.

    Args:
        calls: The calls of all batches.
    """
    lines = defaultdict[Place | None, list[Attention]](list)
    for x in calls:
        if x.kind == "written out" and x.stores_scores and not x.in_multihead:
            lines[x.place].append(x)
    for place, own in lines.items():
        if all(x.q[-2] == 1 for x in own):
            continue  # One query has one row of scores: their memory does not grow quadratically.
        evidence = stored_text([x for x in own if x.step is own[0].step], own)
        what = "Attention is written out here: scores and weights of all pairs are stored"
        places = at(place, next((x.weights_used for x in own if x.weights_used), None))
        yield Finding(
            "unfused",
            what,
            places,
            (evidence,),
            remedy=remedy_of_written(own),
            count=len(own),
            cost=sum(map(scores_bytes, own)),
        )
