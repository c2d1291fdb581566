"""Caches that grow by a copy in each decode step."""

from __future__ import annotations

from collections.abc import Iterator

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_installed
from attnspan_lab.doctor.torch.decoding.decode_runs import Runs
from attnspan_lab.doctor.torch.recording.lineage import Node, cache_of

__all__ = ["cat_findings"]


def cat_findings(runs: Runs) -> Iterator[Finding]:
    """Yield the first line of the user's that joins cached keys and new keys by a copy.

    Args:
        runs: A prefill and decode steps.
    """
    found, start = dict[Node, Place](), runs.start(-1)
    for attend in (runs.made.attends[x.number] for x in runs.groups[-1]):
        for operand in (attend.key, attend.value) if attend else ():
            node = operand and cache_of(operand, start)
            if node and node.copies and node.place and not is_installed(node.place.file):
                found[node] = node.place
    if not found:
        return
    size = sum(x.value.numel() * x.value.element_size() for x in found)
    evidence = (
        f"the last decode step copies {bytes_text(size)} into {len(found)} new tensors, with "
        f"{sum(runs.lengths)} tokens in the cache",
    )
    yield Finding(
        "cache-cat", "Each decode step copies the whole cache here", at(*found.values())[:1], evidence
    )
