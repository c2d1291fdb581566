"""Caches that grow by a copy in each decode step."""

from __future__ import annotations

from collections.abc import Iterator

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.decode_runs import Runs
from attnspan_lab.doctor.torch.recording.lineage import Node, cache_of

__all__ = ["cat_findings"]

_LIBRARIES = ("site-packages", "dist-packages")


def cat_findings(runs: Runs) -> Iterator[Finding]:
    """Yield the first line of the user's that joins cached keys and new keys by a copy.

    Args:
        runs: A prefill and decode steps.
    """
    group, before = runs.groups[-1], runs.made.attends[runs.groups[-2][-1].number]
    if before is None:
        return
    found: dict[int, tuple[Node, Place]] = {}
    place: Place | None = None
    for call in group:
        attend = runs.made.attends[call.number]
        for operand in () if attend is None else (attend.key, attend.value):
            node = None if operand is None else cache_of(operand, before.order)
            if node is None or node.place is None or not node.copies or _is_installed(node.place):
                continue
            found[id(node)] = node, node.place
            place = place or node.place
    if place is None:
        return
    size = sum(x.value.numel() * x.value.element_size() for x, _ in found.values())
    evidence = (
        f"the last decode step copies {bytes_text(size)} into {len(found)} new tensors, with "
        f"{sum(runs.lengths)} tokens in the cache",
    )
    yield Finding("cache-cat", "Each decode step copies the whole cache here", at(place), evidence)


def _is_installed(place: Place) -> bool:
    return any(x in place.file for x in _LIBRARIES)
