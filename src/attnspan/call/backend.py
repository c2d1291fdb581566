"""The backend of calls that name none: `backend`, for every call of a block, in torch and in JAX."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from attnspan.errors import DtypeError, expect

__all__ = ["asked", "backend", "follow"]


class _Local(threading.local):
    def __init__(self) -> None:
        # In the thread's own dict, where compilers guard on it; an attribute of the class they would not see.
        self.name: str | None = None
        self.names: tuple[str | None, ...] = ()  # of the blocks that the thread is in, the innermost one last


_local = _Local()
_followers: list[Callable[[str | None], None]] = []


class backend:
    """A block in which every call of attention that names no backend runs one, as ``backend=`` of each would.

    It serves calls that a user does not write, such as the calls of models, of drop-ins and of integrations.
    Blocks nest, and you may enter one object any number of times. A block belongs to the thread that enters
    it, as in `torch.no_grad`. Until it ends, it covers all calls of that thread, also in a generator's caller
    and in other tasks of asyncio, and no call of another thread. Functions of torch.compile and jax.jit are
    compiled once for each backend that they are called under. For activation checkpointing see
    `attnspan.torch.keep_backend`.

    Args:
        name: Name of a backend of the framework whose attention is called, such as "math", which has
            forward-mode and higher derivatives; None for the fastest that can run each call.

    Raises:
        TypeError: The name is not a string. A call raises a ValueError where it has no backend of that name.

    Example:
        >>> import torch, attnspan
        >>> from attnspan.torch import scaled_dot_product_attention as attend
        >>> x = torch.randn(1, 2, 4, 8)
        >>> with attnspan.backend("math"):
        ...     out, tangent = torch.func.jvp(lambda q: attend(q, x, x, is_causal=True), (x,), (x,))
        >>> tangent.shape
        torch.Size([1, 2, 4, 8])
    """

    def __init__(self, name: str | None) -> None:
        known, remedy = name is None or isinstance(name, str), 'Pass a name, such as "math"'
        expect(known, "backend", "a name or None", type(name).__name__, remedy, error=DtypeError)
        self.name = name

    def __enter__(self) -> None:
        _enter((*_local.names, self.name))

    def __exit__(self, *_: object) -> None:
        # Not always the innermost one: a suspended generator may end its block inside of its caller's.
        names = _local.names
        ended = len(names) - 1
        while ended > 0 and names[ended] != self.name:  # a loop that compilers trace
            ended -= 1
        _enter((*names[:ended], *names[ended + 1 :]))


def _enter(names: tuple[str | None, ...]) -> None:
    _local.names = names
    _local.name = name = names[-1] if names else None
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():  # whose programs hold no call of JAX
        return
    for follower in _followers:
        follower(name)


def asked(own: str | None) -> str | None:
    """The backend that a call asks for: the one that it names, else that of the block around it."""
    return _local.name if own is None else own


def follow(follower: Callable[[str | None], None]) -> None:
    """Call a function with the name of each block that is entered or left, from now on."""
    _followers.append(follower)
    follower(_local.name)
