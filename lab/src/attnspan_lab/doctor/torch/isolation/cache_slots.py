"""Empty slots of a cache that a call can see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, noise
from attnspan_lab.doctor.torch.recording.changes import hiding, with_other_tokens
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
    guilty = {x: empty for x in step.calls if (empty := _empty(x)) is not None and x.place not in done}
    if not guilty:
        return
    subject, batch = step.subject, step.batch
    for name, x in subject.named(batch).items():
        if x.is_floating_point() or (x.dim() == 2 and x.dtype != torch.bool and "mask" not in name):
            batch = with_other_tokens(subject, batch, name)
    try:
        other = step.again(batch)
    except CannotRun:  # Positions of the batch may not be changed.
        tokens = subject.tokens(step.batch)
        if tokens is None:
            return
        other = step.again(with_other_tokens(subject, step.batch, tokens[0]))
    for call, empty in guilty.items():
        again = _empty(other.calls[call.number]) if call.number < len(other.calls) else None
        if again is None or again.shape != empty.shape or call.place is None or call.place in done:
            continue
        if int((empty & again).sum(-1).max()) >= _FEWEST:
            masks = [x.mask[1] for x in calls if x.place == call.place and x.mask is not None]
            yield from _proven(step, call, at(call.place, *masks[:1]), empty & again, done)


def _empty(call: Call) -> Tensor | None:
    """Find the keys of zeros at the end, bool (B, Sk), if a query sees them. The queries are not zeros."""
    if call.rows.dim() != 4 or call.k_len <= call.rows.shape[-2] or (visible := visible_in(call)) is None:
        return None
    if not call.is_torchs:
        zeros = (call.rows == 0).all(-2).all(1)
    else:
        q, k, v = (call.given[x] for x in call.operands)
        if bool((q == 0).all(-1).all(1).any()):
            return None
        zeros = (k == 0).all(-1).all(1) & (v == 0).all(-1).all(1)
    # Only zeros behind the last key that is not zero.
    last: Tensor = zeros.flip(-1).long().cumprod(-1).bool().flip(-1)
    last = last & visible.any(1) & (~zeros).any(-1, keepdim=True)
    return last if int(last.sum(-1).max()) >= _FEWEST else None


def _proven(
    step: Step, call: Call, places: tuple[Place, ...], empty: Tensor, done: set[Place]
) -> Iterator[Finding]:
    """Yield a finding if other contents of the empty slots change the results of the model."""

    def again(*, fill: bool, hide: bool) -> Step:
        def change(other: Call) -> Tensor | None:
            slots = _empty(other) if other.place == call.place else None
            if slots is None:
                return None
            other = _filled(other, slots) if fill else other
            return (hiding(other, slots) if hide else other).result_of()

        return step.again(replace=change)

    changes = step.differs(again(fill=True, hide=False))
    if step.differs(step.again()) > 0 or changes == 0:
        return
    done.update(places[:1])
    many, k_len = int(empty.sum(-1).max()), empty.shape[-1]
    evidence = (
        f"{counted(many, 'key')} of {k_len}, from key {k_len - many} on, are zeros and visible",
        f"other contents of these slots change the model's results by {changes:.1e} (relative)",
    )
    masked, tried = again(fill=False, hide=True), ""
    if masked.differs(again(fill=True, hide=True)) == 0:
        error = step.differs(masked)
        tried = f"if hidden, their contents change no result. Results differ from today's by {error:.1e}"
    what = f"This call sees {counted(many, 'empty slot')} of a cache"
    yield Finding("empty-slots", what, places, evidence, remedy=_remedy(call), tried=tried)


def _filled(call: Call, slots: Tensor) -> Call:
    """Write noise to the slots of a call."""
    where = slots[:, None, :, None] if call.is_torchs else slots[:, None, None]
    written = call.operands[-2:]  # Keys and values, or scores.
    filled = {k: torch.where(where, noise(call.given[k]), call.given[k]) for k in written}
    return replace(call, given=call.given | filled)


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
