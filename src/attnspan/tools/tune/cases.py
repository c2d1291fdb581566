"""The calls that are tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

from attnspan.errors import OptionError
from attnspan.kernels.tuned import Key, length_bucket
from attnspan.masks import Mask, causal, full, window

__all__ = ["Case", "grid"]

_HEADS = 8  # The core applies a tuned number of threads only to calls of up to 8 heads, see csrc/tuned.cc.
_MOST_FLOPS = 4e9  # Calls beyond this have fewer heads, because a search makes hundreds of them.


@dataclass(frozen=True)
class Case:
    """A call that stands for all calls of its key."""

    k_len: int
    head_dim: int
    kind: str  # of the mask
    dtype: str = "float32"
    direction: str = "forward"

    @property
    def q_len(self) -> int:
        return 1 if self.kind == "decode" else self.k_len

    @property
    def mask(self) -> Mask:
        if self.kind == "sparse":
            return causal() & window(self.k_len // 16)
        return causal() if self.kind == "half" else full()

    @property
    def heads(self) -> int:
        flops = 4.0 * self.q_len * self.k_len * self.head_dim * (2.5 if self.direction == "backward" else 1)
        return max(2, min(_HEADS, int(_MOST_FLOPS / flops)))

    def key(self, backend: str, isa: str) -> Key:
        bucket = length_bucket(self.k_len)
        return Key(backend, self.direction, isa, self.dtype, self.head_dim, bucket, self.kind)


def grid(dtypes: str, head_dims: str, lengths: str, masks: str, modes: str) -> list[Case]:
    """One case for each key, short calls first. Arguments are lists, separated by commas.

    Raises:
        OptionError: A value is illegal.

    Example:
        >>> [case.k_len for case in grid("float32", "64", "512,400,128", "half", "forward")]
        [128, 512]
    """
    choices = (
        sorted(_listed("lengths", lengths, range(17, 2**31))),  # Up to 16 queries are of kind "decode".
        _listed("head-dims", head_dims, range(1, 2**31)),
        _listed("masks", masks, ("dense", "half", "sparse", "decode")),
        _listed("dtypes", dtypes, ("float32", "bfloat16", "float16")),
        _listed("modes", modes, ("forward", "backward")),
    )
    return list({case.key("", ""): case for case in starmap(Case, product(*choices))}.values())


def _listed(name: str, text: str, legal: Sequence[Any]) -> list[Any]:
    values = [int(word) if word.isdecimal() else word for word in text.replace(" ", "").split(",")]
    if all(type(value) is type(legal[0]) and value in legal for value in values):
        return values
    expected = f"numbers from {legal[0]} on" if isinstance(legal, range) else f"some of {', '.join(legal)}"
    raise OptionError(f"--{name}", expected=expected, got=repr(text), remedy="Separate them by commas")
