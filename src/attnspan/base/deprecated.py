"""Names that go away: they warn for one minor release, and name their successor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """A public name that has a new spelling.

    Args:
        new: The new spelling, for people.
        value: The object that the old name stands for.
        removed_in: The version that removes the old name, such as "0.4".
    """

    new: str
    value: Any
    removed_in: str


def renamed(module: str, names: Mapping[str, Renamed], name: str) -> Any:
    """Look an old name up and warn. A package's ``__getattr__`` calls it for names that it does not know.

    Args:
        module: The package, such as ``__name__``.
        names: Old names of the package.
        name: The name that is asked for.

    Returns:
        The object that the old name stands for.

    Raises:
        AttributeError: The package never had the name, or the version that removes it has come.

    Example:
        >>> import warnings
        >>> names = {"old_mask": Renamed("new_mask", 3, "99.0")}
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     renamed("attnspan", names, "old_mask")
        3
        >>> str(caught[0].message)
        'attnspan.old_mask is now new_mask. Version 99.0 removes the old name.'
    """
    found = names.get(name)
    if found is None or _number(_own_version()) >= _number(found.removed_in):
        now = "" if found is None else f". Use {found.new}"
        raise AttributeError(f"module {module!r} has no attribute {name!r}{now}")
    text = f"{module}.{name} is now {found.new}. Version {found.removed_in} removes the old name."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return found.value


def _own_version() -> str:
    try:
        return version("attnspan")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0"


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
