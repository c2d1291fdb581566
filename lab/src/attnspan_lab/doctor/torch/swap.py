"""Replacement of the attention function in every module that has bound it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnspan import from_block_mask, full
from attnspan.torch import attention, scaled_dot_product_attention
from attnspan_lab.zoo.torch_attention import identity

__all__ = ["SWAPS", "implementation", "swapped"]

_REGISTERED_BY = {
    "attnspan": "attnspan.integrations.transformers",
    "identity": "attnspan_lab.zoo.transformers",
}


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _identity_of_attnspan(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bhsd", **_: Any) -> Tensor:
    if layout == "bhsd":
        return identity(q, k, v)
    if v.shape[1] == q.shape[1]:
        return v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)
    return q[..., : v.shape[-1]]


def _flex_as_attnspan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
) -> Any:
    """Compute FlexAttention's call with attnspan. A score_mod has no translation and raises."""
    del enable_gqa, kernel_options
    if score_mod is not None:
        raise NotImplementedError(
            "score_mod has no translation: pass bias=alibi(...), bias=relative(...) or softcap= instead"
        )
    mask = full() if block_mask is None else from_block_mask(block_mask)
    out, lse = attention(query, key, value, mask=mask, scale=scale, return_lse=True)
    return (out, lse) if return_lse else out


#: Replacements of torch's function, FlexAttention and attnspan's attention, by name.
SWAPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "identity": (identity, lambda q, k, v, *_, **__: identity(q, k, v), _identity_of_attnspan),
    "attnspan": (scaled_dot_product_attention, _flex_as_attnspan, attention),
}


@contextmanager
def swapped(name: str) -> Iterator[None]:
    """Replace torch's function, FlexAttention and attnspan's in every module that has bound them.

    Args:
        name: One of `SWAPS`, or "own" to replace nothing.
    """
    if name == "own":
        yield
        return
    originals = (F.scaled_dot_product_attention, _flex(), attention)
    # The compiler builds its table of torch's functions at first use. It must not contain replacements.
    torch._dynamo.trace_rules.lookup(originals[0])
    instead = dict(zip(map(id, originals), SWAPS[name], strict=True))
    # attnspan's modules call each other, so only the public name is replaced.
    spaces = [
        getattr(x, "__dict__", {})
        for key, x in list(sys.modules.items())
        if key == "attnspan.torch" or not key.startswith(("attnspan", "torch._dynamo"))
    ]
    bound = [(space, key, x) for space in spaces for key, x in [*space.items()] if id(x) in instead]
    for space, key, x in bound:
        space[key] = instead[id(x)]
    try:
        yield
    finally:
        for space, key, x in bound:
            space[key] = x
        torch._dynamo.reset()


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Set the attention implementation of a transformers model. Other models stay as they are.

    Args:
        model: The model, which is changed until the end of the block.
        name: One of `SWAPS`, or an implementation that transformers knows.
    """
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or name == "own":
        yield
        return
    if name in _REGISTERED_BY:
        importlib.import_module(_REGISTERED_BY[name])
    before: Any = model.config._attn_implementation  # type: ignore[union-attr]
    _chosen(choose, name)
    try:
        yield
    finally:
        _chosen(choose, before)


def _chosen(choose: Any, name: str) -> None:
    """Set an implementation without transformers' warnings that a model does not support it."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        choose(name)
    finally:
        logger.setLevel(before)
