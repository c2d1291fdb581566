"""Keys and values that were copied for the query heads in two different orders."""

from __future__ import annotations

from collections.abc import Iterator

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["order_findings"]


def order_findings(calls: list[Attention]) -> Iterator[Finding]:
    """Yield calls whose query heads get keys of one head and values of another head."""
    for call in calls:
        if call.recomputed or len(call.head_maps) != 2 or call.repeated is None:
            continue
        keys, values = call.head_maps
        if keys is None or values is None or keys.count != values.count or keys.heads == values.heads:
            continue
        what = "Query heads get keys of one head and values of another head here"
        evidence = (f"heads of keys of {keys.text}", f"heads of values of {values.text}")
        yield Finding("head-order", what, at(call.repeated[0], call.place), evidence)
