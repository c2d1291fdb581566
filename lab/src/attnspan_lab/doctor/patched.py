"""Other values of attributes for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module, a class or a function other values until the end of the block.

    Example:
        >>> import time
        >>> with patched(time, time=lambda: 0.0):
        ...     time.time()
        0.0
    """
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
