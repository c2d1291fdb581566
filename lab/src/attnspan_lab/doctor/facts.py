"""Facts of eager steps, for torch and JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from attnspan_lab.doctor.places import Place

__all__ = ["picture_of", "sites_of"]

_LARGEST = 256  # queries or keys of a mask that is drawn


def sites_of(calls: Iterable[tuple[Place | None, str]]) -> list[list[str]]:
    """Count attention calls by their line and their kernel."""
    found = Counter((str(place or "?"), kernel) for place, kernel in calls)
    return [[place, kernel, str(count)] for (place, kernel), count in found.items()]


def picture_of(masks: Iterable[Any]) -> list[str] | None:
    """Draw batch element 0 of the last known mask (B, Sq, Sk), as a string of 0 and 1 for each query."""
    shown = [x for x in masks if x is not None and max(x.shape[1:]) <= _LARGEST]
    return ["".join("01"[int(x)] for x in row) for row in shown[-1][0].tolist()] if shown else None
