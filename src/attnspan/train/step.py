"""One training step, and the held-out score."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnspan.train.attention import prepare_mask
from attnspan.train.config import TrainConfig
from attnspan.train.hooks import UNOBSERVED, Observer
from attnspan.train.model import Decoder, StepFlops, step_flops
from attnspan.train.optimizer import build_optimizer, learning_rate
from attnspan.train.packing import IGNORE, Batch

__all__ = ["StepResult", "Stepper", "token_loss"]


class StepResult(NamedTuple):
    """What one step did.

    Args:
        loss: Mean loss per target, nats.
        grad_norm: Norm of the whole gradient before clipping.
        lr: Learning rate of the step.
        tokens: Tokens of the batch, padding included.
        seconds: Wall time of the step, mask preparation included.
        flops: What the step had to compute.

    Example:
        >>> StepResult(1.0, 0.5, 1e-3, 100, 0.5, StepFlops(1.0, 1.0)).tokens
        100
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    flops: StepFlops


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

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.model = Decoder(config, vocab_size)
        self.optimizer = build_optimizer(self.model, config)
        if config.compile:
            self.model.compile_blocks()

    def loss(self, batch: Batch, observer: Observer = UNOBSERVED) -> tuple[Tensor, int]:
        """Summed loss of a batch, and the visible pairs of its mask.

        Args:
            batch: Packed rows.
            observer: Told of the forward pass.
        """
        mask = prepare_mask(batch.ids, self.config.attention)
        with observer.phase("forward"):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                logits = self.model(batch.tokens, batch.positions, mask.mask)
            return token_loss(logits, batch.targets), mask.pairs

    def step(self, batch: Batch, index: int, observer: Observer = UNOBSERVED) -> StepResult:
        """Forward, backward, clip, update.

        Args:
            batch: Packed rows.
            index: Steps taken before this one; it sets the learning rate.
            observer: Told of the three phases.
        """
        start = time.perf_counter()
        lr = learning_rate(index, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total, pairs = self.loss(batch, observer)
        mean = total / max(1, batch.num_targets)
        with observer.phase("backward"):
            torch.autograd.backward(mean)
        with observer.phase("optimizer"):
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss = mean.item()
        tokens = batch.tokens.numel()
        seconds = time.perf_counter() - start
        return StepResult(loss, float(grad_norm), lr, tokens, seconds, step_flops(self.model, tokens, pairs))

    def warm_up(self, batch: Batch) -> float:
        """Compile by one forward and backward that changes no weight; seconds it took.

        Args:
            batch: Packed rows of the shape that training has.
        """
        start = time.perf_counter()
        torch.autograd.backward(self.loss(batch)[0])
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def bits_per_byte(self, batches: Sequence[Batch], num_bytes: int) -> float:
        """Bits that the model needs for a byte of the batches' text.

        Gradients stay enabled, although none is taken: turning them off would compile every block once more.

        Args:
            batches: Packed held-out rows, of the shape that training has.
            num_bytes: Bytes of text in them.
        """
        nats = math.fsum(self.loss(batch)[0].item() for batch in batches)
        return nats / math.log(2) / num_bytes
