"""Names of strategies, and which member of a group has which heads."""

import pytest

from attnspan.errors import OptionError
from attnspan.parallel.strategy import Strategy

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
