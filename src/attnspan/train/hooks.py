"""What may watch a run: told where steps and their parts begin and end, it changes nothing of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

__all__ = ["UNOBSERVED", "Observer", "Unobserved"]

T = TypeVar("T")


class Observer(Protocol):
    """The places of a training loop that someone may want to time; `attnspan.tools.bench.monitor` does.

    The loop calls it like this::

        for batch in observer.data(batches):
            with observer.step(number=1, tokens=2048):
                with observer.phase("forward"): ...
                with observer.phase("backward"): ...
                with observer.phase("optimizer"): ...
    """

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass on the batches; the time between asking and getting is the wait for data.

        Args:
            batches: What the loop trains on.
        """
        ...

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        """Surround one step.

        Args:
            number: Number of the step, from 1; None counts on.
            tokens: Tokens that the step trains on, padding included.
        """
        ...

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Surround one part of a step.

        Args:
            name: "forward", "backward", "optimizer" or "communication".
        """
        ...


class Unobserved:
    """The observer of a run that nobody watches.

    Example:
        >>> watched = Unobserved()
        >>> with watched.step(), watched.phase("forward"):
        ...     print([*watched.data([1, 2])])
        [1, 2]
    """

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        return iter(batches)

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        del number, tokens
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        del name
        return nullcontext()


UNOBSERVED = Unobserved()
