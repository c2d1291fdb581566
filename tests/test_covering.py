"""The ordinary run leaves out cells, and no pair of values."""

from itertools import combinations, product
from math import prod

import pytest
from covering import covering


def _held(rows, strength):
    return {(at, *(row[i] for i in at)) for row in rows for at in combinations(range(len(row)), strength)}


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (9, 7, 3, 2), (5, 4), (6,), ()], ids=str)
def test_each_combination_of_values_is_in_few_rows(sizes: tuple[int, ...], strength: int) -> None:
    rows, strength = list(product(*map(range, sizes))), min(strength, len(sizes))
    taken = [rows[i] for i in covering(rows, strength)]
    assert _held(taken, strength) == _held(rows, strength)
    assert len(taken) <= 1.5 * prod(sorted(sizes)[len(sizes) - strength :])
