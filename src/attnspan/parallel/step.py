"""Step from plain data to a framework: the functions that `on`, `gather` and `roll` call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def step(what: str, framework: str) -> Callable[..., Any]:
    """Load the function that puts data on a mesh of a framework. It takes the data, the mesh and options.

    Planning knows no framework. Each framework is a package here, whose module ``steps`` lists its functions.

    Args:
        what: A key of the framework's ``STEPS``.
        framework: Name of the mesh's framework.
    """
    return import_module(f"{__package__}.{framework}.steps").STEPS[what]  # type: ignore[no-any-return]
