"""Words of findings that depend on numbers."""

from __future__ import annotations

__all__ = ["counted", "first_line"]


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun.

    Example:
        >>> counted(1, "finding"), counted(2, "query", "queries")
        ('1 finding', '2 queries')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
