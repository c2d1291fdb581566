"""A batch as one rank sees it: whole, or its share of every row.

Shapes: B rows, S tokens of a row, n tokens of a row that a rank holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan import Prepared, causal, segments
from attnspan.train.attention import AnyMask, prepare_mask
from attnspan.train.config import TrainConfig
from attnspan.train.packing import IGNORE, PADDING, Batch
from attnspan.train.ranks import Ranks

if TYPE_CHECKING:
    from attnspan.parallel.context import ContextParallel

__all__ = ["Dealer", "Share"]


class Share(NamedTuple):
    """What a rank computes of a batch; n is S when it does not share its rows.

    Args:
        tokens: Inputs, (B, n) int64.
        targets: Their next tokens, or `IGNORE`, (B, n) int64.
        positions: Position of each token within its segment, (B, n) int64.
        mask: What the layers attend under.
        pairs: Visible (query, key) pairs of the batch, for one head, divided by the ranks that share it.

    Example:
        >>> from attnspan.train.packing import Corpus, pack_once
        >>> config = TrainConfig(seq_len=4, batch_size=1)
        >>> corpus = Corpus.from_documents([[1, 2]], end=3, num_bytes=2)
        >>> [batch] = pack_once(corpus, seq_len=4, batch_size=1)
        >>> share = Dealer(config, Ranks()).deal(batch)
        >>> share.targets.tolist(), share.num_targets, share.pairs
        ([[1, 2, 3, -100]], 3, 6.0)
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    mask: AnyMask
    pairs: float

    @property
    def num_targets(self) -> int:
        """Targets of this rank that carry loss."""
        return int((self.targets != IGNORE).sum())


class Dealer:
    """Deals the batches of a replica to its ranks.

    Args:
        config: The job.
        ranks: Those that take part; without context parallelism each keeps the whole batch.

    Example:
        >>> Dealer(TrainConfig(), Ranks()).cp is None
        True
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        #: The plan of the latest batch; the next one's is made from it.
        self.cp: ContextParallel | None = None
        self._rows = 0

    def deal(self, batch: Batch) -> Share:
        """The share of this rank.

        Args:
            batch: Packed rows, the same on all ranks of the replica.
        """
        if self.ranks.cp == 1:
            mask, pairs = prepare_mask(batch.ids, self.config.attention)
            return Share(batch.tokens, batch.targets, batch.positions, mask, float(pairs))
        rows, length = batch.ids.shape
        mask = (causal() & segments(batch.ids, padding_id=PADDING)).prepare(length, length, batch=rows)
        pairs = int(mask.lowered.cost().sum())
        self.cp = cp = self._plan(mask, rows)
        # Positions are those of the documents: what a rank holds does not move a token in its text.
        tokens, positions = cp.shard(batch.tokens), cp.shard(batch.positions)
        targets = cp.shard(batch.targets, fill=IGNORE)
        return Share(tokens, targets, positions, cp, pairs / self.ranks.cp)

    def _plan(self, mask: Prepared, rows: int) -> ContextParallel:
        from attnspan.parallel.context import ContextParallel

        if self.cp is not None and self._rows == rows:
            return self.cp.with_mask(mask)
        config, mesh = self.config, self.ranks.mesh
        assert mesh is not None
        self._rows = rows
        return ContextParallel(
            mesh["cp"],
            mask=mask,
            q_len=config.seq_len,
            heads=(config.heads, config.kv_heads),
            batch=rows,
            head_dim=config.head_dim,
            dtype=getattr(torch, config.dtype),
        )
