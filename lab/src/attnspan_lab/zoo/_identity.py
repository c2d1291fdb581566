"""An attention that returns the values: with it, what fails in a model is not attention."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnspan.integrations._transformers_masks import make_mask, reads_masks

__all__ = ["NAME"]

#: The name under which transformers knows it.
NAME = "identity"


def _identity(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,  # (B, Hq, Sq, D)
    key: Tensor,  # (B, Hkv, Sk, D)
    value: Tensor,  # (B, Hkv, Sk, Dv)
    *more: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """The value of a query's own token, (B, Sq, Hq, Dv); of other keys, their mean.

    All other arguments count 0 times, so that the compiler goes through what makes them, backward too.
    """
    heads, q_len = query.shape[1], query.shape[2]
    if value.shape[2] != q_len:
        value = value.mean(2, keepdim=True).expand(-1, -1, q_len, -1)
    for x in (query, key, *more, *named.values()):
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
            value = value + 0.0 * x.clamp(-1.0, 1.0).mean()
    return value.repeat_interleave(heads // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _identity)


def _no_mask(config: Any = None, **given: Any) -> Tensor | None:
    """None, so that the tensors of all pairs of tokens which are left are the model's own."""
    return make_mask(config=config, **given) if reads_masks(config) else None


AttentionMaskInterface.register(NAME, _no_mask)
