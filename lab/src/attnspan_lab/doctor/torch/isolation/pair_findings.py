"""Findings on pairs of tokens that an attention call shows or hides, proven by changing tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.decoding.new_keys import own_pairs
from attnspan_lab.doctor.torch.isolation.declared import Declared, paddings
from attnspan_lab.doctor.torch.isolation.padding_causes import fault_of
from attnspan_lab.doctor.torch.isolation.sequences import of_predicted, sequences
from attnspan_lab.doctor.torch.isolation.visible_pairs import Visible
from attnspan_lab.doctor.torch.masks.forms import distance, present
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
        why = "the batch has no tensor of tokens: integers (B, S), or numbers (B, S, D)"
        for topic in ("documents", "causality"):
            coverage.missed(topic, why)
        coverage.missed("padding", _unfit(subject, batch, "", (0, 0)) if _masks(subject, batch) else why)
        return
    rows, length = tokens[1].shape[:2]
    said, own = subject.declared(batch), own_pairs(calls, subject, batch, length, coverage)
    see = Visible(calls, own, subject, batch, tokens[0], coverage)
    for reason in said.unread:
        coverage.missed("batch", reason)
    if said.documents is not None:
        foreign = said.documents[:, :, None] != said.documents[:, None, :]
        foreign &= (said.documents >= 0)[:, :, None]
        coverage.made("documents", f"read from {said.source}")
        yield from see.proven("leak", "Packed documents see each other here", foreign, said.documents, None)
    else:
        coverage.absent("documents", f"no batch has several documents that the doctor knows. {_DECLARE}")
    for x in see.calls if said.mask is not None else ():
        x.padding = fault_of(x, own[id(x)], said)
    if said.valid is not None:
        hidden = said.valid[:, :, None] & ~said.valid[:, None, :]
        coverage.made("padding", f"read from {said.padding}")
        yield from see.proven("mask-lost", "Valid tokens see padding here", hidden, (~said.valid).long(), 1)
    else:
        coverage.absent("padding", _unfit(subject, batch, tokens[0], (rows, length)))
    yield from _causality(see, said, rows, length)
    yield from _alignments(see, length)


def _masks(subject: Subject, batch: Any) -> dict[str, tuple[int, int]]:
    """Find the masks (B, S) of a batch that mark padding of no known sequence, with their shapes."""
    named, found = subject.named(batch), dict[str, tuple[int, int]]()
    known = {tuple(named[x].shape[:2]) for x in sequences(subject, batch)}
    for name, x in named.items():
        if x.dim() != 2 or tuple(x.shape) in known:
            continue
        shape = x.shape[0], x.shape[1]
        if any(not bool(valid.all()) for _, valid in paddings({name: x}, shape)):
            found[name] = shape
    return found


def _unfit(subject: Subject, batch: Any, tokens: str, shape: tuple[int, int]) -> str:
    """Write why no padding was examined: there is none, or a mask has another shape than the tokens."""
    masks = _masks(subject, batch)
    if not masks:
        return "no batch has padding that the doctor knows"
    name, other = next(iter(masks.items()))
    have = f"{tokens} has the shape {shape} of tokens" if tokens else "the batch has no tensor of tokens"
    return f"{name} of shape {other} marks padding, and {have}, so the doctor does not know what it hides"


def _causality(see: Visible, said: Declared, rows: int, length: int) -> Iterator[Finding]:
    index, coverage = torch.arange(length), see.coverage
    later = (index[:, None] < index)[None].expand(rows, -1, -1)
    if see.subject.is_causal or said.later is False:
        coverage.made("causality", "declared" if see.subject.is_causal else "read from a mask of the batch")
        yield from _later_seen(see)
        return
    shown = next((x for x in see.calls if bool((see.own[id(x)] & later[: len(see.own[id(x)])]).any())), None)
    if see.subject.expected.get("causal") is False:
        coverage.made("causality", "declared as not causal")
    elif shown is not None:
        coverage.missed(
            "causality",
            f"not declared, and tokens see later tokens at {shown.place}. "
            'If the model predicts the next token, return {"causal": True} as the factory\'s third value',
        )
    elif see.calls:
        coverage.made("causality", "not declared, but no call shows later tokens")


def _later_seen(see: Visible) -> Iterator[Finding]:
    """Yield a finding if a change of the last predicted token changes earlier results."""
    what = "Tokens see later ones here, in a model that predicts the next token"
    names, broken, reasons = of_predicted(see.names), list[Visible](), list[str]()
    views = [see] if names == [see.name] else [see.of(name) for name in reversed(names)]
    for view in views if len(views) > 1 else ():
        # A sequence may be the encoder's. Its last token changes all results of a right model.
        made = view.made or f"no attention call has keys of {view.name}"
        if isinstance(made, str):
            reasons.append(made)
            continue
        try:
            changed = view.changed(view.last, 1)
        except Exception as error:
            reasons.append(first_line(error))
            continue
        if changed is None:
            return
        broken.append(view)
    views = broken or views[: len(views) == 1]
    if not views:
        of = " and ".join(names)
        why = f"the doctor does not know which of {of} the model predicts"
        see.coverage.missed("causality", f"{why}: {reasons[0]}")
    for view in views[:1]:
        later = torch.ones(view.last.shape[1], view.last.shape[1], dtype=torch.bool).triu(1)
        foreign = later.expand(len(view.last), -1, -1)
        yield from view.proven("causality-lost", what, foreign, view.last, 1)


def _alignments(see: Visible, length: int) -> Iterator[Finding]:
    """Yield causal masks that count queries from the first key, where the queries are the last tokens."""
    for x in see.calls:
        if not x.first_own or x.visible is None:
            continue
        k_len = x.visible.shape[2]
        first = torch.ones(length, k_len, dtype=torch.bool).tril()
        if not bool((x.visible == first).all()):
            continue
        right = first.tril().new_ones(length, k_len).tril(x.first_own)
        evidence = [f"the batch's own keys are {x.first_own} to {x.first_own + length - 1} of {k_len}"]
        tried = ""
        if x.given:
            then = present(x, attn_mask=right, is_causal=False)
            tried = f"results of this call change by {distance(present(x), then):.1e} (relative)"
            evidence.append("no query sees its own key")
        yield Finding(
            "causal-alignment",
            "The causal mask counts from the first key here, but the queries are later tokens",
            at(x.place),
            tuple(evidence),
            remedy=aligned(ends_with_own(x, length)),
            tried=tried,
        )
