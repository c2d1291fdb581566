"""Names that a package shows, and imports when they are used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package, which imports names from the modules that define them.

    Args:
        package: Name of the package.
        homes: The module of each name. A module that starts with a dot is within the package.

    Example:
        >>> lazy("attnspan.masks", {"Interval": ".intervals"})("Interval")
        <class 'attnspan.masks.intervals.Interval'>
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return look_up
