"""Covering arrays: few rows of a product of factors that still hold every pair of values.

A defect is mostly seen with one value, or with two together, so these rows find what the whole product finds.
The ordinary run takes them; `pytest --all` takes the product.
"""

from __future__ import annotations

import os
from collections import Counter
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

    Next is the row with most combinations that are still missing; of equals, the one whose values have been
    taken least often, then the first. The result depends on nothing else.
    """
    columns = range(len(rows[0])) if rows else range(0)
    chosen = list(combinations(columns, min(strength, len(columns))))
    held = [{(some, *(row[i] for i in some)) for some in chosen} for row in rows]
    missing = set().union(*held)
    often: Counter[tuple[int, Hashable]] = Counter()

    def place(i: int) -> tuple[int, int, int]:
        return -len(held[i] & missing), sum(often[value] for value in enumerate(rows[i])), i

    # Rows only move back in the queue, so a row that still stands where it stood is the next.
    queue = [place(i) for i in range(len(rows))]
    heapify(queue)
    taken = []
    while missing:
        i = heappop(queue)[-1]
        now = place(i)
        if queue and now > queue[0]:
            heappush(queue, now)
            continue
        taken.append(i)
        missing -= held[i]
        often.update(enumerate(rows[i]))
    return sorted(taken)


def cells(
    *factors: Iterable[Any], strength: int = 2, named: Iterable[tuple[Any, ...]] = ()
) -> list[tuple[Any, ...]]:
    """Rows of the product of factors: a covering array and the named rows, in the long run all of them."""
    values = [list(factor) for factor in factors]
    rows = list(product(*values))
    if everything():
        return rows
    wanted = [rows.index(row) for row in named]
    return [
        rows[i] for i in sorted({*covering(list(product(*map(range, map(len, values)))), strength), *wanted})
    ]


def few(values: Iterable[Any], short: int) -> list[Any]:
    """`short` of equal values, such as seeds, at equal distances; in the long run all of them."""
    values = list(values)
    return values if everything() else values[:: -(-len(values) // short)]
