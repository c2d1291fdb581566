"""Words of findings that depend on numbers."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun.

    Example:
        >>> counted(1, "finding"), counted(2, "query", "queries")
        ('1 finding', '2 queries')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"
