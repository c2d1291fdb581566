"""Which calls are tuned: representative problems of each key, and the key of a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnspan.errors import OptionError
from attnspan.kernels.tuned import Key, length_bucket, mask_kind
from attnspan.masks import parse
from attnspan.spans import Spans

__all__ = ["DIRECTIONS", "KINDS", "Case", "grid"]

DIRECTIONS = ("forward", "backward")

#: The mask that stands for a kind, as text; given the number of keys.
KINDS: dict[str, Callable[[int], str]] = {
    "dense": lambda _: "full",
    "half": lambda _: "causal",
    "sparse": lambda length: f"causal & window({max(length // 16, 1)})",
    "decode": lambda _: "full",
}

# A search needs hundreds of calls: where they are long, fewer heads say as much about the blocks.
_MOST_FLOPS = 4e9
_BACKWARD_COST = 2.5


@dataclass(frozen=True)
class Case:
    """One problem to be tuned.

    Args:
        direction: "forward" or "backward".
        dtype: Name of the element type.
        heads: Query heads, and as many key heads.
        q_len: Queries.
        k_len: Keys.
        head_dim: D, also that of values.
        mask: Text in the syntax of `attnspan.parse`.

    Example:
        >>> case = Case("forward", "float32", 8, 1024, 1024, 64, "causal")
        >>> case.kind, case.pairs
        ('half', 524800)
    """

    direction: str
    dtype: str
    heads: int
    q_len: int
    k_len: int
    head_dim: int
    mask: str

    @property
    def spans(self) -> Spans:
        """The lowered mask."""
        return parse(self.mask).spans(self.q_len, self.k_len)

    @property
    def pairs(self) -> int:
        """Visible pairs of one head."""
        return int(self.spans.cost().sum())

    @property
    def kind(self) -> str:
        """See `attnspan.kernels.tuned.mask_kind`."""
        return mask_kind(self.q_len, self.k_len, self.pairs)

    @property
    def flops(self) -> float:
        """Floating-point operations over visible pairs."""
        cost = _BACKWARD_COST if self.direction == "backward" else 1.0
        return 4.0 * self.pairs * self.head_dim * self.heads * cost

    def key(self, backend: str, isa: str) -> Key:
        """The key whose calls the case stands for.

        Args:
            backend: Name of the back end.
            isa: Its instruction-set level or architecture.

        Example:
            >>> str(Case("backward", "float32", 8, 1, 1000, 64, "full").key("cpu", "avx2"))
            'cpu backward avx2 float32 D=64 S<=1024 decode'
        """
        bucket = length_bucket(self.k_len)
        return Key(backend, self.direction, isa, self.dtype, self.head_dim, bucket, self.kind)

    def describe(self) -> dict[str, Any]:
        """Plain data for the record."""
        return dict(vars(self))


def grid(
    directions: Sequence[str],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    lengths: Sequence[int],
    masks: Sequence[str],
    heads: int,
) -> list[Case]:
    """All combinations, short ones first, each key once.

    Args:
        directions: Of `DIRECTIONS`.
        dtypes: Names of element types.
        head_dims: Values of D.
        lengths: Numbers of keys, and of queries but for "decode", which has one.
        masks: Names of `KINDS`, or masks as text.
        heads: Heads; fewer, but not below 2, where a call would take too long.

    Raises:
        OptionError: A direction or a mask is unknown, or a number is below 1.

    Example:
        >>> [case.mask for case in grid(["forward"], ["float32"], [64], [256], ["half", "sparse"], 8)]
        ['causal', 'causal & window(16)']
    """
    for name, numbers in (("head_dims", head_dims), ("lengths", lengths), ("heads", [heads])):
        if min(numbers) < 1:
            raise OptionError(name, expected="1 or more", got=str(min(numbers)), remedy="Pass larger ones")
    for direction in directions:
        if direction not in DIRECTIONS:
            expected = f"some of {', '.join(DIRECTIONS)}"
            raise OptionError("modes", expected=expected, got=direction, remedy="Name known ones")
    found: dict[Key, Case] = {}
    for length, mask, dtype, head_dim, direction in product(
        sorted(lengths), masks, dtypes, head_dims, directions
    ):
        q_len = 1 if mask == "decode" else length
        text = KINDS[mask](length) if mask in KINDS else mask
        case = _affordable(Case(direction, dtype, heads, q_len, length, head_dim, text))
        found.setdefault(case.key("", ""), case)
    return list(found.values())


def _affordable(case: Case) -> Case:
    fewest = min(2, case.heads)
    heads = max(fewest, min(case.heads, int(_MOST_FLOPS * case.heads / max(case.flops, 1))))
    return Case(**{**vars(case), "heads": heads})
