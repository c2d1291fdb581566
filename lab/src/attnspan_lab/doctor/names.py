"""Names of a batch's arguments: they tell documents, padding, and the sequence that an argument is for."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["IDS", "marks_padding", "shown_code", "valid_entries", "words_of"]

#: Names of document numbers.
IDS = re.compile(
    r"(seg(ment)?|doc(ument)?|seq(uence)?)_?(ids?|idx|index|nums?)$|^(documents?|segments?|docs)$"
)
_COMMON = re.compile(r"ids?|inputs?|hidden|states?|embed\w*|att\w*|mask|padding|pad|keys?|tokens?")


def words_of(name: str) -> set[str]:
    """List the words of a name that tell its sequence from others."""
    return {x.rstrip("s") for x in re.findall("[a-z]+", name.lower()) if not _COMMON.fullmatch(x)}


def marks_padding(name: str) -> bool:
    """Whether 1 marks padding in a mask of this name, and not real tokens."""
    return "padding" in name


def valid_entries(name: str, x: Any) -> Any:
    """Mark the entries of a padding mask that are not padding."""
    return x == 0 if marks_padding(name) else x != 0


def shown_code(name: str, *, hidden: bool = False) -> str:
    """Write the code that marks the entries of a padding mask that are not padding, or those that are.

    Example:
        >>> shown_code("attention_mask"), shown_code("key_padding_mask")
        ('(attention_mask != 0)', '(key_padding_mask == 0)')
    """
    return f"({name} {'==' if marks_padding(name) != hidden else '!='} 0)"
