"""Remedy for attention that is written out: a call with the same scale, mask, sinks and softcap."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnspan_lab.doctor.attention_call import Attention

__all__ = ["first_scores", "remedy_of_written", "scale_of"]

_NEARLY = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative error of a scale, by dtype. Others: 1e-3
_SCALE = "Both multiply scores by head_dim**-0.5 unless you pass scale="


def first_scores(x: Tensor) -> Tensor:
    """Copy the scores of the first batch element and head."""
    return x.detach().flatten(0, -3)[0].clone() if x.dim() > 2 else x.detach().clone()


def scale_of(products: Tensor | None, scores: Tensor, hidden: float) -> float | None:
    """Find the factor between products of q and k and the input of a softmax.

    Args:
        products: `first_scores` of the products.
        scores: Input of the softmax.
        hidden: Scores at or below this number are hidden.

    Returns:
        The factor. None if there is not one for all visible pairs: a bias or a softcap also changes scores.
    """
    last = first_scores(scores)
    if products is None or products.shape != last.shape:
        return None
    shown = (last > hidden) & last.isfinite() & products.isfinite()
    count = shown.sum(-1, keepdim=True).clamp_min(1)

    def centered(x: Tensor) -> Tensor:
        """Remove a constant from each row, which no softmax sees, such as its maximum."""
        x = torch.where(shown, x, 0.0).double()
        return torch.where(shown, x - x.sum(-1, keepdim=True) / count, 0.0)

    a, b = centered(products), centered(last)
    if not float(a.norm()):
        return None
    scale = float((a * b).sum() / (a * a).sum())
    is_one = float((b - scale * a).norm()) <= _NEARLY.get(scores.dtype, 1e-3) * float(b.norm())
    return scale if is_one else None


def remedy_of_written(call: Attention) -> str:
    """Write the call that replaces the lines, as far as it is known."""
    ours, theirs = "attnspan.torch.attention", "F.scaled_dot_product_attention"
    special = ["sinks=(your sinks)"] * (call.keys is not None) + ["softcap=(your limit)"] * (
        "tanh" in call.steps
    )
    if special:  # torch's function has neither.
        scale = "" if call.scale is None else _scale(call)
        known = (
            "" if scale or call.scale is not None else f". {_SCALE.replace('Both multiply', 'It multiplies')}"
        )
        return (
            f"Replace these lines by {ours}(q, k, v, {', '.join([*special, *filter(None, [scale])])}){known}"
        )
    if call.scale is None:
        return f"Replace these lines by {theirs} or {ours}. {_SCALE}"
    visible, mask, same = call.visible, "", ""
    if visible is not None and not bool(visible.all()):
        square = visible.shape[-2] == visible.shape[-1]
        causal = square and bool((visible == visible.new_ones(visible.shape).tril()).all())
        mask, same = (
            ("is_causal=True", "mask=causal()") if causal else ("attn_mask=(your mask)", "mask=(its form)")
        )
    their, own = (", ".join(filter(None, ["q, k, v", x, _scale(call)])) for x in (mask, same))
    return f"Replace these lines by {theirs}({their}) or {ours}({own}), with q and k as in your product"


def _scale(call: Attention) -> str:
    """Write a scale that is not the default."""
    assert call.scale is not None
    usual, near = (call.q[-1] ** -0.5, 1.0), _NEARLY.get(call.dtype, 1e-4)
    nearest = next((x for x in usual if math.isclose(call.scale, x, rel_tol=near)), call.scale)
    return "" if nearest == usual[0] else f"scale={nearest:.4g}"
