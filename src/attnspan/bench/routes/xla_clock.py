"""How long XLA has been compiling for JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

__all__ = ["compiler_seconds"]

_COMPILED = "/jax/core/compile/backend_compile_duration"


@cache
def compiler_seconds() -> Callable[[], float]:
    """A counter of the seconds that XLA has compiled for JAX in this process since it was first asked for.

    Example:
        >>> import pytest
        >>> jax = pytest.importorskip("jax")
        >>> counter = compiler_seconds()
        >>> before = counter()
        >>> counter() >= before
        True
    """
    import jax

    spent = [0.0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            spent[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: spent[0]
