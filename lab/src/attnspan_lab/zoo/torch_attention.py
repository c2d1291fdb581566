"""Replacements of torch's attention function inside a model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["eager", "identity", "instead_of_sdpa"]


class _Instead(TorchFunctionMode):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = self.attend if func is F.scaled_dot_product_attention else func
        return wanted(*args, **(kwargs or {}))


def instead_of_sdpa(model: nn.Module, attend: Callable[..., Tensor]) -> nn.Module:
    """Replace `F.scaled_dot_product_attention` by ``attend`` while the model's forward runs."""
    forward = model.forward

    def with_another_attention(*args: Any, **kwargs: Any) -> Any:
        with _Instead(attend):
            return forward(*args, **kwargs)

    model.forward = with_another_attention
    return model


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the softmax of scaled scores times the values, with the shapes of torch's function."""
    assert dropout_p == 0.0
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1).nan_to_num(0.0) @ value


def identity(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG001
    """Return the value of each query's own token, or the mean of the values if the keys are other tokens."""
    if value.shape[-2] != query.shape[-2]:
        value = value.mean(-2, keepdim=True).expand(*value.shape[:-2], query.shape[-2], -1)
    return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
