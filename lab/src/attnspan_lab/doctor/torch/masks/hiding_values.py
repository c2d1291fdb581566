"""Numbers that hide a pair of tokens when they are added to its score."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HIDDEN", "highest_hiding", "highest_hiding_in"]

#: Scores at or below this number are hidden: -inf, the smallest numbers of dtypes, -1e4 in half precision.
HIDDEN = -9e3
#: A score that is lower by this number has at most 2e-9 of the weight.
_GAP = 20.0


def highest_hiding(x: Tensor) -> float:
    """Find the highest number of a mask, or of masked scores, that hides a pair.

    Masks such as Swin's -100 leave a gap between visible and hidden pairs. All numbers below the highest gap
    hide, because the weights that they leave are negligible. Position biases have no such gap.

    Example:
        >>> highest_hiding(torch.tensor([0.0, -100.0])), highest_hiding(torch.tensor([0.0, -3.0]))
        (-100.0, -9000.0)
    """
    if not x.is_floating_point():
        return HIDDEN
    x = x.detach().float()
    values = x[(x > HIDDEN) & x.isfinite()]
    if values.numel() < 2 or float(values.max() - values.min()) < _GAP:
        return HIDDEN
    values = values.sort().values
    gaps = (values.diff() >= _GAP).nonzero()
    return float(values[int(gaps.max())]) if len(gaps) else HIDDEN


def highest_hiding_in(mask: Tensor, query: Tensor, key: Tensor, scale: float | None = None) -> float:
    """Find the highest number of a call's mask that hides a pair.

    A number such as -100 hides a pair only if it is far below the differences of the model's own scores.
    """
    limit = highest_hiding(mask)
    outweighs = limit == HIDDEN or _outweighs(mask, limit, query, key, scale)
    return limit if outweighs else HIDDEN


def _outweighs(mask: Tensor, limit: float, query: Tensor, key: Tensor, scale: float | None) -> bool:
    """Whether each pair at or below a limit has a score far below the highest score of its query."""
    q, k = query.detach().float(), key.detach().float()
    if q.dim() > 3 and k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + mask.detach().float()
    hides = (mask <= limit).expand(scores.shape)
    best = scores.masked_fill(hides, -torch.inf).amax(-1, keepdim=True)
    # A query that sees no key has nothing to compare.
    return bool((~hides | (scores <= best - _GAP) | best.isinf()).all())
