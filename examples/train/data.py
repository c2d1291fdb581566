"""Packing of documents into rows, and partition of rows over ranks. Workers do both before the steps.

A document's inputs are all tokens but the last, including end markers. Its targets are all tokens but the
first, so no target belongs to another document. A document that does not fit into a row continues in the next
row as a new segment. The last target of its first part is still the true next token, so no token is lost or
used twice.

Shapes: B rows per batch, S tokens per row, n tokens of a row on one rank.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from attnspan import Prepared, causal, segments
from attnspan.parallel import Layout, Plan, Strategy
from attnspan.parallel.partition import Method
from attnspan.parallel.rows import Rows as SharedRows
from train.config import TrainConfig
from train.documents import Corpus
from train.model import IGNORE, Pieces

__all__ = ["Batch", "Batches", "PackedStream", "Part", "Rows", "make_batch", "settle_strategy"]

PADDING = -1  # segment id of padding at the end of the last row


class Rows(NamedTuple):
    """Complete packed rows."""

    tokens: Tensor  # inputs, (B, S) int64
    targets: Tensor  # the next token of the same document, or `IGNORE` on padding, (B, S) int64
    ids: Tensor  # segment of each token, ascending within a row, `PADDING` on padding, (B, S) int32
    positions: Tensor  # within the segment, (B, S) int64

    @classmethod
    def packed(cls, rows: Sequence[Iterable[NDArray[Any]]], seq_len: int, end: int) -> Rows:
        """Build rows from their pieces: windows of a document, (inputs + 1,), that fit into ``seq_len``."""
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


class PackedStream:
    """Endless batches over a corpus, with a new shuffle in each epoch.

    The stream shuffles documents, and parts of S tokens of longer documents. Otherwise, a document of a
    megabyte would fill hundreds of consecutive steps. The order of an epoch is drawn from (seed, epoch), so
    four integers are the whole state. Without a seed, the stream has all documents once, in order.

    Each of R replicas gets B (`batch_size`) rows of every R * B rows. ``share`` is (replica, R). Together,
    the replicas get the same rows in the same order as one replica with batches of R * B rows.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, batch_size: int, seed: int | None, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.corpus, self.seq_len, self.seed, self.epoch = corpus, seq_len, seed, 0
        replica, replicas = share
        self._rows, self._own = batch_size * replicas, slice(replica * batch_size, (replica + 1) * batch_size)
        self._parts = corpus.parts(len(corpus.tokens) if seed is None else seq_len)
        self._start()

    def _start(self, position: int = 0, offset: int = 0) -> None:
        self._order, self.position, self.offset = self._parts, position, offset
        if self.seed is not None:
            self._order = np.random.default_rng([self.seed, self.epoch]).permutation(self._parts)

    def _row(self) -> list[NDArray[Any]]:
        """Take windows that fill a row. Each has its inputs and one next token."""
        windows, room = [], self.seq_len
        while room and not self.ended:
            if self.position == len(self._order):
                self.epoch += 1
                self._start()
            start, stop = (int(end) for end in self._order[self.position])
            start += self.offset
            count = min(room, stop - start)
            room -= count
            self.offset += count
            if start + count == stop:
                self.position, self.offset = self.position + 1, 0
            windows.append(self.corpus.tokens[start : start + count + 1])
        return windows

    @property
    def ended(self) -> bool:
        """Whether all documents were taken. With a seed, a stream never ends."""
        return self.seed is None and self.position == len(self._order)

    def __iter__(self) -> PackedStream:
        return self

    def skip(self) -> list[list[NDArray[Any]]]:
        """Advance by a batch. Return the pieces of the rows of all replicas, without copies."""
        return [self._row() for _ in range(self._rows)]

    def __next__(self) -> Rows:
        if self.ended:
            raise StopIteration
        return Rows.packed(self.skip()[self._own], self.seq_len, self.corpus.end)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: seed, epoch, index in the epoch's order, used inputs there."""
        return {name: getattr(self, name) for name in ("seed", "epoch", "position", "offset")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a position from `state_dict`."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._start(state["position"], state["offset"])


class Part(NamedTuple):
    """Rows, or a part of them, that a rank computes at once."""

    tokens: Tensor  # inputs, (B, n) int64
    targets: Tensor  # their next tokens, or `IGNORE`, (B, n) int64
    positions: Tensor  # within the segment, (B, n) int64; partitioning rows does not change them
    mask: Any  # mask of the layers, or this rank's plan if several ranks share the rows
    shared: SharedRows | None = None  # with a plan, its rows


class Batch(NamedTuple):
    """Micro-batches that a rank computes in one step. Counts add up over ranks."""

    parts: list[Part]  # micro-batches, in order
    tokens: float  # including padding
    targets: float  # targets with loss
    pairs: float  # visible (query, key) pairs, for one head
    place: dict[str, int]  # position in the data after the step (`PackedStream.state_dict`)


class Batches(IterableDataset[Batch]):
    """The batches of one rank. The data loader's workers pack, partition and plan the rows here.

    There are ``steps`` batches, from ``place`` (`PackedStream.state_dict`) or from the beginning.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, rank: int, steps: int, place: dict[str, int] | None = None
    ) -> None:
        super().__init__()
        self.config, self.rank, self.steps = config, rank, steps
        self._stream = PackedStream(corpus, seed=config.seed, **config.row_shape(rank))
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
        """Load the batches in order, prepared by `TrainConfig.workers` processes."""
        how: dict[str, Any] = {"num_workers": self.config.workers, "worker_init_fn": _leave_signals}
        if self.config.workers and "jax" in sys.modules:
            how["multiprocessing_context"] = "forkserver"  # A fork would lose JAX's threads.
        return DataLoader(self, batch_size=None, collate_fn=_unchanged, **how)


def _leave_signals(_: int) -> None:
    """Ignore signals in workers. Terminals and torchrun signal them too, but the training process decides."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


def make_batch(
    config: TrainConfig, batches: Sequence[Rows], rank: int, place: dict[str, int] | None = None
) -> Batch:
    """Select a rank's part of the rows that its replica packed."""
    parts, pairs = zip(*(_part(config, rows, rank) for rows in batches), strict=True)
    tokens = sum(rows.tokens.numel() for rows in batches)
    targets = sum(int((part.targets != IGNORE).sum()) for part in parts)
    return Batch(list(parts), tokens / config.cp, targets, sum(pairs) / config.cp, place or {})


def _mask(ids: Any) -> Prepared:
    """Build the mask: causal within each segment, and padding sees nothing. Plans need NumPy ids."""
    batch, seq_len = ids.shape
    return (causal() & segments(ids, padding_id=PADDING)).prepare(seq_len, seq_len, batch=batch)


def _part(config: TrainConfig, rows: Rows, rank: int) -> tuple[Part, int]:
    """Select a rank's part of packed rows, and count the visible pairs of the rows."""
    mask = _mask(rows.ids if config.cp == 1 else rows.ids.numpy())
    pairs, chosen = int(mask.lowered.cost().sum()), cast(Any, mask)
    if config.cp > 1:
        plan, member = _plan(config, mask), rank % config.cp
        own = plan.layout.shard(rows._asdict(), member)
        return Part(own["tokens"], own["targets"], own["positions"], plan.local(member), own), pairs
    if config.attention == "sdpa":
        chosen = mask.lowered.dense()
    elif config.attention == "sdpa-documents":
        borders = [[0, *(row.diff().nonzero().flatten() + 1).tolist(), len(row)] for row in rows.ids]
        chosen = Pieces([list(pairwise(each)) for each in borders])
    return Part(rows.tokens, rows.targets, rows.positions, chosen), pairs


def _plan(config: TrainConfig, mask: Prepared) -> Plan:
    """Plan the owner of each row, and the keys that each rank fetches from others."""
    strategy, batch = config.strategy, config.batch_size
    members = 1 if strategy == "auto" else Strategy.parse(strategy, config.cp).members
    sizes = {"q_len": config.seq_len, "ranks": config.cp, "batch": batch, "members": members}
    layout = Layout.of(mask, method=cast(Method, config.method), **sizes)
    how: dict[str, Any] = {"batch": batch, "itemsize": 4 if config.dtype == "float32" else 2}
    heads = config.heads, config.kv_heads
    return layout.plan(heads=heads, strategy=strategy, head_dim=config.head_dim, **how)


def settle_strategy(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Resolve the strategy "auto" once from the first rows, so that all steps use one program."""
    if config.cp == 1 or config.strategy != "auto":
        return config
    rows = next(PackedStream(corpus, seed=config.seed, **config.row_shape(0)))
    return replace(config, strategy=_plan(config, _mask(rows.ids.numpy())).strategy.name)
