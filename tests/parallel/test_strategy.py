"""Names of strategies, and which member of a group has which heads."""

from itertools import pairwise, product

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
def test_each_query_head_is_with_one_member_and_reads_its_key_head(members: int) -> None:
    for group, kv_heads in product(range(1, 7), range(1, 7)):
        slices = split_heads(group * kv_heads, kv_heads, members)
        assert len(slices) == members
        assert (slices[0].q_start, slices[-1].q_stop) == (0, group * kv_heads)
        assert all(one.q_stop == following.q_start for one, following in pairwise(slices))
        counts = [part.heads for part in slices]
        assert max(counts) - min(counts) <= 1, "as even as can be"
        for part in slices:
            wanted = [head // group for head in range(part.q_start, part.q_stop)]
            assert part.kv == tuple(sorted(set(wanted))), "no key head travels for nothing"
            given = [part.kv[place] for place in part.kv_map]
            # The kernel gives each of its key heads equally many query heads, in order.
            each = part.heads // max(1, len(given))
            assert [given[head // each] for head in range(part.heads)] == wanted
            used = [wanted.count(kv) for kv in part.kv]
            divisors = [x for x in range(1, 7) if all(n % x == 0 for n in used)]
            assert each == max(divisors) if used else part.kv_map == (), "none is repeated more than needed"
