"""Names of strategies, and which member of a group has which heads."""

from itertools import product

import pytest

from attnspan.errors import OptionError
from attnspan.parallel.strategy import Strategy, split_heads

NAMES = {
    "exchange": Strategy("exchange", 1, 12),
    "ring": Strategy("ring", 1, 12),
    "ulysses": Strategy("exchange", 12, 1),
    "hybrid(2, 6)": Strategy("exchange", 2, 6),
    "hybrid(3, 4, ring)": Strategy("ring", 3, 4),
}
#: Other ways to write some.
SPELLED = {
    "hybrid(2,6)": "hybrid(2, 6)",
    "hybrid( 3 , 4 , ring )": "hybrid(3, 4, ring)",
    "hybrid(2, 6, exchange)": "hybrid(2, 6)",
    "hybrid(1, 12, ring)": "ring",
}


@pytest.mark.parametrize("text", [*NAMES, *SPELLED])
def test_a_name_says_it_all(text: str) -> None:
    strategy, name = Strategy.parse(text, 12), SPELLED.get(text, text)
    assert strategy == NAMES[name]
    assert (strategy.name, strategy.ranks) == (name, 12)


@pytest.mark.parametrize(
    "text",
    ["", "Ring", "auto", "zigzag", "hybrid", "hybrid(2)", "hybrid(3, 2)", "hybrid(-2, -2)", "ring ", 3],
)
def test_what_is_no_strategy(text: str) -> None:
    with pytest.raises(OptionError, match=r"u \* r = 4 ranks") as caught:
        Strategy.parse(text, 4)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("given", [("rings", 2, 2), ("ring", 0, 4), ("ring", 2, -2)])
def test_a_strategy_that_does_not_exist(given: tuple[str, int, int]) -> None:
    with pytest.raises(OptionError, match="Strategy: "):
        Strategy(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize("members", range(1, 9))
def test_query_heads_are_shared_evenly_and_no_key_head_travels_for_nothing(members: int) -> None:
    for group, kv_heads in product(range(1, 7), range(1, 7)):
        slices = split_heads(group * kv_heads, kv_heads, members)
        counts = [part.heads for part in slices]
        assert (len(counts), sum(counts)) == (members, group * kv_heads)
        assert max(counts) - min(counts) <= 1
        for part in slices:
            assert part.kv == tuple(sorted({head // group for head in range(part.q_start, part.q_stop)}))
