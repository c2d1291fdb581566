"""Locks that are free in a forked child, which lacks the threads of its parent that may hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakSet

C = TypeVar("C", bound=type)


class ForkSafeLock:
    """A reentrant lock that is free at the start of a forked child.

    Example:
        >>> lock = ForkSafeLock()
        >>> with lock.held():
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = RLock()
        _locks.add(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. If the thread forks meanwhile, the child releases the lock that its parent took."""
        lock = self._lock
        with lock:
            yield


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _renew() -> None:
    for lock in _locks:
        lock._lock = RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(after_in_child=_renew)


def without_locks(cls: C) -> C:
    """Remove the lock from each `cached_property` of a class. Python 3.11 and older have such a lock.

    All instances share that lock. Without it, two threads may compute a value twice.
    """
    for member in vars(cls).values():
        if isinstance(member, cached_property):
            unlocked: Any = member
            unlocked.lock = nullcontext()
    return cls
