"""Results of an attention call for queries that see no key, measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["MEAN", "NAN", "OTHER", "UNMASKED", "cause_of", "remedy_of", "returned"]

NAN, ZERO, MEAN = "NaN", "0", "the mean of all values"
UNMASKED, OTHER, UNKNOWN = (
    "nearly the result without a mask",
    "other numbers",
    "a result that was not measured",
)
_ROUNDINGS = 64  # largest difference that counts as equal, in roundings of the largest value
_NEARLY = 1e-2  # A number such as -1e4 rounds the scores that it is added to.
_CAUSES = {
    NAN: "Softmax over only -inf is NaN (0 / 0)",
    ZERO: "This attention defines their result as 0",
    MEAN: "A large negative number is added to all of their scores. Rounding then makes these scores equal, "
    "so the softmax is uniform",
    UNMASKED: "The same finite number is added to all of their scores, and a softmax ignores it",
    OTHER: "The mask's numbers are finite, so their scores still have an effect",
    UNKNOWN: "",
}


def returned(call: Attention, rows: list[tuple[int, int]]) -> Counter[str]:
    """Count what the call returned for queries without a visible key.

    Args:
        call: A call whose result was kept.
        rows: (batch element, query) of these queries.
    """
    found = _by_head(call)
    if found is None:
        return Counter({UNKNOWN: len(rows)})
    out, means, unmasked = found
    size = float(call.value.abs().nan_to_num().max()) if call.value is not None else 1.0
    near = _ROUNDINGS * torch.finfo(out.dtype).eps * max(size, 1e-30)

    def kind(b: int, s: int) -> str:
        row = out[b, :, s]
        if bool(row.isnan().any()):
            return NAN
        if not bool(row.any()):
            return ZERO
        if bool(((row - means[b]).abs() <= near).all()):
            return MEAN
        same = unmasked is not None and bool(((row - unmasked[b, :, s]).abs() <= _NEARLY * size).all())
        return UNMASKED if same else OTHER

    return Counter(kind(b, s) for b, s in rows)


def _by_head(call: Attention) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Bring the result to (B, H, S, D), the means of values to (B, H, D), and compute the unmasked result."""
    out, value, visible = call.result, call.value, call.visible
    if out is None or value is None or visible is None:
        return None
    rows, q_len, k_len = visible.shape
    if out.shape[-2] != q_len or value.shape[-2] != k_len or out.shape[-1] != value.shape[-1]:
        return None
    by_head = out.reshape(rows, -1, *out.shape[-2:])
    means = value.reshape(rows, -1, *value.shape[-2:]).mean(-2)
    if by_head.shape[1] % means.shape[1]:
        return None
    means = means.repeat_interleave(by_head.shape[1] // means.shape[1], 1)
    unmasked = None
    if call.given:
        kept = {k: x for k, x in call.given.items() if k not in ("attn_mask", "is_causal", "dropout_p")}
        unmasked = scaled_dot_product_attention(**kept).detach().reshape(by_head.shape)
    return by_head, means, unmasked


def cause_of(kinds: Counter[str], overflow: str) -> str:
    """Write why queries without a key get these results.

    Args:
        kinds: The results, counted.
        overflow: Text about a number of the mask that is infinite in its dtype, or "".
    """
    said = ["The mask hides every key of these queries", *(_CAUSES[x] for x in kinds)]
    said += [overflow[:1].upper() + overflow[1:]] if overflow else []
    return ". ".join(filter(None, said))


def remedy_of(kinds: Counter[str]) -> str:
    """Write the remedy. attnspan is none for an attention that already returns 0."""
    return "Let each of these queries see its own key" if set(kinds) == {ZERO} else ""
