"""One training step, and the held-out score."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from attnspan.parallel.loss import sum_gradients, token_mean
from attnspan.train.config import TrainConfig
from attnspan.train.deal import Dealer, Share
from attnspan.train.hooks import UNOBSERVED, Observer
from attnspan.train.machine import peak_memory
from attnspan.train.model import Decoder, StepFlops, step_flops
from attnspan.train.optimizer import build_optimizer, learning_rate
from attnspan.train.packing import IGNORE, Batch
from attnspan.train.ranks import ALONE, Ranks

__all__ = ["StepResult", "Stepper", "token_loss"]


class StepResult(NamedTuple):
    """What one step did, on all ranks together.

    Args:
        loss: Mean loss per target, nats.
        grad_norm: Norm of the whole gradient before clipping.
        lr: Learning rate of the step.
        tokens: Tokens of the step, padding included.
        seconds: Wall time of the step, mask preparation included.
        flops: What the step had to compute.
        memory: Peak resident size so far, the sum of all ranks', bytes.

    Example:
        >>> StepResult(1.0, 0.5, 1e-3, 100, 0.5, StepFlops(1.0, 1.0), 2**30).tokens
        100
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    flops: StepFlops
    memory: float


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of all targets that carry loss, nats; divide by their number for the mean.

    Args:
        logits: (B, S, V), any floating dtype; the loss is computed in float32.
        targets: (B, S) int64, `IGNORE` where there is none.

    Example:
        >>> round(float(token_loss(torch.zeros(1, 2, 4), torch.tensor([[3, IGNORE]]))), 4)
        1.3863
    """
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class Stepper:
    """A model with its optimizer, ready to take steps.

    Args:
        config: The run; its dtype must be resolved ("auto" is not a dtype).
        vocab_size: V.
        ranks: Who takes the steps together; by default this process alone.

    Example:
        >>> from attnspan.train.packing import Corpus, pack_once
        >>> config = TrainConfig(
        ...     dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16,
        ...     seq_len=8, batch_size=1, compile=False, dtype="float32", attention="sdpa",
        ... )
        >>> [batch] = pack_once(Corpus.from_documents([[1, 2]], end=3, num_bytes=2), seq_len=8, batch_size=1)
        >>> stepper = Stepper(config, vocab_size=4)
        >>> first = stepper.step(batch, 0).loss
        >>> stepper.step(batch, 1).loss < first
        True
    """

    def __init__(self, config: TrainConfig, vocab_size: int, ranks: Ranks = ALONE) -> None:
        self.config, self.vocab_size, self.ranks = config, vocab_size, ranks
        self._dealer = Dealer(config, ranks)
        # The same weights on all ranks; those that are sharded are parts of these.
        torch.manual_seed(config.seed)
        self.model = Decoder(config, vocab_size)
        if config.compile:
            self.model.compile_blocks()
        if ranks.everyone is not None and config.fsdp:
            self.model.shard(ranks.everyone)
        self.optimizer = build_optimizer(self.model, config)

    def deal(self, batch: Batch) -> Share:
        """What this rank computes of a batch.

        Args:
            batch: Packed rows, the same on all ranks of the replica.
        """
        return self._dealer.deal(batch)

    def loss(self, share: Share, observer: Observer = UNOBSERVED) -> Tensor:
        """Summed loss of this rank's targets.

        Args:
            share: What `deal` returned.
            observer: Told of the forward pass.
        """
        with observer.phase("forward"):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                logits = self.model(share.tokens, share.positions, share.mask)
            return token_loss(logits, share.targets)

    def step(self, batch: Batch, index: int, observer: Observer = UNOBSERVED) -> StepResult:
        """Forward, backward, clip, update.

        Args:
            batch: Packed rows of this rank's replica.
            index: Steps taken before this one; it sets the learning rate.
            observer: Told of the phases.
        """
        start = time.perf_counter()
        lr = learning_rate(index, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        share = self.deal(batch)
        targets, pairs = self.ranks.sum([share.num_targets, share.pairs])
        part = token_mean(self.loss(share, observer), int(targets))
        with observer.phase("backward"):
            torch.autograd.backward(part)
        self._sum_gradients(observer)
        with observer.phase("optimizer"):
            grad_norm = self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss, memory = self.ranks.sum([part.item(), float(peak_memory())])
        tokens = batch.tokens.numel() * self.ranks.dp
        seconds = time.perf_counter() - start
        flops = step_flops(self.model, tokens, round(pairs))
        return StepResult(loss, grad_norm, lr, tokens, seconds, flops, memory)

    def _sum_gradients(self, observer: Observer) -> None:
        """Over ranks, unless sharded parameters have it done already, during backward."""
        if self.ranks.everyone is not None and not self.config.fsdp:
            with observer.phase("communication"):
                sum_gradients(self.model.parameters(), self.ranks.everyone)

    def _clip(self) -> float:
        """Clip the gradient of all ranks together; its norm before that."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def warm_up(self, batch: Batch) -> float:
        """Compile by one forward and backward that changes no weight; seconds it took.

        Args:
            batch: Packed rows of the shape that training has.
        """
        start = time.perf_counter()
        torch.autograd.backward(self.loss(self.deal(batch)))
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def bits_per_byte(self, batches: Sequence[Batch], num_bytes: int) -> float:
        """Bits that the model needs for a byte of the text of all replicas' batches.

        Gradients stay enabled, although none is taken: turning them off would compile every block once more.

        Args:
            batches: Packed held-out rows of this rank's replica, of the shape that training has.
            num_bytes: Bytes of text in those of all replicas.
        """
        nats = math.fsum(self.loss(self.deal(batch)).item() for batch in batches)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # What backward would do: gathered weights are let go.
        return self.ranks.sum([nats])[0] / math.log(2) / num_bytes
