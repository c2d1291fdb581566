"""Documents into packed rows, and packed rows into what one rank computes: made ahead of the steps, by workers.

Shapes: B rows of a batch, S tokens of a row, n tokens of a row that a rank holds.

The inputs of a document are all but the last of its tokens, end markers among them, and its targets all but
the first, so that no target ever belongs to another document. A document that does not fit into what is left of
a row goes on in the next row as a segment of its own; the last input of the first part still has its true next
token as target, so no token is lost and none is seen twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from attnspan import Prepared, causal, segments
from attnspan.parallel import Layout, LocalPlan, Plan, Strategy
from attnspan.parallel.layout import Rows as LayoutRows
from attnspan.train.config import TrainConfig
from attnspan.train.documents import Corpus
from attnspan.train.model import IGNORE, Pieces

__all__ = [
    "IGNORE",
    "PADDING",
    "Batch",
    "Batches",
    "PackedStream",
    "Part",
    "Rows",
    "make_batch",
    "pack_once",
    "row_shape",
]

PADDING = -1  # segment id of the filler at the end of the last row


class Rows(NamedTuple):
    """Packed rows, whole.

    Example:
        >>> corpus = Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3)
        >>> [rows] = pack_once(corpus, seq_len=6, batch_size=1)
        >>> rows.tokens.tolist(), rows.targets.tolist()
        ([[9, 5, 6, 9, 7, 9]], [[5, 6, 9, 7, 9, -100]])
        >>> rows.ids.tolist(), rows.positions.tolist()
        ([[0, 0, 0, 1, 1, -1]], [[0, 1, 2, 0, 1, 0]])
    """

    tokens: Tensor  # inputs, (B, S) int64
    targets: Tensor  # the next token of the same document, or `IGNORE` on padding, (B, S) int64
    ids: Tensor  # segment of each token, ascending within a row, `PADDING` on padding, (B, S) int32
    positions: Tensor  # within the segment, (B, S) int64

    @classmethod
    def packed(cls, rows: Sequence[Iterable[NDArray[Any]]], seq_len: int, end: int) -> Rows:
        """Rows from the pieces of each: windows of a document, (inputs + 1,), that fit into ``seq_len``."""
        shape = len(rows), seq_len
        tokens, targets = np.full(shape, end, np.int64), np.full(shape, IGNORE, np.int64)
        ids, positions = np.full(shape, PADDING, np.int32), np.zeros(shape, np.int64)
        for row, pieces in enumerate(rows):
            at = 0
            for number, window in enumerate(pieces):
                here = row, slice(at, at := at + len(window) - 1)
                tokens[here], targets[here] = window[:-1], window[1:]
                ids[here], positions[here] = number, np.arange(len(window) - 1)
        return cls(*map(torch.from_numpy, (tokens, targets, ids, positions)))


class _Cursor:
    """A place in a sequence of parts, (n, 2) ranges of inputs: which part, and how much of it is used."""

    def __init__(self, corpus: Corpus, parts: NDArray[np.int64], position: int = 0, offset: int = 0) -> None:
        self.corpus, self.parts, self.position, self.offset = corpus, parts, position, offset

    def take(self, room: int) -> Iterator[NDArray[Any]]:
        """Windows that fill ``room`` inputs, or all there is: inputs and the last one's next token."""
        while room and self.position < len(self.parts):
            start, stop = (int(end) for end in self.parts[self.position])
            start += self.offset
            count = min(room, stop - start)
            room -= count
            self.offset += count
            if start + count == stop:
                self.position, self.offset = self.position + 1, 0
            yield self.corpus.tokens[start : start + count + 1]


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
        self, corpus: Corpus, *, seq_len: int, batch_size: int, seed: int, replica: int = 0, replicas: int = 1
    ) -> None:
        self.corpus, self.seq_len, self.seed, self.epoch = corpus, seq_len, seed, 0
        self._own = slice(replica * batch_size, (replica + 1) * batch_size)
        self._rows = batch_size * replicas
        self._parts = corpus.parts(seq_len)
        self._cursor = self._start()

    def _start(self, position: int = 0, offset: int = 0) -> _Cursor:
        parts = np.random.default_rng([self.seed, self.epoch]).permutation(self._parts)
        return _Cursor(self.corpus, parts, position, offset)

    def _row(self) -> list[NDArray[Any]]:
        windows, room = [], self.seq_len
        while room:
            for window in self._cursor.take(room):
                room -= len(window) - 1
                windows.append(window)
            if room:
                self.epoch += 1
                self._cursor = self._start()
        return windows

    def __iter__(self) -> PackedStream:
        return self

    def skip(self) -> list[list[NDArray[Any]]]:
        """Move on by a batch; the pieces of its rows, those of all replicas, still uncopied."""
        return [self._row() for _ in range(self._rows)]

    def __next__(self) -> Rows:
        return Rows.packed(self.skip()[self._own], self.seq_len, self.corpus.end)

    def state_dict(self) -> dict[str, int]:
        """The place in the data: seed, epoch, position in the epoch's order, inputs used of that part."""
        cursor = self._cursor
        return {"seed": self.seed, "epoch": self.epoch, "position": cursor.position, "offset": cursor.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Return to a place that `state_dict` named."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._cursor = self._start(state["position"], state["offset"])


def pack_once(
    corpus: Corpus, *, seq_len: int, batch_size: int, replica: int = 0, replicas: int = 1
) -> list[Rows]:
    """All documents in order, once; the last batch is filled up with padding. See `PackedStream`.

    Returns:
        Batches of B rows, as many as the documents need; every replica gets as many.

    Example:
        >>> corpus = Corpus.from_documents([[1, 2, 3]], end=9, num_bytes=3)
        >>> [rows.tokens.tolist() for rows in pack_once(corpus, seq_len=3, batch_size=1)]
        [[[9, 1, 2]], [[3, 9, 9]]]
    """
    cursor = _Cursor(corpus, np.stack([corpus.offsets[:-1], corpus.offsets[1:] - 1], axis=1))
    own = slice(replica * batch_size, (replica + 1) * batch_size)
    batches = []
    while cursor.position < len(corpus):
        rows = [list(cursor.take(seq_len)) for _ in range(batch_size * replicas)]
        batches.append(Rows.packed(rows[own], seq_len, corpus.end))
    return batches


class Planned(NamedTuple):
    """The mask of rows that several ranks share: a rank's plan, and the rows that it is for."""

    plan: LocalPlan
    rows: LayoutRows


class Part(NamedTuple):
    """What a rank computes at a time: some rows, or its share of them."""

    tokens: Tensor  # inputs, (B, n) int64
    targets: Tensor  # their next tokens, or `IGNORE`, (B, n) int64
    positions: Tensor  # within the segment, (B, n) int64: sharing rows moves no token in its text
    mask: Any  # what the layers attend under


class Batch(NamedTuple):
    """What a rank computes in one step. Its counts add up over ranks."""

    parts: list[Part]  # one after the other: micro-batches
    tokens: float  # padding included
    targets: float  # those that carry loss
    pairs: float  # visible (query, key) pairs, for one head
    place: dict[str, int]  # where the data go on after it (`PackedStream.state_dict`)


class Batches(IterableDataset[Batch]):
    """The batches of one rank: rows are packed, partitioned and planned here, in the data loader's workers.

    Args:
        config: The job.
        corpus: What to train on.
        rank: Number of this rank in the job.
        steps: How many batches.
        place: Where the data go on (`PackedStream.state_dict`); None is the beginning.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, rank: int, steps: int, place: dict[str, int] | None = None
    ) -> None:
        super().__init__()
        self.config, self.rank, self.steps = config, rank, steps
        self._stream = PackedStream(corpus, seed=config.seed, **row_shape(config, rank))
        if place is not None:
            self._stream.load_state_dict(place)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for step in range(self.steps):
            if step % workers == own:  # The loader takes a batch from each worker in turn.
                rows = list(islice(self._stream, self.config.accumulate))
                yield make_batch(self.config, rows, self.rank, self._stream.state_dict())
            else:
                for _ in range(self.config.accumulate):
                    self._stream.skip()

    def loader(self) -> DataLoader[Batch]:
        """The batches in order, made ahead by `TrainConfig.workers` processes."""
        workers = self.config.workers
        ahead = 2 if workers else None
        return DataLoader(
            self, batch_size=None, num_workers=workers, prefetch_factor=ahead, collate_fn=_unchanged
        )


def _unchanged(batch: Batch) -> Batch:
    return batch


def row_shape(config: TrainConfig, rank: int) -> dict[str, int]:
    """Which rows a rank packs: arguments of `PackedStream` and `pack_once`."""
    replica, replicas = rank // config.cp, config.dp
    return {
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "replica": replica,
        "replicas": replicas,
    }


def make_batch(config: TrainConfig, batches: Sequence[Rows], rank: int, place: dict[str, int]) -> Batch:
    """What a rank computes of the rows that its replica packed."""
    parts, pairs = [], 0
    for rows in batches:
        mask = _mask(rows.ids if config.cp == 1 else rows.ids.numpy())
        pairs += int(mask.lowered.cost().sum())
        parts.append(_part(config, rows, mask, rank))
    tokens = sum(rows.tokens.numel() for rows in batches) / config.cp
    targets = sum(int((part.targets != IGNORE).sum()) for part in parts)
    return Batch(parts, tokens, targets, pairs / config.cp, place)


def _mask(ids: Any) -> Prepared:
    """Causal within a segment; padding sees and is seen by nothing. Ids of NumPy give what plans are made of."""
    batch, seq_len = ids.shape
    return (causal() & segments(ids, padding_id=PADDING)).prepare(seq_len, seq_len, batch=batch)


def _part(config: TrainConfig, rows: Rows, mask: Prepared, rank: int) -> Part:
    """A rank's part of packed rows."""
    if config.cp > 1:
        plan, member = _plan(config, mask), rank % config.cp
        own = plan.layout.shard(
            {"tokens": rows.tokens, "targets": rows.targets, "positions": rows.positions}, member
        )
        mine = Planned(plan.local(member), own)
        return Part(own["tokens"], own["targets"], own["positions"], mine)
    chosen: Any = mask
    if config.attention == "sdpa":
        chosen = mask.lowered.dense()
    elif config.attention == "sdpa-documents":
        chosen = _pieces(rows.ids)
    return Part(rows.tokens, rows.targets, rows.positions, chosen)


def _plan(config: TrainConfig, mask: Prepared) -> Plan:
    """Who owns which rows, and what each rank needs from the others to attend."""
    ranks, batch = config.cp, config.batch_size
    members = 1 if config.strategy == "auto" else Strategy.parse(config.strategy, ranks).members
    layout = Layout.of(
        mask, q_len=config.seq_len, ranks=ranks, batch=batch, members=members, method=config.method
    )
    sizes = {"head_dim": config.head_dim, "itemsize": 4 if config.dtype == "float32" else 2}
    heads = config.heads, config.kv_heads
    return layout.plan(heads=heads, strategy=config.strategy, batch=batch, **sizes)


def settle_strategy(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """With strategy "auto", decide by the first rows once, so that all steps are one program."""
    if config.cp == 1 or config.strategy != "auto":
        return config
    stream = PackedStream(corpus, seed=config.seed, **row_shape(config, 0))
    return replace(config, strategy=_plan(config, _mask(next(stream).ids.numpy())).strategy.name)


def _pieces(ids: Tensor) -> Pieces:
    """The runs of equal ids."""
    rows = []
    for row in ids:
        inner = (row.diff().nonzero().flatten() + 1).tolist()
        borders = pairwise([0, *inner, len(row)])
        rows.append([(start, stop, int(row[start]) == PADDING) for start, stop in borders])
    return Pieces(rows)
