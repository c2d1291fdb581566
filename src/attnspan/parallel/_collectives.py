"""The one way in which ranks exchange rows, counted and with errors that say what to do.

Every exchange is an all-to-all with uneven parts: a step of a ring is one whose parts but one are empty. So
there is one kind of collective, on one group, in the same order on all ranks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import CommunicationError


@dataclass
class Counts:
    """Bytes that this rank exchanged with others, by phase; what it sends itself does not count.

    Attributes:
        sent: by phase: "scatter", "gather", "exchange", "ring" or "gradients".
        received: the same.

    Example:
        >>> Counts().total_received
        0
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def total_sent(self) -> int:
        """Bytes of all phases."""
        return sum(self.sent.values())

    @property
    def total_received(self) -> int:
        """Bytes of all phases."""
        return sum(self.received.values())


_watching: list[Counts] = []


@contextmanager
def counted_bytes() -> Iterator[Counts]:
    """Count the bytes of all exchanges until the block ends.

    Example:
        >>> with counted_bytes() as counts:
        ...     pass
        >>> counts.total_sent
        0
    """
    counts = Counts()
    _watching.append(counts)
    try:
        yield counts
    finally:
        _watching[:] = [x for x in _watching if x is not counts]


class Pending:
    """An exchange under way; its buffers live as long as it does."""

    def __init__(self, received: Tensor, sent: Tensor, work: Any, group: Any, phase: str) -> None:
        self._received, self._sent, self._work = received, sent, work
        self._group, self._phase = group, phase

    def wait(self) -> Tensor:
        """The received rows, once they are there.

        Raises:
            CommunicationError: A rank did not answer.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise_broken(self._group, self._phase, error)
            self._work = None
            # The rows that were sent are no longer needed.
            self._sent = self._received
        return self._received


def exchange(
    send: Tensor,
    send_rows: Sequence[int],
    rows: Sequence[int],
    group: Any,
    phase: str,
    received: Tensor | None = None,
) -> Pending:
    """Start to send rows to all ranks, and to receive theirs.

    Args:
        send: Shape (sum of send_rows, ...), contiguous: the rows for rank 0, for rank 1, ...
        send_rows: How many go to each rank.
        rows: How many come from each rank.
        group: The process group.
        phase: Under which name bytes are counted.
        received: Where they go, shape (sum of rows, ...), contiguous; None for a new tensor.

    Raises:
        CommunicationError: The group is broken.
    """
    if received is None:
        received = send.new_empty((sum(rows), *send.shape[1:]))
    width = send[:1].numel() if send.shape[0] else received[:1].numel()
    size = width * send.element_size()
    me = group.rank()
    for counts in _watching:
        counts.sent[phase] += (sum(send_rows) - send_rows[me]) * size
        counts.received[phase] += (sum(rows) - rows[me]) * size
    try:
        # As bytes: not every engine knows every dtype.
        work = dist.all_to_all_single(
            _bytes(received),
            _bytes(send),
            [n * size for n in rows],
            [n * size for n in send_rows],
            group=group,
            async_op=True,
        )
    except RuntimeError as error:
        raise_broken(group, phase, error)
    return Pending(received, send, work, group, phase)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def raise_broken(group: Any, phase: str, error: Exception) -> NoReturn:
    """Say which exchange failed, and what to do.

    Raises:
        CommunicationError: Always.
    """
    raise CommunicationError(
        f"context parallelism, {phase}, rank {group.rank()} of {group.size()} ({group.group_name})",
        expected="an answer from every rank",
        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        remedy="A rank has died, hangs or runs another program: look at the first one that failed, and "
        "resume from a checkpoint",
    ) from error
