"""Empty slots of a cache that a call can see."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, changed_tokens, noise, sdpa
from attnspan_lab.doctor.words import counted

__all__ = ["slot_findings"]

_FEWEST = 2  # A single key of zeros may be meant: add_zero_attn and softmax-off-by-one add it.


def slot_findings(step: Step, calls: list[Attention], done: set[Place]) -> Iterator[Finding]:
    """Yield calls that see keys of zeros, which no input of the batch changes, behind written keys.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
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
            masks = [x.mask[1] for x in calls if x.place == place and x.mask is not None]
            yield from _proven(step, at(place, *masks[:1]), empty & again, done)


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
    last = last & visible.any(1) & (~zeros).any(-1, keepdim=True)
    return last if int(last.sum(-1).max()) >= _FEWEST else None


def _zero_columns(call: Call) -> Tensor | None:
    scores = call.given["scores"]
    if scores.dim() != 4 or scores.shape[-1] <= scores.shape[-2]:
        return None
    found: Tensor = (scores == 0).all(-2).all(1)
    return found


def _proven(step: Step, places: tuple[Place, ...], empty: Tensor, done: set[Place]) -> Iterator[Finding]:
    """Yield a finding if other contents of the empty slots change the results of the model."""

    def again(*, fill: bool, hide: bool) -> Step:
        def change(call: Call) -> Tensor | None:
            slots = _empty(call) if call.place == places[0] else None
            return None if slots is None else _with(call, slots, fill=fill, hide=hide)

        return step.again(replace=change)

    changes = step.differs(again(fill=True, hide=False))
    if step.differs(step.again()) > 0 or changes == 0:
        return
    done.add(places[0])
    many, k_len = int(empty.sum(-1).max()), empty.shape[-1]
    evidence = (
        f"{counted(many, 'key')} of {k_len}, from key {k_len - many} on, are zeros and visible",
        f"other contents of these slots change the model's results by {changes:.1e} (relative)",
    )
    masked, tried = again(fill=False, hide=True), ""
    if masked.differs(again(fill=True, hide=True)) == 0:
        error = step.differs(masked)
        tried = f"if hidden, their contents change no result. Results differ from today's by {error:.1e}"
    call = next(x for x in step.calls if x.place == places[0] and _empty(x) is not None)
    what = f"This call sees {counted(many, 'empty slot')} of a cache"
    yield Finding("empty-slots", what, places, evidence, remedy=_remedy(call), tried=tried)


def _remedy(call: Call) -> str:
    shown = "torch.arange(k_len) < written"
    has_mask = call.given.get("attn_mask") is not None or call.given.get("is_causal")
    ours = "mask=... & " if has_mask else "mask="
    ours = f"pass {ours}keys({shown}) to attnspan.torch.attention (written: the number of written keys)"
    if not call.is_torchs:
        theirs = "Hide them: scores.masked_fill(torch.arange(k_len) >= written, float('-inf'))"
    elif has_mask:
        theirs = f"Hide them in a mask too: attn_mask=mask & ({shown})"
    else:
        theirs = f"Pass attn_mask=({shown})[None, None, None]"
    return f"{theirs}. Or: {ours}"


def _with(call: Call, slots: Tensor, *, fill: bool, hide: bool) -> Tensor:
    """Compute a call with filled or hidden slots."""
    if not call.is_torchs:
        scores, dim = call.given["scores"], call.given["dim"]
        other = torch.full_like(scores, -torch.inf) if hide else noise(scores)
        return torch.where(slots[:, None, None], other, scores).softmax(dim)
    given = {**call.given, "dropout_p": 0.0}
    for name in ("key", "value") if fill else ():
        given[name] = torch.where(slots[:, None, :, None], noise(given[name]), given[name])
    if not hide:
        return sdpa(**given)
    q_len, k_len = given["query"].shape[-2], given["key"].shape[-2]
    shown = (~slots)[:, None, None].expand(-1, 1, q_len, k_len)
    if given.pop("is_causal", False):
        shown = shown.tril()
    mask = given.get("attn_mask")
    if mask is not None:
        shown = shown & mask if mask.dtype == torch.bool else torch.where(shown, mask, -torch.inf).to(mask)
    return sdpa(**{**given, "attn_mask": shown})
