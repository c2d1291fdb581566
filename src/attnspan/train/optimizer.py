"""AdamW and its learning rate."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

from attnspan.train.config import TrainConfig

__all__ = ["build_optimizer", "learning_rate"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices and leaves norms alone.

    Args:
        model: The model whose parameters are optimized.
        config: Learning rate and decay.

    Example:
        >>> optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2)), TrainConfig())
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.1), (2, 0.0)]
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of a step: linear warm-up, then a cosine down to ``min_lr`` of the peak at the last step.

    Args:
        step: Steps taken so far, from 0.
        config: Peak, warm-up, last rate and number of steps.

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
