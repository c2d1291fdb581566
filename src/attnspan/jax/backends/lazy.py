"""Functions of modules that are imported when the first call needs them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def functions_of(module: str, *, own_derivative: bool = False) -> dict[str, Any]:
    """Return the functions of a backend that a module has, without an import of the module.

    Args:
        module: Name of a module with ``supports``, ``forward`` and ``backward``.
        own_derivative: JAX differentiates ``forward``, and the module has no ``backward``.
    """
    names = ("supports", "forward") if own_derivative else ("supports", "forward", "backward")
    return {name: _function(module, name) for name in names}


def _function(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*args, **options)

    return call
