"""Causes of visible padding: no mask, an inverted mask, or a mask of 0 and 1 that is added to scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan_lab.doctor import pairs
from attnspan_lab.doctor.places import Place, place_here
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import arguments
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["SEEN", "Changed", "Fault", "fault_of", "inverse"]

Change = Callable[[Tensor], Tensor]
_ADDS, _TIMES = ("add", "iadd", "radd"), ("mul", "imul", "rmul")
_FUNCTIONS = ("scaled_dot_product_attention", "masked_fill", "where", *_ADDS, *_TIMES)
_OF_OPERATOR = {"attn_mask": _FUNCTIONS[:1], "add": _ADDS, "mul": _TIMES}
#: The problem if a call shows padding.
SEEN = pairs.SEEN["mask-lost"]
_INVERTED = "The padding mask is inverted here: valid tokens see padding, and not each other"
_INVERT = "Invert the padding mask"


class _Applied(NamedTuple):
    """A tensor that masks scores: the operator that applies it, its line, and the tensor."""

    name: str
    place: Place | None
    mask: Tensor

    @property
    def is_added(self) -> bool:
        return self.name in ("attn_mask", "add", "add_")

    @property
    def is_factor(self) -> bool:
        return self.name in ("mul", "mul_")


class Fault(NamedTuple):
    """Cause of a lost mask.

    Args:
        what: The problem, in a sentence.
        cause, remedy: Texts for the user. An empty remedy is the kind's.
        place, operator: The line and the operator that apply the mask, or None and "" without a mask.
        shape: Shape of the applied mask.
        change: Makes the right mask of the applied mask. None if the mask has to be added.
    """

    what: str
    cause: str
    remedy: str = ""
    place: Place | None = None
    operator: str = ""
    shape: tuple[int, ...] = ()
    change: Change | None = None

    @property
    def inverted(self) -> bool:
        """Whether the mask hides valid tokens."""
        return self.what == _INVERTED


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
    for x in applied:
        marks = _marks(x.mask, valid) if x.is_added or x.is_factor else None
        if marks is not None:
            return _of_numbers(x, said.padding, ones_hide=not marks)
    opposite = _inversion(own, valid, valid if queries is None else queries)
    if opposite is not None and said.padding in call.mask_sources:
        for x in applied:
            if opposite != "causal" or x.mask.shape[-2:-1] in ((), (1,)) or _is_same_for_queries(x.mask):
                return _inverted(x, said.padding, valid)
        return Fault(_INVERTED, f"The call shows padding and hides valid tokens of {said.padding}", _INVERT)
    has = f"The batch has padding ({said.padding})"
    if not applied and call.mask is None:
        is_causal = bool(call.given.get("is_causal"))
        if not (is_causal or bool(own.all())):  # Another function than the watched ones applies the mask.
            return Fault(SEEN, f"{has}. This call's mask shows it")
        other = " except is_causal=True" if is_causal else ""
        return Fault(SEEN, f"{has}, and this call has no mask{other}")
    least = min((float(x.mask.min()) for x in applied if x.mask.is_floating_point()), default=-torch.inf)
    if HIDDEN < least < 0:
        lowers = f"The mask adds {least:.3g} to scores of padding, which lowers their weights"
        return Fault(SEEN, f"{lowers} and hides nothing")
    made = said.padding in call.mask_sources
    origin = f"is made from {said.padding}, but" if made else f"has no data of {said.padding}, so"
    return Fault(SEEN, f"{has}. This call's mask {origin} it shows padding")


_SHOWS = {"attn_mask": "scaled_dot_product_attention shows", "where": "torch.where keeps the scores of"}


def _applied(call: Attention, length: int) -> Iterator[_Applied]:
    """Yield the tensors that mask scores of keys."""
    applied = call.applied
    if call.given:
        mask = call.given.get("attn_mask")
        applied = [("attn_mask", call.place, mask.detach())] if isinstance(mask, Tensor) else []
    yield from (_Applied(*x) for x in applied if x[2].shape[-1:] == (length,))


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


def _inverted(x: _Applied, padding: str, valid: Tensor) -> Fault:
    if x.mask.dtype == torch.bool:
        shows = x.name in _SHOWS and not (x.name == "where" and _marks(x.mask.long(), valid))
        does = f"{_SHOWS[x.name] if shows else x.name.strip('_') + ' hides'} pairs with True"
        cause = f"{does}, and this mask has True for {'padding' if shows else 'valid tokens'} ({padding})"
        remedy = f"{_INVERT}: pass ~mask"
    else:
        cause = f"The mask adds 0 to padding and {float(x.mask.min()):.3g} to valid tokens ({padding})"
        remedy = "Add 0 to valid tokens and -inf to padding"
    return Fault(_INVERTED, cause, remedy, x.place, x.name, tuple(x.mask.shape), inverse)


def inverse(mask: Tensor) -> Tensor:
    """Hide the pairs that a mask shows, and show the pairs that it hides."""
    return ~mask if mask.dtype == torch.bool else _additive(mask <= highest_hiding(mask), mask)


def _of_numbers(x: _Applied, padding: str, *, ones_hide: bool) -> Fault:
    verb = "multiplied with" if x.is_factor else "added to"
    what = f"A mask of 0 and 1 is {verb} the scores here, which hides nothing"
    effect = "Scores change by at most 1" if x.is_added else "A score of 0 is not hidden: only -inf is"
    cause = f"{effect}, so valid tokens see the padding of {padding}"
    shown, hidden = ("mask == 0", "mask != 0") if ones_hide else ("mask != 0", "mask == 0")
    remedy = f"Pass a boolean mask: attn_mask=({shown})"
    if x.name != "attn_mask":
        remedy = f"Hide padding with scores.masked_fill({hidden}, float('-inf'))"

    def change(y: Tensor) -> Tensor:
        return _additive((y == 0) == ones_hide, y)

    return Fault(what, cause, remedy, x.place, x.name, tuple(x.mask.shape), change)


def _marks(x: Tensor, valid: Tensor) -> bool | None:
    """Whether 1 marks the valid keys (True) or the padding (False) of some query, or None for other masks."""
    if x.dtype == torch.bool or not _is_binary(x):
        return None
    keys = (x != 0).flatten(1, -2).any(1) if x.dim() > 2 else x != 0
    if x.dim() == 3 and len(x) > len(valid) and len(x) % len(valid) == 0:  # batch and heads
        keys = keys.view(len(valid), -1, keys.shape[-1]).any(1)
    if keys.shape not in (valid.shape, (1, *valid.shape[1:]), valid.shape[1:]):
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
        if fault is None or (change := fault.change) is None or not _applies(name, fault):
            return fn(*args, **kwargs)
        if name == _FUNCTIONS[0]:
            given = arguments(args, kwargs)
            given["attn_mask"] = change(given["attn_mask"])
            return fn(**given)

        def is_mask(x: Any) -> bool:
            same = isinstance(x, Tensor) and tuple(x.shape) == fault.shape and not x.requires_grad
            return same and (x.dtype == torch.bool or _is_mask(x))

        changed = [change(x) if is_mask(x) else x for x in args]
        if name in _TIMES and any(map(is_mask, args)):  # Factors are added then: 0 or -inf.
            return changed[0] + changed[1]
        return fn(*changed, **{k: change(x) if is_mask(x) else x for k, x in kwargs.items()})


def _applies(function: str, fault: Fault) -> bool:
    """Whether a function of torch runs the operator that applies a mask, and not another one of its line."""
    operator = fault.operator.strip("_")
    return function in _OF_OPERATOR.get(operator, (operator,))


def _is_mask(x: Tensor) -> bool:
    """Whether numbers are a mask: 0 and 1, or 0 and large negative numbers."""
    return _is_binary(x) or bool(((x == 0) | (x <= highest_hiding(x))).all())
