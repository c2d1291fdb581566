"""Names of strategies, and which member of a group has which heads."""

from itertools import pairwise

import pytest

from attnspan.errors import OptionError
from attnspan.parallel.strategy import Strategy, split_heads

NAMES = [
    ("exchange", 4, Strategy("exchange", 1, 4)),
    ("ring", 4, Strategy("ring", 1, 4)),
    ("ulysses", 4, Strategy("exchange", 4, 1)),
    ("hybrid(2, 2)", 4, Strategy("exchange", 2, 2)),
    ("hybrid(2, 3, ring)", 6, Strategy("ring", 2, 3)),
]


@pytest.mark.parametrize(("name", "ranks", "strategy"), NAMES)
def test_a_name_says_it_all(name: str, ranks: int, strategy: Strategy) -> None:
    assert Strategy.parse(name, ranks) == strategy
    assert strategy.name == name
    assert strategy.ranks == ranks


@pytest.mark.parametrize("kind", ["exchange", "ring"])
@pytest.mark.parametrize(("members", "groups"), [(1, 2), (1, 7), (2, 3), (5, 2)])
def test_every_strategy_is_read_back_from_its_name(kind: str, members: int, groups: int) -> None:
    strategy = Strategy(kind, members, groups)  # type: ignore[arg-type]
    assert Strategy.parse(strategy.name, members * groups) == strategy


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("hybrid(2,2)", "hybrid(2, 2)"),
        ("hybrid( 2 , 2 , ring )", "hybrid(2, 2, ring)"),
        ("hybrid(2, 2, exchange)", "hybrid(2, 2)"),
        ("hybrid(1, 4)", "exchange"),
        ("hybrid(1, 4, ring)", "ring"),
        ("hybrid(4, 1)", "ulysses"),
    ],
)
def test_spellings_of_one_strategy(spelled: str, name: str) -> None:
    assert Strategy.parse(spelled, 4).name == name


@pytest.mark.parametrize("kind", ["exchange", "ring"])
def test_one_group_has_one_name_whatever_would_happen_between_groups(kind: str) -> None:
    assert Strategy(kind, 3, 1).name == "ulysses"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "auto", "Ring", "zigzag", "hybrid", "hybrid(2, 3)", "hybrid(0, 4)", "hybrid(2, 2, zigzag)", "ring "],
)
def test_what_is_no_strategy(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Strategy.parse(text, 4)
    message = str(caught.value)
    assert "u * r = 4 ranks" in message
    assert repr(text) in message


def test_no_ranks_have_no_hybrid() -> None:
    with pytest.raises(OptionError, match="= 0 ranks"):
        Strategy.parse("hybrid(0, 3)", 0)


SIZES = [
    (group * kv_heads, kv_heads, members)
    for group in range(1, 7)
    for kv_heads in range(1, 7)
    for members in range(1, 9)
]


@pytest.mark.parametrize("members", range(1, 9))
def test_each_query_head_is_with_one_member_and_reads_its_key_head(members: int) -> None:
    for q_heads, kv_heads, _ in (size for size in SIZES if size[2] == members):
        slices = split_heads(q_heads, kv_heads, members)
        assert len(slices) == members
        assert slices[0].q_start == 0
        assert slices[-1].q_stop == q_heads
        assert all(one.q_stop == next_.q_start for one, next_ in pairwise(slices))
        counts = [part.heads for part in slices]
        assert max(counts) - min(counts) <= 1, "as even as can be"
        for part in slices:
            wanted = [head // (q_heads // kv_heads) for head in range(part.q_start, part.q_stop)]
            assert part.kv == tuple(sorted(set(wanted))), "no key head travels for nothing"
            assert part.kv == tuple(range(part.kv[0], part.kv[-1] + 1)) if part.kv else part.heads == 0
            given = [part.kv[place] for place in part.kv_map]
            # The kernel gives each of its key heads equally many query heads, in order.
            assert part.heads % max(1, len(given)) == 0, (q_heads, kv_heads, members)
            each = part.heads // max(1, len(given))
            assert [given[head // each] for head in range(part.heads)] == wanted


def test_key_heads_are_repeated_no_more_than_needed() -> None:
    for q_heads, kv_heads, members in SIZES:
        for part in split_heads(q_heads, kv_heads, members):
            group = q_heads // kv_heads
            counts = [sum(head // group == kv for head in range(part.q_start, part.q_stop)) for kv in part.kv]
            if len(set(counts)) <= 1:
                assert part.kv_map == tuple(range(len(part.kv))), "equal groups repeat nothing"
            else:
                shared = [x for x in range(1, max(counts) + 1) if all(count % x == 0 for count in counts)]
                assert len(part.kv_map) == part.heads // shared[-1]


def test_members_beyond_the_heads_have_none() -> None:
    slices = split_heads(3, 1, 5)
    assert [part.heads for part in slices] == [1, 1, 1, 0, 0]
    assert [(part.kv, part.kv_map) for part in slices[3:]] == [((), ()), ((), ())]
