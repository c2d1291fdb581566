"""`backend`: a block that selects the backend of calls without ``backend=``, in torch and in JAX."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from attnspan.errors import DtypeError, expect


class _Local(threading.local):
    def __init__(self) -> None:
        # An attribute in the thread's dict, because compilers guard on it. They do not see a class attribute.
        self.name: str | None = None
        self.names: tuple[str | None, ...] = ()  # the open blocks of the thread, innermost last


_local = _Local()
_followers: list[Callable[[str | None], None]] = []


class backend:
    """A block that selects the backend of all calls of attention without ``backend=``.

    Use it for calls that you do not write, for example calls in models, drop-ins and integrations. Blocks
    nest, and you may enter one object any number of times. A block belongs to the thread that enters it, as
    in `torch.no_grad`. Until it ends, it covers all calls of its thread, including calls in a generator's
    caller and in other tasks of asyncio. It covers no call of another thread. A function under torch.compile
    or jax.jit compiles once for each backend that you call it under. For activation checkpointing, see
    `attnspan.torch.keep_backend`.

    Args:
        name: Name of a backend of torch or JAX. For example, "math" has forward-mode and higher derivatives.
            None selects the fastest backend that can run each call.

    Raises:
        TypeError: The name is not a string. A call raises a ValueError if it has no backend with this name.

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
        # The block is not always the innermost one: a suspended generator may end it inside its caller's.
        names = _local.names
        ended = len(names) - 1
        while ended > 0 and names[ended] != self.name:  # a loop that compilers trace
            ended -= 1
        _enter((*names[:ended], *names[ended + 1 :]))


def _enter(names: tuple[str | None, ...]) -> None:
    _local.names = names
    _local.name = name = names[-1] if names else None
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():  # torch's programs contain no call of JAX
        return
    for follower in _followers:
        follower(name)


def asked(own: str | None) -> str | None:
    """The backend that a call requests: its ``backend=``, else the backend of the block around it."""
    return _local.name if own is None else own


def follow(follower: Callable[[str | None], None]) -> None:
    """Call a function with the current name, and again whenever a block is entered or left."""
    _followers.append(follower)
    follower(_local.name)
