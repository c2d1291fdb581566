"""Findings on pairs of tokens that an attention call shows or hides, proven by changing tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.isolation.declared import paddings
from attnspan_lab.doctor.torch.isolation.padding_causes import SEEN, fault_of
from attnspan_lab.doctor.torch.isolation.sequences import of_predicted, sequences
from attnspan_lab.doctor.torch.isolation.visible_pairs import Foreign, Visible
from attnspan_lab.doctor.torch.masks.forms import arguments, distance, present
from attnspan_lab.doctor.torch.masks.replacement import aligned, ends_with_own
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, first_line

__all__ = ["findings_of_pairs"]

_DECLARE = "Return them in the factory's third value"


def findings_of_pairs(
    calls: list[Attention], subject: Subject, batch: Any, coverage: Coverage
) -> Iterator[Finding]:
    """Yield pairs that must not be visible and are: other documents, padding and later tokens."""
    tokens = subject.tokens(batch)
    if not calls:
        coverage.absent("attention", "no attention call was seen, so no mask was examined")
    else:
        first = sum(not x.recomputed for x in calls)
        coverage.made("attention", f"{counted(first, 'call')} a step")
    if tokens is None:
        have = "the batch has no tensor of tokens"
        why = f"{have}: integers (B, S), or numbers (B, S, D)"
        for topic in ("documents", "causality"):
            coverage.missed(topic, why)
        coverage.missed("padding", _unfit(subject, batch, have, why))
        return
    see = Visible(calls, subject, batch, coverage)
    said = see.said
    for reason in said.unread:
        coverage.missed("batch", reason)
    if said.documents is not None and said.apart is not None:
        coverage.made("documents", f"read from {said.source}")
        what = "Packed documents see each other here"
        yield from see.proven(Foreign("leak", what, said.apart, said.documents))
    else:
        coverage.absent("documents", f"no batch has several documents that the doctor knows. {_DECLARE}")
    for x in see.calls if said.mask is not None else ():
        x.padding = fault_of(x, see.own[x], said)
    if said.valid is not None:
        hidden = said.valid[:, :, None] & ~said.valid[:, None, :]
        coverage.made("padding", f"read from {said.padding}")
        yield from see.proven(Foreign("mask-lost", SEEN, hidden, (~said.valid).long(), 1))
    else:
        have = f"{see.name} has the shape {(see.rows, see.length)} of tokens"
        why = _unfit(subject, batch, have, "no batch has padding that the doctor knows")
        coverage.absent("padding", why)
    yield from _causality(see)
    yield from _alignments(see)


def _unfit(subject: Subject, batch: Any, have: str, why: str) -> str:
    """Write why no padding was examined: a mask marks padding of unknown tokens, or another reason."""
    named = subject.named(batch)
    known = {tuple(named[x].shape[:2]) for x in sequences(subject, batch)}
    for name, valid in paddings(named):
        if (shape := tuple(valid.shape)) not in known and not bool(valid.all()):
            marks = f"{name} of shape {shape} marks padding, and {have}"
            return f"{marks}, so the doctor does not know what it hides"
    return why


def _causality(see: Visible) -> Iterator[Finding]:
    subject, coverage, later = see.subject, see.coverage, see.later.pairs
    shown = next((x for x in see.calls if bool((see.own[x] & later[: len(see.own[x])]).any())), None)
    if subject.is_causal or see.said.later is False:
        coverage.made("causality", "declared" if subject.is_causal else "read from a mask of the batch")
        yield from _later_seen(see)
    elif subject.expected.get("causal") is False:
        coverage.made("causality", "declared as not causal")
    elif shown is not None:
        why = f"not declared, and tokens see later tokens at {shown.place}"
        remedy = 'return {"causal": True} as the factory\'s third value'
        coverage.missed("causality", f"{why}. If the model predicts the next token, {remedy}")
    elif see.calls:
        coverage.made("causality", "not declared, but no call shows later tokens")


def _later_seen(see: Visible) -> Iterator[Finding]:
    """Yield a finding if a change of the last predicted token changes earlier results."""
    names, broken, reasons = of_predicted(see.names), list[Visible](), list[str]()
    if len(names) == 1:
        view = see if names == [see.name] else see.of(names[0])
        yield from view.proven(view.later)
        return
    for view in map(see.of, reversed(names)):
        # A sequence may be the encoder's. Its last token changes all results of a right model.
        made = view.made or f"no attention call has keys of {view.name}"
        if isinstance(made, str):
            reasons.append(made)
            continue
        try:
            changed = view.changed(view.later)
        except Exception as error:
            reasons.append(first_line(error))
            continue
        if changed is None:
            return
        broken.append(view)
    if broken:
        yield from broken[0].proven(broken[0].later)
    else:
        why = f"the doctor does not know which of {' and '.join(names)} the model predicts"
        see.coverage.missed("causality", f"{why}: {reasons[0]}")


def _alignments(see: Visible) -> Iterator[Finding]:
    """Yield causal masks that count queries from the first key, where the queries are the last tokens."""
    what = "The causal mask counts from the first key here, but the queries are later tokens"
    length = see.length
    for x in see.calls:
        if not x.first_own or x.visible is None:
            continue
        k_len = x.visible.shape[2]
        first = torch.ones(length, k_len, dtype=torch.bool).tril()
        if not bool((x.visible == first).all()):
            continue
        right = torch.ones_like(first).tril(x.first_own)
        evidence = [f"the batch's own keys are {x.first_own} to {x.first_own + length - 1} of {k_len}"]
        tried = ""
        if x.given is not None:
            now = present(x)
            args = arguments(*x.given)
            kept = {k: args[k] for k in ("query", "key", "value", "scale", "enable_gqa") if k in args}
            then = F.scaled_dot_product_attention(**kept, attn_mask=right)
            tried = f"results of this call change by {distance(now, then):.1e} (relative)"
            evidence.append("no query sees its own key")
        remedy = aligned(ends_with_own(x, length))
        yield Finding("causal-alignment", what, at(x.place), tuple(evidence), remedy=remedy, tried=tried)
