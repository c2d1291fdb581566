"""The record of one attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnspan_lab.doctor.places import Place, lines_here
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.heads import HeadMap
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN
from attnspan_lab.doctor.torch.numbers.overflow import Overflow

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.isolation.padding_causes import Fault
    from attnspan_lab.doctor.torch.recording.calls import Call, Step

__all__ = ["HIDDEN", "Attention", "StepFacts", "seen_as"]


@dataclass(eq=False)
class StepFacts:
    """Facts about a step: the batch's facts, its number of tokens or 0, and the time of all operators."""

    said: Declared = field(default_factory=Declared)
    tokens: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Attention:
    """One attention call.

    Attributes:
        kind: "sdpa", "flex", "attnspan", "custom" (another library's operator) or "written out".
        kernel: The operator that ran, or "" if scores were stored.
        place: The user's line.
        q, k: Shapes of q and k.
        dtype: Dtype of q.
        recomputed: The call ran in a backward pass, for checkpointing.
        visible: Pairs that at least one head sees, bool (B, Sq, Sk), or None if unknown.
        mask: Shape and line of a dense mask or bias, and whether it is floating-point.
        mask_bytes: Memory of the mask, or 0 if it is a view that repeats a row or a column.
        mask_seconds: Time that operators took to create the mask.
        mask_biases: The mask adds other numbers than 0 to visible pairs.
        mask_sources: Tensors of the batch that the mask is made from.
        applied: Operator, line and tensor of each change of stored scores before their softmax.
        filled: The highest score that replaced a score under a mask.
        weights_used: The line that uses the weights for another purpose than the result.
        padding: The fault of the padding mask, if the call has one.
        same_in_heads: All heads see the same pairs.
        given: Names and values of the arguments of torch's function. Empty for other functions.
        key: The keys, if there are more or fewer keys than queries.
        first_own: Index of the first key that is made from the batch's tokens, after the keys of a cache.
        hidden: (batch element, query) of queries without a visible key.
        result, value: The result and the values, if there are such queries.
        overflow: The number of the mask or the scores that is infinite in its dtype.
        repeated: Line that copied keys or values for more heads, and the copy's bytes.
        head_maps: Key heads of the query heads in these keys and values, None where unknown.
        copied: Line that copied q, k or v to make them contiguous, and the copy's bytes.
        upcast: Line that converted to a wider dtype.
        upcast_bytes: Bytes of q, k and v in the wider dtype.
        score_count: Number of scores, if they are stored.
        wide: Line that made scores or weights in a wider dtype than q, this dtype, and their bytes.
        softmax: The softmax of the scores was seen.
        keys: Number of score columns that are keys, or None without sinks.
        steps: Operators on scores before their softmax.
        products: Scores of one head before these operators.
        scale: Factor of the scores before their softmax, or None if it is unknown.
        in_multihead: The call is part of nn.MultiheadAttention.
        lines: All of the user's lines that lead to the call, as "file:line".
        step: Facts about the step of the call.
    """

    kind: str
    kernel: str
    place: Place | None
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: torch.dtype
    recomputed: bool = False
    visible: Tensor | None = None
    mask: tuple[tuple[int, ...], Place | None, bool] | None = None
    mask_bytes: int = 0
    mask_seconds: float = 0.0
    mask_biases: bool = False
    mask_sources: frozenset[str] = frozenset()
    applied: list[tuple[str, Place | None, Tensor]] = field(default_factory=list)
    filled: float = float("-inf")
    weights_used: Place | None = None
    padding: Fault | None = None
    same_in_heads: bool = True
    given: dict[str, Any] = field(default_factory=dict)
    key: Tensor | None = None
    first_own: int = 0
    hidden: list[tuple[int, int]] = field(default_factory=list)
    result: Tensor | None = None
    value: Tensor | None = None
    overflow: Overflow | None = None
    repeated: tuple[Place | None, int] | None = None
    head_maps: list[HeadMap | None] = field(default_factory=list)
    copied: tuple[Place | None, int] | None = None
    upcast: Place | None = None
    upcast_bytes: int = 0
    score_count: int = 0
    wide: tuple[Place | None, torch.dtype, int] | None = None
    softmax: bool = False
    keys: slice | None = None
    steps: set[str] = field(default_factory=set)
    products: Tensor | None = None
    scale: float | None = None
    in_multihead: bool = False
    lines: list[str] = field(default_factory=lines_here)
    step: StepFacts = field(default_factory=StepFacts)

    @property
    def k_len(self) -> int:
        """Number of keys."""
        if self.visible is not None:
            return self.visible.shape[2]
        return self.k[-2] if self.kernel else self.k[-1]  # A stored product has transposed keys.

    @property
    def stores_scores(self) -> bool:
        """Whether a tensor (..., Sq, Sk) was stored."""
        return not self.kernel


def seen_as(call: Call, step: Step, calls: Sequence[Attention]) -> Attention | None:
    """Find the watcher's record of a call: the calls of a line have one order.

    Args:
        call, step: A call of a step.
        calls: Calls that the watcher saw in this step.
    """
    own = [x for x in step.calls if x.place == call.place]
    seen = [x for x in calls if x.place == call.place and not x.recomputed]
    return seen[own.index(call)] if len(own) == len(seen) else None
