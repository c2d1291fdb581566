"""Documents into rows of fixed length, and a stream of rows that can be put down and taken up again.

Shapes: B rows of a batch, S tokens of a row.

A document is stored as ``end, t0, ..., tn-1, end``. Its inputs are all but the last of these tokens and its
targets all but the first: the first token is predicted from the end marker alone, the target of the last one
is the end marker, and no target ever belongs to another document. A document that does not fit into what is
left of a row goes on in the next row as a segment of its own; the last input of the first part still has its
true next token as target, so no token is lost and none is seen twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["IGNORE", "PADDING", "Batch", "Corpus", "PackedStream", "pack_once"]

IGNORE = -100  # target that carries no loss; torch's own default for cross entropy
PADDING = -1  # segment id of the filler at the end of the last row


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, one after the other.

    Args:
        tokens: All documents, each with its end markers, (N,), unsigned integers.
        offsets: Document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, (documents + 1,) int64.
        num_bytes: Bytes of text that the tokens stand for, end markers aside.
        end: The token that marks both ends of a document.

    Example:
        >>> corpus = Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3)
        >>> corpus.tokens.tolist(), corpus.offsets.tolist()
        ([9, 5, 6, 9, 9, 7, 9], [0, 4, 7])
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    num_bytes: int
    end: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        """Tokens to predict in one pass: all but the leading end marker of each document."""
        return len(self.tokens) - len(self)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the tokens and of where documents begin.

        Example:
            >>> one, other = (Corpus.from_documents([[token]], end=9, num_bytes=1) for token in (5, 6))
            >>> one.digest == other.digest
            False
        """
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()

    def parts(self, longest: int) -> NDArray[np.int64]:
        """Documents as ranges of inputs, longer ones cut into several, (n, 2) int64.

        Args:
            longest: Most inputs of a part.

        Example:
            >>> Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3).parts(2).tolist()
            [[0, 2], [2, 3], [4, 6]]
        """
        starts, stops = self.offsets[:-1], self.offsets[1:] - 1
        counts = -(-(stops - starts) // longest)
        document = np.repeat(np.arange(len(self)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = starts[document] + number * longest
        return np.stack([begins, np.minimum(begins + longest, stops[document])], axis=1)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int] | NDArray[Any]],
        *,
        end: int,
        num_bytes: int,
        close: bool = True,
    ) -> Corpus:
        """Lay documents one after the other, each between end markers.

        Args:
            documents: Token ids of each document.
            end: The end marker.
            num_bytes: Bytes of text in all documents together.
            close: Whether a document is followed by an end marker; false for documents cut short.

        Example:
            >>> Corpus.from_documents([[5, 6]], end=9, num_bytes=2, close=False).tokens.tolist()
            [9, 5, 6]
        """
        dtype = np.uint16 if end < 2**16 else np.uint32
        marker = np.array([end], dtype)
        parts: list[NDArray[Any]] = []
        for document in documents:
            parts += [marker, np.asarray(document, dtype)] + ([marker] if close else [])
        lengths = [len(document) + 1 + close for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
        return cls(tokens, offsets, num_bytes, end)


@dataclass(frozen=True)
class Batch:
    """Packed rows.

    Args:
        tokens: Inputs, (B, S) int64.
        targets: The next token of the same document, or `IGNORE` on padding, (B, S) int64.
        ids: Segment of each token, ascending within a row, `PADDING` on padding, (B, S) int32.
        positions: Position within the segment, (B, S) int64.

    Example:
        >>> corpus = Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3)
        >>> [batch] = pack_once(corpus, seq_len=6, batch_size=1)
        >>> batch.tokens.tolist(), batch.targets.tolist()
        ([[9, 5, 6, 9, 7, 9]], [[5, 6, 9, 7, 9, -100]])
        >>> batch.ids.tolist(), batch.positions.tolist()
        ([[0, 0, 0, 1, 1, -1]], [[0, 1, 2, 0, 1, 0]])
    """

    tokens: Tensor
    targets: Tensor
    ids: Tensor
    positions: Tensor

    @property
    def num_targets(self) -> int:
        """Targets that carry loss."""
        return int((self.targets != IGNORE).sum())


@dataclass(frozen=True)
class _Row:
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]

    @classmethod
    def blank(cls, seq_len: int, end: int) -> _Row:
        return cls(
            np.full(seq_len, end, np.int64),
            np.full(seq_len, IGNORE, np.int64),
            np.full(seq_len, PADDING, np.int32),
            np.zeros(seq_len, np.int64),
        )


def _pack_row(pieces: Iterator[tuple[int, NDArray[Any]]], row: _Row) -> None:
    """Write the pieces (room already reckoned by their source) into a row, in order."""
    at = 0
    for index, (room, window) in enumerate(pieces):
        here = slice(at, at + room)
        row.tokens[here] = window[:-1]
        row.targets[here] = window[1:]
        row.ids[here] = index
        row.positions[here] = np.arange(room)
        at += room


def _stack(rows: Sequence[_Row]) -> Batch:
    def column(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(row, name) for row in rows]))

    return Batch(column("tokens"), column("targets"), column("ids"), column("positions"))


