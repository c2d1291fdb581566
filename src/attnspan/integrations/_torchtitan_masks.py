"""The masks of torchtitan's decoders as spans, lowered once for each kind of layer and step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.errors import UsageError, expect
from attnspan.masks import Mask, causal, from_predicate, full, segments, window

from ._all_pairs import combined, say_evaluated


class SpanMask(NamedTuple):
    """Mask that the decoder passes to its layers instead of a BlockMask. `make_mask` returns it.

    Attributes:
        bounds: int32 (B, 1, queries, R, 2), the keys that each query of this rank sees.
        k_order: Integer (1|B, S): the place of each key of the sequence among the keys that context
            parallelism gathers from all ranks. None if they are in order.
        window: Number of keys that a query may see, including itself. 0 for no limit.
    """

    bounds: Tensor
    k_order: Tensor | None = None
    window: int = 0


def make_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    **_: Any,
) -> SpanMask:
    """Make the mask of one kind of layer for one step. The arguments are `create_block_mask`'s.

    Args:
        mask_mod: The visible pairs, a function of (batch, head, query, key) indices.
        B: Size of the batch. None if all elements share the mask.
        H: Must be None, because all heads share the mask.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys, the same as Q_LEN.
        device: Device of the mask.

    Raises:
        UsageError: The mask differs between heads, or the numbers of keys and queries differ.

    Example:
        >>> from torch.nn.attention.flex_attention import noop_mask
        >>> make_mask(noop_mask, 1, None, 3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 3], [0, 3], [0, 3]]
    """
    remedy = "Keep torchtitan's attention for this layer, with your own override with fqns="
    expect(H is None, "H", "None, one mask for all heads", H, remedy, error=UsageError)
    expect(Q_LEN == KV_LEN, "KV_LEN", "{}, as many as queries", KV_LEN, remedy, Q_LEN, error=UsageError)
    mask, known = _lower(mask_mod, torch.device(device), KV_LEN)
    like = torch.empty(0, device=device)
    # A known mask's structure gives its number of spans, so compiled layers see one shape.
    lower = mask.spans if known else lambda *a, **k: mask.prepare(*a, **k).lowered
    found = torch.as_tensor(lower(Q_LEN, KV_LEN, batch=B or 1, like=like).bounds, device=device)
    return SpanMask(found.expand(B or 1, -1, -1, -1, -1).contiguous(), window=_window(mask_mod))


def _window(fn: Callable[..., Any]) -> int:
    """Return the narrowest window among a mask function and the parts of its intersection."""
    if _name_of(fn) == "and_masks":
        return min(filter(None, map(_window, _captured(fn)["mask_mods"])), default=0)
    return int(_captured(fn)["window_size"]) if _name_of(fn) == "get_sliding_window_mask_mod" else 0


def _lower(fn: Callable[..., Any], device: torch.device, k_len: int) -> tuple[Mask, bool]:
    """Return the mask that a mask function describes, and whether torchtitan or torch defines it."""
    if isinstance(fn, _Packed):
        return segments(fn.ids), True
    name, data = _name_of(fn), _captured(fn)
    if name in ("and_masks", "or_masks"):
        parts = list(data["mask_mods"])
        if name == "and_masks" and any(_name_of(part) in _CAUSAL for part in parts):
            parts = [_Packed(_captured(part)) if _name_of(part) == _PACKED else part for part in parts]
        found = [_lower(part, device, k_len) for part in parts]
        return combined(name, (mask for mask, _ in found)), all(known for _, known in found)
    if name == "get_causal_mask_mod":
        return causal(), True
    if name == "get_sliding_window_mask_mod":
        return causal() & window(data["window_size"] - 1, None), True
    if name == "get_document_mask_mod":
        return segments(data["doc_ids"] + 1), True  # A sequence may start within a document, with id -1.
    if name == "get_fixed_block_mask_mod":
        return segments(torch.arange(k_len, device=device) // data["fixed_block_size"]), True
    if name == "noop_mask":
        return full(), True
    say_evaluated(name, "torchtitan's")
    return from_predicate(fn), False


_CAUSAL = ("get_causal_mask_mod", "get_sliding_window_mask_mod")
_PACKED = "get_efficient_causal_mask_mod_for_packed_document"


class _Packed:
    """torchtitan's mask of packed documents, which separates them only together with a causal mask."""

    def __init__(self, data: dict[str, Any]) -> None:
        one_row = "document_id" in data
        self.ids: Tensor = data["document_id"][None] if one_row else data["doc_end_by_token"]


def _name_of(fn: Any) -> str:
    """Return the name of a mask function, or of the torchtitan or torch function that makes it."""
    name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    own = str(getattr(fn, "__module__", "")).startswith(("torchtitan.models.common", "torch.nn.attention."))
    return name.partition(".<locals>")[0] if own else name.replace(".<locals>", "")


def _captured(fn: Any) -> dict[str, Any]:
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cells = getattr(fn, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
