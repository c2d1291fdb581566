"""The type and rank promotion settings of JAX that attnspan's own code is written for.

A process may set ``jax_numpy_rank_promotion`` or ``jax_numpy_dtype_promotion`` to find mistakes in its own
code. JAX reads these settings while it traces, and it traces derivatives and batching rules after the call
has returned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def standard_promotion() -> Iterator[None]:
    """Use JAX's default promotion in this thread until the block ends."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def own_promotion(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` so that it runs under `standard_promotion`."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with standard_promotion():
            return fn(*args, **kwargs)

    return run
