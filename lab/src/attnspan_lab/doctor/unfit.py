"""The error for targets that the doctor cannot examine."""

from __future__ import annotations

from functools import partial

from attnspan.errors import OptionError, expect

__all__ = ["Unfit", "require"]


class Unfit(OptionError):
    """An error whose parts findings show apart.

    Attributes:
        problem: What was expected, and what the doctor got.
        remedy: A remedy, without a full stop.
    """

    def __init__(self, what: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(what, expected=expected, got=got, remedy=remedy)
        self.problem, self.remedy = f"expected {expected}, got {got}", remedy


#: `attnspan.errors.expect`, which raises `Unfit`.
require = partial(expect, error=Unfit)
