"""Patches of other libraries, which an integration makes by a call and can undo."""

import sys
from collections.abc import Callable
from typing import Any

from attnspan.errors import UsageError, expect


class Patches:
    """Changes of one library or object. `undo` restores the original values.

    Args:
        what: The library or the object, for errors.

    Example:
        >>> import math
        >>> original, patches = math.sqrt, Patches("math")
        >>> patches.apply(lambda: patches.set(math, "sqrt", abs))
        >>> math.sqrt(-4)
        4
        >>> patches.undo()
        >>> math.sqrt is original
        True
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._undo: list[Callable[[], None]] = []
        self._present: list[tuple[str, Callable[[], bool]]] = []  # whether each patch is still in place

    def apply(self, make: Callable[[], None]) -> None:
        """Make all patches, or none if one of them fails. Do nothing if they are already made."""
        if not self._undo:
            try:
                make()
            except BaseException:
                self.undo()
                raise

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute of a module, a class or an object."""
        own = name in vars(owner)
        old = vars(owner).get(name)
        setattr(owner, name, new)
        self.later(lambda: setattr(owner, name, old) if own else delattr(owner, name))
        self._present.append((name, lambda: vars(owner).get(name) is new))

    def replace(self, module: Any, name: str, new: Any) -> None:
        """Replace a function of a module, also in all modules that have imported it."""
        old = getattr(module, name)
        _exchange(name, old, new)
        # Modules that were loaded meanwhile have imported the new function.
        self.later(lambda: _exchange(name, new, old))
        self._present.append((name, lambda: getattr(module, name) is new))

    def later(self, undo: Callable[[], None]) -> None:
        """Let `undo` also call this function."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Restore the original values, the latest first.

        Raises:
            UsageError: Other code has replaced a patch since. Nothing is restored then.
        """
        wrapped = [name for name, in_place in self._present if not in_place()]
        expected, remedy = f"{self._what} as attnspan patched it", "Undo the later patch first"
        got = f"another patch of {', '.join(wrapped)}"
        expect(not wrapped, "disable", expected, got, remedy, error=UsageError)
        self._present.clear()
        while self._undo:
            self._undo.pop()()


def _exchange(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        # getattr would make lazy modules import their contents.
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = new
