"""Remedy for attention that is written out: a call with the same scale, mask, sinks and softcap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnspan_lab.doctor.words import lowered

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.recording.attention_call import Attention

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


def remedy_of_written(calls: Sequence[Attention]) -> str:
    """Write the call that replaces the lines, as far as it is known, for all calls of these lines."""
    used, text = next((x.weights_used for x in calls if x.weights_used), None), _replacement(calls)
    if used is None:
        return text
    return (
        f"Keep these lines where {Path(used.file).name}:{used.line} needs the weights: fused functions "
        f"do not return them. If it does not need them in all calls: {lowered(text)}"
    )


def _replacement(calls: Sequence[Attention]) -> str:
    ours, theirs = "attnspan.torch.attention", "F.scaled_dot_product_attention"
    sinks, softcap = any(x.keys is not None for x in calls), any("tanh" in x.steps for x in calls)
    special = ["sinks=(your sinks)"] * sinks + ["softcap=(your limit)"] * softcap
    scales = {None if x.scale is None else _scale(x) for x in calls}
    scale = scales.pop() if len(scales) == 1 else None
    if special:  # torch's function has neither.
        known = f". {_SCALE.replace('Both multiply', 'It multiplies')}" if scale is None else ""
        given = ", ".join(filter(None, ["q, k, v", *special, scale]))
        return f"Replace these lines by {ours}({given}){known}"
    mask, same, note = _masks_of(calls)
    if scale is None:
        keep = f". Pass your mask or bias too, as {mask}" if mask else ""
        return f"Replace these lines by {theirs} or {ours}{keep}. {_SCALE}"
    their, own = (", ".join(filter(None, ["q, k, v", x, scale])) for x in (mask, same))
    return f"Replace these lines by {theirs}({their}) or {ours}({own}), with q and k as in your product{note}"


def _masks_of(calls: Sequence[Attention]) -> tuple[str, str, str]:
    """Write the mask's argument for torch and for attnspan, and a note on calls with another mask."""
    kinds = Counter(_mask_of(x) for x in calls)
    if set(kinds) == {""}:
        return "", "", ""
    if set(kinds) == {"causal"}:
        return "is_causal=True", "mask=causal()", ""
    masked = len(calls) - kinds[""]
    none = f". {masked} of the {len(calls)} calls here have a mask: the others have none" if kinds[""] else ""
    if set(kinds) <= {"causal", "", "last"}:
        # One query behind a cache sees all keys, also with causal(), which counts from the last key.
        same = "mask=(causal(), or None as now)" if kinds[""] else "mask=causal()"
        return "attn_mask=(your mask)", same, none
    return "attn_mask=(your mask)", "mask=(its form)", none


def _mask_of(call: Attention) -> str:
    """Say which mask a call has: "" (none), "causal", "last" (one query that sees all keys), or "mask"."""
    visible = call.visible
    if call.mask_biases or visible is None:
        return "mask" if call.applied or call.mask is not None else ""
    if not bool(visible.all()):
        square = visible.shape[-2] == visible.shape[-1]
        causal = square and bool((visible == visible.new_ones(visible.shape).tril()).all())
        return "causal" if causal else "mask"
    # A mask that hides nothing today, such as a padding mask, may hide pairs of another batch.
    if call.applied or call.mask is not None:
        return "mask"
    return "last" if visible.shape[-2] == 1 < visible.shape[-1] else ""


def _scale(call: Attention) -> str:
    """Write a scale that is not the default."""
    assert call.scale is not None
    usual, near = (call.q[-1] ** -0.5, 1.0), _NEARLY.get(call.dtype, 1e-4)
    nearest = next((x for x in usual if math.isclose(call.scale, x, rel_tol=near)), call.scale)
    return "" if nearest == usual[0] else f"scale={nearest:.4g}"
