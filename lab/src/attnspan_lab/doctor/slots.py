"""Empty slots of a cache that a call can see."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnspan_lab.doctor.calls import Call, CannotRun, Step, changed_tokens, noise, sdpa
from attnspan_lab.doctor.cross import visible_in
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.words import counted

__all__ = ["slot_findings"]

_FEWEST = 2  # A single key of zeros may be meant: add_zero_attn and softmax-off-by-one add it.


def slot_findings(step: Step, done: set[Place]) -> Iterator[Finding]:
    """Yield calls that see keys of zeros, which no input of the batch changes, behind written keys.

    Args:
        step: The step.
        done: Lines that have a finding.
    """
    guilty = {x.number: empty for x in step.calls if (empty := _empty(x)) is not None and x.place not in done}
    if not guilty:
        return
    subject, batch = step.subject, step.batch
    for name, x in subject.named(batch).items():
        if x.is_floating_point() or (x.dim() == 2 and x.dtype != torch.bool and "mask" not in name):
            batch = subject.with_tokens(batch, name, changed_tokens(x))
    try:
        other = step.again(batch)
    except CannotRun:  # Positions of the batch may not be changed.
        tokens = subject.tokens(step.batch)
        if tokens is None:
            return
        other = step.again(subject.with_tokens(step.batch, tokens[0], changed_tokens(tokens[1])))
    for number, empty in guilty.items():
        again = _empty(other.calls[number]) if number < len(other.calls) else None
        place = step.calls[number].place
        if again is None or again.shape != empty.shape or place is None or place in done:
            continue
        if int((empty & again).sum(-1).max()) >= _FEWEST:
            yield from _proven(step, place, empty & again, done)


def _empty(call: Call) -> Tensor | None:
    """Find the keys of zeros at the end, bool (B, Sk), if a query sees them. The queries are not zeros."""
    if not call.is_torchs:
        zeros = _zero_columns(call)
    else:
        q, k, v = (call.given[x] for x in ("query", "key", "value"))
        if k.dim() != 4 or k.shape[-2] <= q.shape[-2] or bool((q == 0).all(-1).all(1).any()):
            return None
        zeros = (k == 0).all(-1).all(1) & (v == 0).all(-1).all(1)
    visible = visible_in(call)
    if zeros is None or visible is None:
        return None
    # Only zeros behind the last key that is not zero.
    last = zeros.flip(-1).long().cumprod(-1).bool().flip(-1)
    last &= visible.any(0)
    written = (~zeros).any(-1, keepdim=True)
    last &= written
    return last if int(last.sum(-1).max()) >= _FEWEST else None


def _zero_columns(call: Call) -> Tensor | None:
    scores = call.given["scores"]
    if scores.dim() != 4 or scores.shape[-1] <= scores.shape[-2]:
        return None
    return (scores == 0).all(-2).all(1)


def _proven(step: Step, place: Place, empty: Tensor, done: set[Place]) -> Iterator[Finding]:
    """Yield a finding if other contents of the empty slots change the results of the model."""

    def emptied(call: Call) -> Tensor | None:
        """Find the empty slots of a call of this line."""
        own = _empty(call) if call.place == place else None
        return own

    def filled(call: Call) -> Tensor | None:
        slots = emptied(call)
        return None if slots is None else _with(call, slots, hide=False)

    def hidden(call: Call) -> Tensor | None:
        slots = emptied(call)
        return None if slots is None else _with(call, slots, hide=True)

    changes = step.differs(step.again(replace=filled))
    if step.differs(step.again()) > 0 or changes == 0:
        return
    done.add(place)
    masked = step.again(replace=hidden)
    many, k_len = int(empty.sum(-1).max()), empty.shape[-1]
    call = next(x for x in step.calls if x.place == place and _empty(x) is not None)
    first = k_len - many
    evidence = (
        f"{counted(many, 'key')} of {k_len}, from key {first} on, are zeros and visible",
        f"other contents of these slots change the model's results by {changes:.1e} (relative)",
    )
    ours = "pass mask=keys(torch.arange(k_len) < length) to attnspan.torch.attention, with the number of written keys"
    if call.is_torchs:
        remedy = f"Pass attn_mask=(torch.arange(k_len) < length)[None, None, None], with the number of written keys. Or: {ours}"
    else:
        remedy = f"Hide them with scores.masked_fill(torch.arange(k_len) >= length, float('-inf')). Or: {ours}"
    tried = (
        f"with this mask, their contents change no result. Results change by {step.differs(masked):.1e} (relative)"
    )
    what = f"This call sees {counted(many, 'empty slot')} of a cache"
    yield Finding("empty-slots", what, at(place), evidence, remedy=remedy, tried=tried)


def _with(call: Call, slots: Tensor, *, hide: bool) -> Tensor:
    """Compute a call with hidden or filled slots."""
    if not call.is_torchs:
        scores, dim = call.given["scores"], call.given["dim"]
        other = torch.full_like(scores, -torch.inf) if hide else noise(scores)
        return torch.where(slots[:, None, None], other, scores).softmax(dim)
    given = {**call.given, "dropout_p": 0.0}
    if not hide:
        for name in ("key", "value"):
            given[name] = torch.where(slots[:, None, :, None], noise(given[name]), given[name])
        return sdpa(**given)
    q_len, k_len = given["query"].shape[-2], given["key"].shape[-2]
    shown = (~slots)[:, None, None].expand(-1, 1, q_len, k_len)
    mask = given.get("attn_mask")
    if given.pop("is_causal", False):
        shown = shown.tril()
    if mask is not None:
        shown = shown & mask if mask.dtype == torch.bool else torch.where(shown, mask, -torch.inf).to(mask)
    return sdpa(**{**given, "attn_mask": shown})