class _Cursor:
    """A place in a sequence of parts, (n, 2) ranges of inputs: which part, and how much of it is used."""

    def __init__(self, corpus: Corpus, parts: NDArray[np.int64], position: int = 0, offset: int = 0) -> None:
        self.corpus, self.parts, self.position, self.offset = corpus, parts, position, offset

    def take(self, room: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Pieces that fill ``room`` inputs, or all there is: (count, inputs and the next token)."""
        while room and self.position < len(self.parts):
            start, stop = (int(end) for end in self.parts[self.position])
            start += self.offset
            available = stop - start
            count = min(room, available)
            yield count, self.corpus.tokens[start : start + count + 1]
            room -= count
            self.offset += count
            if count == available:
                self.position, self.offset = self.position + 1, 0


class PackedStream:
    """Endless batches over a corpus, shuffled anew in each epoch.

    What is shuffled are documents, and parts of S tokens of longer ones: a document of a megabyte would
    otherwise be hundreds of steps in a row. The order of an epoch is drawn from (seed, epoch), so that four
    integers are the whole state.

    Args:
        corpus: The documents.
        seq_len: S, tokens of a row.
        batch_size: B, rows of a batch.
        seed: Seed of the document order.
        replica: Which of several replicas this is, from 0.
        replicas: How many there are: each gets B rows of every R * B, and all of them together get what one
            with batches of R * B rows would get, in the same order.

    Example:
        >>> corpus = Corpus.from_documents([[1, 2], [3], [4, 5, 6]], end=9, num_bytes=6)
        >>> stream = PackedStream(corpus, seq_len=4, batch_size=2, seed=0)
        >>> first, state = next(stream), stream.state_dict()
        >>> second = next(stream)
        >>> stream.load_state_dict(state)
        >>> torch.equal(next(stream).tokens, second.tokens)
        True
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.corpus, self.seq_len, self.batch_size, self.seed = corpus, seq_len, batch_size, seed
        self._own = _own_rows(batch_size, replica)
        self._rows = batch_size * replicas
        self.epoch = 0
        self._parts = corpus.parts(seq_len)
        self._cursor = self._start()

    def _start(self, position: int = 0, offset: int = 0) -> _Cursor:
        parts = np.random.default_rng([self.seed, self.epoch]).permutation(self._parts)
        return _Cursor(self.corpus, parts, position, offset)

    def _pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        room = self.seq_len
        while room:
            for count, window in self._cursor.take(room):
                room -= count
                yield count, window
            if room:
                self.epoch += 1
                self._cursor = self._start()

    def __iter__(self) -> PackedStream:
        return self

    def __next__(self) -> Batch:
        rows = [_Row.blank(self.seq_len, self.corpus.end) for _ in self._own]
        for number in range(self._rows):
            pieces = self._pieces()
            if number in self._own:
                _pack_row(pieces, rows[number - self._own.start])
            else:
                for _ in pieces:  # Of another replica: the place moves on, nothing is copied.
                    pass
        return _stack(rows)

    def state_dict(self) -> dict[str, int]:
        """The place in the data: seed, epoch, position in the epoch's order, inputs used of that part.

        Example:
            >>> corpus = Corpus.from_documents([[1, 2]], end=9, num_bytes=2)
            >>> PackedStream(corpus, seq_len=4, batch_size=1, seed=3).state_dict()
            {'seed': 3, 'epoch': 0, 'position': 0, 'offset': 0}
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._cursor.position,
            "offset": self._cursor.offset,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Return to a place that `state_dict` named.

        Args:
            state: What `state_dict` returned.

        Example:
            >>> corpus = Corpus.from_documents([[1, 2]], end=9, num_bytes=2)
            >>> stream = PackedStream(corpus, seq_len=4, batch_size=1, seed=0)
            >>> stream.load_state_dict({"seed": 0, "epoch": 5, "position": 0, "offset": 1})
            >>> stream.state_dict()["epoch"]
            5
        """
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._cursor = self._start(state["position"], state["offset"])


def _own_rows(batch_size: int, replica: int) -> range:
    return range(replica * batch_size, (replica + 1) * batch_size)


def pack_once(
    corpus: Corpus, *, seq_len: int, batch_size: int, replica: int = 0, replicas: int = 1
) -> list[Batch]:
    """All documents in order, once; the last batch is filled up with padding.

    Args:
        corpus: The documents.
        seq_len: S, tokens of a row.
        batch_size: B, rows of a batch.
        replica: Which of several replicas this is, from 0.
        replicas: How many there are, R: each gets B rows of every R * B.

    Returns:
        Batches of B rows, as many as the documents need; every replica gets as many.

    Example:
        >>> corpus = Corpus.from_documents([[1, 2, 3]], end=9, num_bytes=3)
        >>> [batch.tokens.tolist() for batch in pack_once(corpus, seq_len=3, batch_size=1)]
        [[[9, 1, 2]], [[3, 9, 9]]]
    """
    cursor = _Cursor(corpus, np.stack([corpus.offsets[:-1], corpus.offsets[1:] - 1], axis=1))
    batches = []
    while cursor.position < len(corpus):
        rows = [_Row.blank(seq_len, corpus.end) for _ in range(batch_size * replicas)]
        for row in rows:
            _pack_row(cursor.take(seq_len), row)
        batches.append(_stack([rows[number] for number in _own_rows(batch_size, replica)]))
    return batches
