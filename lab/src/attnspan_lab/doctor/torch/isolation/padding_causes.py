"""Causes of visible padding: no mask, an inverted mask, or a mask of 0 and 1 that is added to scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan_lab.doctor.places import Place, place_here
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import arguments
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["Changed", "Fault", "fault_of"]

Change = Callable[[Tensor], Tensor]
_FUNCTIONS = (
    "scaled_dot_product_attention",
    "masked_fill",
    "where",
    "add",
    "iadd",
    "radd",
    "mul",
    "imul",
    "rmul",
)
_ADDS, _TIMES = ("add", "add_", "attn_mask"), ("mul", "mul_")


class Fault(NamedTuple):
    """Cause of a lost mask.

    Args:
        what: The problem, in a sentence.
        cause, remedy: Texts for the user. An empty remedy is the kind's.
        place: The line that applies the mask, or None without a mask.
        shape: Shape of the applied mask.
        change: Makes the right mask of the applied mask. None if the mask has to be added.
        inverted: The mask hides valid tokens.
    """

    what: str
    cause: str
    remedy: str = ""
    place: Place | None = None
    shape: tuple[int, ...] = ()
    change: Change | None = None
    inverted: bool = False


def fault_of(call: Attention, own: Tensor, said: Declared, queries: Tensor | None = None) -> Fault:
    """Find out what is wrong with the padding mask of a call.

    Args:
        call: A call.
        own: Its visible pairs of the batch's tokens, bool (B, S, S), or (B, Sq, S) with other queries.
        said: Facts of the batch. The padding is known.
        queries: Valid queries, bool (B, Sq). Default: the valid tokens.
    """
    valid = said.mask if said.mask is not None else said.valid
    assert valid is not None
    applied = list(_applied(call, own.shape[-1]))
    for name, place, x in applied:
        if (
            name in (*_ADDS, *_TIMES)
            and x.dtype != torch.bool
            and _is_binary(x)
            and _marks(x, valid) is not None
        ):
            return _of_numbers(name, place, x, valid, said.padding)
    candidate = _inversion(own, valid, valid if queries is None else queries)
    if candidate is not None and said.padding in call.mask_sources:
        for name, place, x in applied:
            if candidate != "causal" or x.shape[-2:-1] in ((), (1,)) or _is_same_for_queries(x):
                return _inverted(name, place, x, said.padding)
        return Fault(
            _INVERTED,
            f"The call shows padding and hides valid tokens of {said.padding}",
            _INVERT,
            inverted=True,
        )
    if not applied and call.mask is None:
        given = call.given
        other = "has no mask except is_causal=True" if given.get("is_causal") else "has no mask"
        return Fault(_SEEN, f"The batch has padding ({said.padding}), and this call {other}")
    least = min((float(x.min()) for _, _, x in applied if x.is_floating_point()), default=-torch.inf)
    if HIDDEN < least < 0:
        cause = (
            f"The mask adds {least:.3g} to scores of padding, which lowers their weights and hides nothing"
        )
        return Fault(_SEEN, cause)
    made = said.padding in call.mask_sources
    origin = f"is made from {said.padding}, but" if made else f"has no data of {said.padding}, so"
    cause = f"The batch has padding ({said.padding}). This call's mask {origin} it shows padding"
    return Fault(_SEEN, cause)


_SEEN = "Valid tokens see padding here"
_INVERTED = "The padding mask is inverted here: valid tokens see padding, and not each other"
_INVERT = "Invert the padding mask"
_SHOWS = {"attn_mask": "scaled_dot_product_attention shows", "where": "torch.where keeps the scores of"}


def _applied(call: Attention, length: int) -> Iterator[tuple[str, Place | None, Tensor]]:
    """Yield the tensors that mask scores: the operator, its line, and the tensor."""
    if call.given:
        mask = call.given.get("attn_mask")
        if isinstance(mask, Tensor) and mask.shape[-1:] == (length,):
            yield "attn_mask", call.place, mask.detach()
        return
    yield from (x for x in call.applied if x[2].shape[-1:] == (length,))


def _is_binary(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all()) and bool((x == 0).any()) and bool((x == 1).any())


def _is_same_for_queries(x: Tensor) -> bool:
    return x.dim() > 1 and bool((x == x[..., :1, :]).all())


def _inversion(own: Tensor, valid: Tensor, queries: Tensor) -> str | None:
    """Say how the visible pairs of valid queries are the opposite of what they have to be, or None."""
    hidden = ~valid[:, None, :].expand(-1, own.shape[1], -1)
    earlier = torch.ones_like(own).tril()
    candidates = {"full": hidden, "complement": ~(earlier & ~hidden), "causal": earlier & hidden}
    own = own.expand(len(valid), -1, -1)
    if not bool(hidden.any()):
        return None if bool(own.any()) else "full"  # Without padding, it hides everything.
    return next((k for k, x in candidates.items() if torch.equal(own[queries], x[queries])), None)


def _inverted(name: str, place: Place | None, x: Tensor, padding: str) -> Fault:
    if x.dtype == torch.bool:
        shows = name in _SHOWS
        does = f"{_SHOWS.get(name, 'masked_fill hides')} pairs with True"
        cause = f"{does}, and this mask has True for {'padding' if shows else 'valid tokens'} ({padding})"
        return Fault(
            _INVERTED,
            cause,
            f"{_INVERT}: pass ~mask",
            place,
            tuple(x.shape),
            torch.logical_not,
            inverted=True,
        )
    cause = f"The mask adds 0 to padding and {float(x.min()):.3g} to valid tokens ({padding})"
    remedy = "Add 0 to valid tokens and -inf to padding"
    return Fault(
        _INVERTED,
        cause,
        remedy,
        place,
        tuple(x.shape),
        lambda y: _additive(y <= highest_hiding(y), y),
        inverted=True,
    )


def _of_numbers(name: str, place: Place | None, x: Tensor, valid: Tensor, padding: str) -> Fault:
    ones_hide = not _marks(x, valid)
    verb = "multiplied with" if name in _TIMES else "added to"
    what = f"A mask of 0 and 1 is {verb} the scores here, which hides nothing"
    effect = "Scores change by at most 1" if name in _ADDS else "A score of 0 is not hidden: only -inf is"
    cause = f"{effect}, so valid tokens see the padding of {padding}"
    shown = "mask == 0" if ones_hide else "mask != 0"
    hide = "mask != 0" if ones_hide else "mask == 0"
    remedy = f"Pass a boolean mask: attn_mask=({shown})"
    if name != "attn_mask":
        remedy = f"Hide padding with scores.masked_fill({hide}, float('-inf'))"

    def change(y: Tensor) -> Tensor:
        return _additive((y == 0) if ones_hide else (y != 0), y)

    return Fault(what, cause, remedy, place, tuple(x.shape), change)


def _marks(x: Tensor, valid: Tensor) -> bool | None:
    """Whether 1 marks the valid keys (True) or the padding (False) of some query. None if neither."""
    keys = (x != 0).flatten(1, -2).any(1) if x.dim() > 2 else x != 0
    if (
        keys.dim() > 2
        or keys.shape[-1] != valid.shape[-1]
        or (keys.dim() == 2 and len(keys) not in (1, len(valid)))
    ):
        return None
    keys = keys.expand_as(valid)
    return True if torch.equal(keys, valid) else False if torch.equal(keys, ~valid) else None


def _additive(shown: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return torch.zeros(shown.shape, dtype=dtype, device=like.device).masked_fill(~shown, -torch.inf)


class Changed(TorchFunctionMode):
    """Replaces masks at some lines."""

    def __init__(self, changes: Mapping[Place | None, Fault]) -> None:
        super().__init__()
        self.changes = changes

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(getattr(fn, "__name__", "")).strip("_")
        place = place_here() if name in _FUNCTIONS else None
        fault = self.changes.get(place) if place is not None else None
        if fault is None or (change := fault.change) is None:
            return fn(*args, **kwargs)
        if name == _FUNCTIONS[0]:
            given = arguments(args, kwargs)
            given["attn_mask"] = change(given["attn_mask"])
            return fn(**given)

        def is_mask(x: Any) -> bool:
            same = isinstance(x, Tensor) and tuple(x.shape) == fault.shape and not x.requires_grad
            return same and (x.dtype == torch.bool or _is_mask(x))

        changed = [change(x) if is_mask(x) else x for x in args]
        if name in ("mul", "imul", "rmul") and any(
            map(is_mask, args)
        ):  # Numbers that were multiplied are added: 0 or -inf.
            return changed[0] + changed[1]
        return fn(*changed, **kwargs)


def _is_mask(x: Tensor) -> bool:
    """Whether numbers are a mask: 0 and 1, or 0 and large negative numbers."""
    return _is_binary(x) or bool(((x == 0) | (x <= highest_hiding(x))).all())
