"""Strategies, their names, and the split of the heads."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, cast

from attnspan.base.checks import count
from attnspan.errors import OptionError, expect

Kind = Literal["exchange", "ring"]
_HYBRID = re.compile(r"hybrid\(\s*(\d+)\s*,\s*(\d+)\s*(?:,\s*(exchange|ring)\s*)?\)")


@dataclass(frozen=True)
class Strategy:
    """Strategy of ranks: `members` neighbours split the heads, `groups` of such neighbours split the tokens.

    Attributes:
        kind: Communication between groups. "exchange" sends the keys that the receiver needs, "ring" sends
            all keys.
        members: Ranks of a group, u. While a member attends, it has all rows of the group for a part of the
            heads.
        groups: Number of groups, r. There are u * r ranks, and rank p is member p % u of group p // u.

    Raises:
        OptionError: `kind` is unknown, or `members` or `groups` is less than 1.
        DtypeError: `members` or `groups` is no int.

    Example:
        >>> Strategy("exchange", members=2, groups=4).name
        'hybrid(2, 4)'
    """

    kind: Kind
    members: int
    groups: int

    def __post_init__(self) -> None:
        known, remedy = self.kind in ("exchange", "ring"), "Or name one: Strategy.parse"
        expect(known, "Strategy: kind", "'exchange' or 'ring'", repr(self.kind), remedy)
        count("Strategy: members", self.members, least=1)
        count("Strategy: groups", self.groups, least=1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.members * self.groups

    @property
    def name(self) -> str:
        """Name that `parse` reads."""
        if self.groups == 1:
            return "ulysses"
        if self.members == 1:
            return self.kind
        return f"hybrid({self.members}, {self.groups}{', ring' if self.kind == 'ring' else ''})"

    @classmethod
    def parse(cls, text: str | Strategy, ranks: int) -> Strategy:
        """Read "exchange", "ring", "ulysses", "hybrid(u, r)" or "hybrid(u, r, ring)", or check a strategy.

        Raises:
            OptionError: The text is no strategy, or the strategy is for another number of ranks.

        Example:
            >>> Strategy.parse("hybrid(2, 2, ring)", ranks=4)
            Strategy(kind='ring', members=2, groups=2)
        """
        if isinstance(text, Strategy):
            wanted, got = f"one for {ranks} ranks", f"{text.name} for {text.ranks}"
            expect(text.ranks == ranks, "strategy", wanted, got, "Make members * groups equal to the ranks")
            return text
        hybrid = _HYBRID.fullmatch(text) if isinstance(text, str) else None
        if hybrid:
            members, groups = int(hybrid[1]), int(hybrid[2])
            if members * groups == ranks and ranks > 0:
                return cls("ring" if hybrid[3] == "ring" else "exchange", members, groups)
        elif text in ("exchange", "ring"):
            return cls(cast(Kind, text), 1, ranks)
        elif text == "ulysses":
            return cls("exchange", ranks, 1)
        raise OptionError(
            "strategy",
            expected=f"'auto', 'exchange', 'ring', 'ulysses', or 'hybrid(u, r)' with u * r = {ranks} ranks",
            got=repr(text),
            remedy="Pass one of these. A hybrid may end in ', ring)', which sends all keys round",
        )


@dataclass(frozen=True)
class HeadSlice:
    """Heads of one member of a group, while it attends.

    Attributes:
        q_start, q_stop: Its query heads.
        kv: The key heads that these query heads read, ascending.
        kv_map: The place in `kv` of each key head that the kernel gets. All key heads of a call must have
            equally many query heads, so the kernel may get a key head more than once.

    Example:
        >>> HeadSlice(0, 4, (0, 1), (0, 1)).heads
        4
    """

    q_start: int
    q_stop: int
    kv: tuple[int, ...]
    kv_map: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q_stop - self.q_start


def members_of_node(node_size: int, ranks: int, q_heads: int) -> int:
    """Largest group of a node's ranks that can share heads.

    No group lies in two nodes, and each rank has a query head.

    Example:
        >>> members_of_node(8, 64, 32), members_of_node(8, 64, 6), members_of_node(8, 12, 32)
        (8, 4, 4)
    """
    common = math.gcd(node_size, ranks)
    return max(u for u in range(1, min(common, q_heads) + 1) if common % u == 0)


def split_heads(q_heads: int, kv_heads: int, members: int) -> list[HeadSlice]:
    """Split query heads evenly among the members of a group, with the key heads that they read.

    If there are more members than query heads, some members have none.

    Example:
        >>> split_heads(8, 2, 4)[1]
        HeadSlice(q_start=2, q_stop=4, kv=(0,), kv_map=(0,))
        >>> split_heads(12, 3, 2)[0]  # four query heads of key head 0, two of key head 1
        HeadSlice(q_start=0, q_stop=6, kv=(0, 1), kv_map=(0, 0, 1))
    """
    group = q_heads // kv_heads
    base, extra = divmod(q_heads, members)
    slices, start = [], 0
    for member in range(members):
        stop = start + base + (member < extra)
        read = [head // group for head in range(start, stop)]
        kv = sorted(set(read))
        each = math.gcd(*(read.count(head) for head in kv)) if kv else 1
        kv_map = tuple(kv.index(head) for head in read[::each])
        slices.append(HeadSlice(start, stop, tuple(kv), kv_map))
        start = stop
    return slices
