"""The mask that a call should have instead of its own: the text of the remedy, and the trial."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan import Mask
from attnspan.torch import attention
from attnspan_lab.doctor.places import Place, lines_here, place_here
from attnspan_lab.doctor.torch.masks.forms import Form, arguments
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["Masked", "aligned", "ends_with_own", "route", "written"]


def route(lines: list[str]) -> tuple[str, ...]:
    """Tell apart calls that share their line by the lines of the same files that lead to them."""
    file = lines[0].rpartition(":")[0] if lines else ""
    return tuple(x for x in lines if x.rpartition(":")[0] == file)


def ends_with_own(call: Attention, length: int) -> bool:
    """Whether the last keys of a call are the batch's own."""
    return call.visible is not None and call.first_own + length == call.visible.shape[2]


def aligned(at_the_end: bool) -> str:
    """Write the remedy of an alignment. `causal()` counts from the last key, which must be a query's own."""
    ours = "Pass mask=causal() to attnspan.torch.attention"
    theirs = "attn_mask=torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)"
    other = "Pass an attn_mask that shows each query the keys up to its own"
    return f"{ours}. Or: pass {theirs}" if at_the_end else other


def written(form: Form | None, *, is_torch: bool) -> str:
    """Write the remedy of a lost mask, or "" for the kind's remedy."""
    if form is None:
        return ""
    text, _ = form
    ids = " (ids: the document of each token)" if "segments(ids)" in text else ""
    ours = f"ass mask={text} to attnspan.torch.attention{ids}"
    if text == "causal()" and is_torch:
        return f"Pass is_causal=True. Or: p{ours}"
    if text.startswith("keys(") and " & " not in text and is_torch and "valid" not in text:
        return f"Pass attn_mask=({text[5:-1]})[:, None, None]. Or: p{ours}"
    return f"P{ours}. Or: pass cu_seqlens to flash-attn" if "segments(" in text else f"P{ours}"


class Masked(TorchFunctionMode):
    """Calls attnspan's attention with other masks instead of torch's function, for some calls of some lines.

    Args:
        masks: The mask of each line.
        routes: The `route` of each call to replace.
        rows: Number of samples. The first dim of a call may be batch and heads.
    """

    def __init__(
        self, masks: Mapping[Place | None, Mask], routes: Collection[tuple[str, ...]], rows: int
    ) -> None:
        super().__init__()
        self.masks, self.routes, self.rows, self.used = masks, routes, rows, set[Place | None]()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = arguments(args, kwargs or {})
        name = getattr(fn, "__name__", "")
        place = place_here() if name in ("scaled_dot_product_attention", "softmax") else None
        if place is None or place not in self.masks or route(lines_here()) not in self.routes:
            return fn(*args, **(kwargs or {}))
        self.used.add(place)
        if name == "softmax":
            scores = _hidden(self._by_head(args[0]), self.masks[place]).view(args[0].shape)
            return fn(scores, *args[1:], **(kwargs or {}))
        q, k, v = (self._by_head(given[x]) for x in ("query", "key", "value"))
        out = attention(q, k, v, mask=self.masks[place], scale=given.get("scale"))
        return out.flatten(0, 1) if given["query"].dim() == 3 else out

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(self.rows, -1, *x.shape[1:]) if x.dim() == 3 else x


def _hidden(scores: Tensor, mask: Mask) -> Tensor:
    """Hide pairs of written-out scores (B, H, Sq, Sk)."""
    batch, _, q_len, k_len = scores.shape
    shown = torch.as_tensor(mask.spans(q_len, k_len, batch=batch, like=scores).dense())
    return scores.masked_fill(~shown, -torch.inf)
