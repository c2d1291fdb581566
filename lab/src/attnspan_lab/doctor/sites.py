"""Facts about the attention calls of a step: the kernels of each line, and a picture of the last mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from attnspan_lab.doctor.places import Place

__all__ = ["picture", "sites"]

_MOST_TOKENS = 256


def sites(calls: Iterable[tuple[Place | None, str]]) -> list[list[str]]:
    """Count the kernels that ran at each line, from the line and the kernel of each call."""
    found = Counter((str(place or "?"), kernel) for place, kernel in calls)
    return [[place, kernel, str(count)] for (place, kernel), count in found.items()]


def picture(visible: Iterable[Any]) -> dict[str, list[str]]:
    """Draw the last mask (B, Sq, Sk) for batch element 0, as a string of 0 and 1 for each query.

    Returns:
        The picture as a fact of a stage, or no fact if no mask is known and small.
    """
    shown = [x for x in visible if x is not None and max(x.shape[1:]) <= _MOST_TOKENS]
    return {"mask": ["".join("01"[int(x)] for x in row) for row in shown[-1][0].tolist()]} if shown else {}
