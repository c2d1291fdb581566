"""Names of `attnspan` itself that are looked up when they are used."""

from typing import Any


def look_up(name: str) -> Any:
    """The ``__getattr__`` of `attnspan`: its version, and errors that name the frameworks' functions."""
    if name == "__version__":
        # The look-up takes longer than the rest of the import.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("attnspan")
        except PackageNotFoundError:  # a source tree on the path
            return "0+unknown"
    if name in ("attention", "explain"):
        # An ImportError, because `from attnspan import ...` replaces the text of an AttributeError.
        raise ImportError(
            f"attnspan.{name}: expected the name of a framework, got none. Write `from attnspan.torch import "
            f"{name}`, or `from attnspan.jax import {name}`"
        )
    raise AttributeError(f"module 'attnspan' has no attribute {name!r}")
