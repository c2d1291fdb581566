"""One training step, and the held-out score."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from attnspan.parallel.torch.loss import sum_gradients, token_mean
from attnspan.train.config import TrainConfig
from attnspan.train.data import Batch, Part, make_batch, pack_once, row_shape
from attnspan.train.documents import Corpus
from attnspan.train.model import StepFlops, step_flops, token_loss
from attnspan.train.parallelize import ALONE, Ranks, build_model, mixed, peak_memory, place

__all__ = [
    "UNOBSERVED",
    "Observer",
    "StepResult",
    "Stepper",
    "Unobserved",
    "build_optimizer",
    "learning_rate",
]

T = TypeVar("T")


class Observer(Protocol):
    """The places of a training loop that someone may want to time; `attnspan.bench.monitor` does."""

    def data(self, batches: Iterable[T]) -> Iterator[T]: ...

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]: ...

    def phase(self, name: str) -> AbstractContextManager[object]: ...


class Unobserved:
    """The observer of a run that nobody watches."""

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        return iter(batches)

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


UNOBSERVED = Unobserved()


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of a step, from 0: linear warm-up, then a cosine to ``min_lr`` of the peak at the last step.

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


def build_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


class StepResult(NamedTuple):
    """What one step did, on all ranks together.

    Args:
        loss: Mean loss per target, nats.
        grad_norm: Norm of the whole gradient before clipping.
        lr: Learning rate of the step.
        tokens: Tokens of the step, padding included.
        seconds: Wall time of the step.
        flops: What the step had to compute.
        memory: Peak memory so far, the sum of all ranks', bytes.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: float
    seconds: float
    flops: StepFlops
    memory: float

    def figures(self) -> dict[str, float]:
        """What is logged: rates instead of counts."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "gflops": self.flops.total / self.seconds / 1e9,
            "attention_gflops": self.flops.attention / self.seconds / 1e9,
            "memory": self.memory,
        }


class Stepper(Stateful):
    """A model with its optimizer, ready to take steps; as a state, what a checkpoint holds of them.

    Args:
        config: The run; its dtype must be resolved ("auto" is not a dtype).
        vocab_size: V.
        ranks: Who takes the steps together; by default this process alone.
    """

    def __init__(self, config: TrainConfig, vocab_size: int, ranks: Ranks = ALONE) -> None:
        self.config, self.vocab_size, self.ranks = config, vocab_size, ranks
        self.model = build_model(config, vocab_size, ranks)
        self.optimizer = build_optimizer(self.model, config)

    def loss(self, part: Part, observer: Observer = UNOBSERVED) -> Tensor:
        """Summed loss of this rank's targets."""
        part = place(part, self.ranks)
        with observer.phase("forward"):
            with mixed(self.config, self.ranks.device):
                logits = self.model(part.tokens, part.positions, part.mask)
            return token_loss(logits, part.targets)

    def step(self, batch: Batch, index: int, observer: Observer = UNOBSERVED) -> StepResult:
        """Forward and backward of each micro-batch, clip, update.

        Args:
            batch: This rank's.
            index: Steps taken before this one; it sets the learning rate.
            observer: Told of the phases.
        """
        start = time.perf_counter()
        lr = learning_rate(index, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets, pairs = self.ranks.sum([batch.tokens, batch.targets, batch.pairs])
        loss = torch.zeros((), device=self.ranks.device)
        for part in batch.parts:
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(part is batch.parts[-1])
            mean_part = token_mean(self.loss(part, observer), round(targets))
            with observer.phase("backward"):
                torch.autograd.backward(mean_part)
            loss += mean_part.detach()
        if self.ranks.everyone is not None and not self.config.fsdp:
            with observer.phase("communication"):
                sum_gradients(self.model.parameters(), self.ranks.everyone)
        with observer.phase("optimizer"):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total, memory = self.ranks.sum([loss.item(), float(peak_memory(self.ranks.device))])
        seconds = time.perf_counter() - start
        flops = step_flops(self.model, round(tokens), round(pairs))
        return StepResult(total, float(whole), lr, tokens, seconds, flops, memory)

    def warm_up(self, batch: Batch) -> float:
        """Forward and backward that change no weight; the first time they compile. Seconds they took."""
        start = time.perf_counter()
        for part in batch.parts:
            torch.autograd.backward(self.loss(part))
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def bits_per_byte(self, held_out: Corpus) -> float:
        """Bits that the model needs for a byte of the text.

        Gradients stay enabled, although none is taken: turning them off would compile every block once more.
        """
        config, rank = self.config, self.ranks.number
        batches = pack_once(held_out, **row_shape(config, rank))
        parts = (part for rows in batches for part in make_batch(config, [rows], rank, {}).parts)
        nats = math.fsum(self.loss(part).item() for part in parts)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # What backward would do: gathered weights are let go.
        return self.ranks.sum([nats])[0] / math.log(2) / held_out.num_bytes

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
