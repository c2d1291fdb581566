"""One training step, and the held-out score."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from attnspan.parallel.torch.loss import sum_gradients, token_mean
from train.config import TrainConfig
from train.data import Batch, PackedStream, Part, make_batch
from train.documents import Corpus
from train.model import token_loss
from train.parallelize import ALONE, Ranks, build_model

__all__ = ["UNOBSERVED", "StepResult", "Stepper", "Unobserved", "learning_rate"]

T = TypeVar("T")


class Unobserved:
    """Hooks for an observer of a training loop, such as `attnspan_lab.bench.monitor`."""

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches. The time to get a batch is the wait for data."""
        return iter(batches)

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        """Surround one step. Steps are numbered from 1. ``tokens`` is its number of tokens."""
        return nullcontext((number, tokens))

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Surround one phase of a step: "forward", "backward", "optimizer" or "communication"."""
        return nullcontext(name)

    def loss(self, loss: float) -> None:
        """Record the loss of the current step."""

    def held_out(self, loss: float) -> None:
        """Record the held-out loss after the last step, or before the first."""


UNOBSERVED: Any = Unobserved()


def learning_rate(step: int, config: TrainConfig) -> float:
    """Compute the learning rate of a step, from 0: linear warm-up, then a cosine to ``min_lr`` of the peak.

    Example:
        >>> config = TrainConfig(lr=1.0, warmup=2, steps=11, min_lr=0.1)
        >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (config.min_lr + (1 - config.min_lr) * cosine)


class StepResult(NamedTuple):
    """Measurements of one step, over all ranks. ``metrics.jsonl`` has the same names."""

    loss: float  # mean per target, in nats
    grad_norm: float  # norm of the whole gradient, before clipping
    lr: float
    seconds: float  # wall time
    memory: float  # peak so far, sum over ranks, in bytes
    tokens_per_second: float  # padding included
    gflops: float  # GFLOP/s of useful work, without recomputation
    attention_gflops: float  # attention's part of it


class Stepper:
    """A model with its optimizer, ready to take steps.

    The optimizer is AdamW (Loshchilov and Hutter 2019), with weight decay for matrices but not for norms. The
    configuration's dtype must be resolved ("auto" is not a dtype).
    """

    def __init__(self, config: TrainConfig, vocab_size: int, ranks: Ranks = ALONE) -> None:
        self.config, self.vocab_size, self.ranks = config, vocab_size, ranks
        self.model = build_model(config, vocab_size, ranks)
        decays = config.weight_decay, 0.0
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in decays]
        for parameter in self.model.parameters():
            groups[parameter.ndim < 2]["params"].append(parameter)
        self.optimizer = AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)

    def loss(self, part: Part, observer: Any = UNOBSERVED) -> Tensor:
        """Compute the summed loss of this rank's targets."""
        part = self.ranks.place(part)
        with observer.phase("forward"):
            return token_loss(self.model(part.tokens, part.positions, part.mask), part.targets)

    def step(self, batch: Batch, index: int, observer: Any = UNOBSERVED) -> StepResult:
        """Run forward and backward of each micro-batch, clip, and update. ``index`` counts earlier steps."""
        start, config, ranks = time.perf_counter(), self.config, self.ranks
        lr = learning_rate(index, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets, pairs = ranks.sum([batch.tokens, batch.targets, batch.pairs])
        loss = torch.zeros((), device=ranks.device)
        for part in batch.parts:
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(part is batch.parts[-1])
            share = token_mean(self.loss(part, observer), round(targets))
            with observer.phase("backward"):
                torch.autograd.backward(share)
            loss += share.detach()
        if ranks.everyone is not None and not config.fsdp:  # FSDP reduces sharded gradients during backward.
            with observer.phase("communication"):
                sum_gradients(self.model.parameters(), ranks.everyone)
        with observer.phase("optimizer"):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total, memory = ranks.sum([loss.item(), float(ranks.peak_memory())])
        seconds = time.perf_counter() - start
        gflops = (flops / 1e9 / seconds for flops in self.model.step_flops(tokens, pairs))
        return StepResult(total, grad_norm, lr, seconds, memory, tokens / seconds, *gflops)

    def warm_up(self, batch: Batch) -> float:
        """Run forward and backward without an update. The first call compiles. Return the seconds."""
        start = time.perf_counter()
        for part in batch.parts:
            torch.autograd.backward(self.loss(part))
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def bits_per_byte(self, held_out: Corpus) -> float:
        """Compute the model's bits per byte of the text.

        Gradients stay enabled although none is computed, because disabling them would recompile every block.
        """
        config, rank = self.config, self.ranks.number
        stream = PackedStream(held_out, seed=None, **config.row_shape(rank))
        batches = (make_batch(config, [rows], rank) for rows in stream)
        nats = math.fsum(self.loss(part).item() for batch in batches for part in batch.parts)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # Free the gathered weights, which backward would do.
        return self.ranks.sum([nats])[0] / math.log(2) / held_out.num_bytes

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of the model and of the optimizer, without copies. Checkpoints contain them."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer["state"]}
