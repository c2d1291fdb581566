"""Words of findings that depend on numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attnspan_lab.console import bytes_text

__all__ = [
    "capitalized",
    "counted",
    "dtype_name",
    "error_text",
    "first_line",
    "for_long",
    "listed",
    "lowered",
    "whole_sentences",
]

_SENTENCES = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_LONG = 32_768  # tokens, for which memory is predicted


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun.

    Example:
        >>> counted(1, "finding"), counted(2, "query", "queries")
        ('1 finding', '2 queries')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def capitalized(text: str) -> str:
    """Write the first letter of a text as a capital."""
    return text[:1].upper() + text[1:]


def lowered(text: str) -> str:
    """Write the first letter of a text small, for the middle of a sentence."""
    return text[:1].lower() + text[1:]


def dtype_name(dtype: object) -> str:
    """Name a dtype without its library."""
    return str(dtype).removeprefix("torch.")


def for_long(size: int, dims: int = 2) -> str:
    """Write the memory of an array for long sequences.

    Args:
        size: Its bytes for each pair of tokens, or for each token.
        dims: Number of its dims that grow with the tokens, 2 or 1.
    """
    return f"{bytes_text(size * _LONG**dims)} at {_LONG:,} tokens"


def first_line(error: BaseException, most: int = 120) -> str:
    """Return the first line of an error's message, or its type, without its later sentences if it is long."""
    return whole_sentences((str(error).strip().splitlines() or [type(error).__name__])[0], most)


def whole_sentences(text: str, most: int) -> str:
    """Keep the first sentences of a text, without the last full stop.

    Args:
        text: The text.
        most: Maximum number of characters. A longer first sentence stays whole, up to 10 times as many
            characters. A cut sentence ends with "...".
    """
    kept, *more = _SENTENCES.split(text)
    for sentence in more:
        if len(kept) + len(sentence) >= most:
            break
        kept = f"{kept} {sentence}"
    return kept.removesuffix(".") if len(kept) <= 10 * most else f"{kept[: 10 * most]}..."


def error_text(error: BaseException, most: int = 200) -> str:
    """Write the type of an error and the first line of its message.

    Example:
        >>> error_text(KeyError("a")), error_text(AssertionError())
        ("KeyError: 'a'", 'AssertionError')
    """
    name = type(error).__name__
    return f"{name}: {first_line(error, most)}" if str(error).strip() else name


def listed(items: Sequence[Any], most: int) -> str:
    """List the first items.

    Example:
        >>> listed([1, 2], 2), listed([1, 2, 3], 2)
        ('1, 2', '1, 2, ...')
    """
    return f"{', '.join(map(str, items[:most]))}{', ...' * (len(items) > most)}"
