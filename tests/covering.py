"""Covering arrays: few rows of a product of factors that still hold every pair of values.

A defect is mostly seen with one value, or with two together, so these rows find what the whole product finds.
The ordinary run takes them; `pytest --all` takes the product.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any

#: Set by `pytest --all` before tests are imported, and inherited by processes that tests start.
SWITCH = "ATTNSPAN_TEST_ALL"


def everything() -> bool:
    """Whether this is the long run."""
    return os.environ.get(SWITCH, "0") != "0"


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Numbers of rows that hold each combination of `strength` values that any row holds, in order.

    The row with most combinations that are still missing is next; of equals, the first. The result depends on
    nothing else.
    """
    columns = range(len(rows[0])) if rows else range(0)
    chosen = list(combinations(columns, min(strength, len(columns))))
    held = [{(some, *(row[i] for i in some)) for some in chosen} for row in rows]
    missing = set().union(*held)
    # What a row adds only shrinks, so an outdated gain is an upper bound.
    queue = [(-len(own), i) for i, own in enumerate(held)]
    heapify(queue)
    taken = []
    while missing:
        _, i = heappop(queue)
        gain = held[i] & missing
        if gain and queue and (-len(gain), i) > queue[0]:
            heappush(queue, (-len(gain), i))
        elif gain:
            taken.append(i)
            missing -= gain
    return sorted(taken)


def cells(*factors: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Rows of the product of factors: a covering array in the ordinary run, all of them in the long one."""
    rows = list(product(*factors))
    if everything():
        return rows
    numbers = covering(list(product(*(range(len(list(factor))) for factor in factors))), strength)
    return [rows[i] for i in numbers]


def few(values: Iterable[Any], short: int) -> list[Any]:
    """The first `short` of equal values, such as seeds; in the long run all of them."""
    values = list(values)
    return values if everything() else values[:short]
