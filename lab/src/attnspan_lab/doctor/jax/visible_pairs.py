"""Findings on pairs of tokens that are visible and must not be: other documents, padding, later tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.mask_forms import form_of, masks_of, only
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.visible_padding import padding_of_tokens
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.names import shown_code
from attnspan_lab.doctor.pairs import MIXED, OUTSIDE, SEEN, TOPICS, unproven, visible
from attnspan_lab.doctor.words import counted

__all__ = ["Rule", "inverted", "rules", "seen"]

_UNPROVEN = unproven("the step returns no results (B, S, ...)")


@dataclass(frozen=True)
class Rule:
    """Pairs that must not be visible.

    Attributes:
        kind: Kind of the finding.
        foreign: The pairs (B, S, S).
        groups: Group of each token, (B, S). Changing the tokens of a group must not change results of others.
        only: The group that is changed, or None for every group.
        names: Arguments that a mask must be made from.
    """

    kind: str
    foreign: np.ndarray
    groups: np.ndarray
    only: int | None
    names: frozenset[str] = frozenset()


def rules(trial: Trial) -> Iterator[Rule]:
    """Yield the pairs that must not be visible in a batch."""
    subject, batch, size = trial.subject, trial.batch, trial.size
    documents, valid = subject.document_ids(batch), subject.valid(batch)
    if documents is not None and documents.shape[-1] == size[1]:
        documents = np.broadcast_to(documents, size)
        pairs = documents[:, :, None] != documents[:, None, :]
        names = frozenset(subject.document_names(batch))
        yield Rule("leak", pairs, documents, None, names)
    if valid is not None:
        pairs, names = valid[:, :, None] & ~valid[:, None, :], frozenset(subject.padding_names(batch))
        yield Rule("mask-lost", pairs, (~valid).astype(int), 1, names)
    if subject.causal and not subject.has_several_sequences(batch):
        index = np.arange(size[1])
        later = np.broadcast_to(index[:, None] < index, (*size, size[1]))
        last = np.broadcast_to((index == size[1] - 1).astype(int), size)
        yield Rule("causality-lost", later, last, 1)


def seen(trial: Trial, coverage: Coverage) -> Iterator[Finding]:
    """Yield pairs that must not be visible and are, if changed tokens confirm it."""
    told = set[Any]()
    for rule in rules(trial):
        yield from _found(trial, rule, coverage, told)


def _cover(trial: Trial, rule: Rule, changed: str | None, coverage: Coverage) -> None:
    """Note what the trial gave."""
    length, topic = trial.size[1], TOPICS[rule.kind]
    # Padding that the batch does not state.
    found = 0 if trial.subject.stated(trial.batch, length) is not None else int(trial.padding(length).sum())
    left = f". {counted(found, 'token')} without a key count as padding" if found else ""
    if changed == "" and found == rule.groups.size:
        coverage.missed(topic, "no token sees a key")
    elif changed is not None:
        coverage.made(topic, changed or f"changed tokens change no result of others{left}")
    elif trial.calls and all(_fits(x, rule.foreign) for x in trial.calls):
        coverage.made(topic, f"read from the masks, {_UNPROVEN}")
    else:
        coverage.missed(topic, _UNPROVEN)


def _found(trial: Trial, rule: Rule, coverage: Coverage, told: set[Any]) -> Iterator[Finding]:
    """Yield a finding for each line with visible foreign pairs, if changed tokens change foreign results.

    ``told`` has the lines with a finding that explains all their pairs.
    """
    pairs = [_count(x, rule.foreign) for x in trial.calls]
    means = [_means(x, rule) for x in trial.calls]
    guilty = [x for x, n, m in zip(trial.calls, pairs, means, strict=True) if n or m]
    changed = trial.changed(rule.groups, rule.only)
    if rule.kind == "mask-lost" and not changed:
        compared = yield from padding_of_tokens(trial, coverage)
        changed = "" if compared else changed
    _cover(trial, rule, changed, coverage)
    if changed == "":
        return
    for call in {x.places[:1]: x for x in guilty if x.places[:1] not in told}.values():
        site = [x for x in trial.calls if x.places[:1] == call.places[:1]]
        said = visible(max(pairs)) if any(pairs) else _MEANS.format(max(means))
        evidence, severity = (said, changed or _UNPROVEN), "" if changed else "note"
        case, more = _told(trial, rule, call, site)
        more |= {"call": call, "severity": severity}
        told |= {call.places[:1]} if more.get("cause") == _INVERTED else set()
        yield finding(f"{rule.kind}{case}", SEEN[rule.kind], call.with_masks, *evidence, **more)
    if guilty or changed is None or _is_explained(trial, rule):
        return
    what, why = SEEN[rule.kind].replace(" here", ""), trial.decides(rule.groups, rule.only)
    more = {"severity": "note" if why else ""}
    unread = [x for x in trial.calls if x.visible is None and trial.size[1] in np.shape(x.operands[0].array)]
    for call in unread[:1]:
        yield finding(rule.kind, what, call.places[:1], changed, why, cause=_UNREAD, call=call, **more)
    if not unread:
        more |= {"cause": MIXED, "remedy": OUTSIDE[rule.kind]}
        yield finding(rule.kind, f"{what}, outside of attention", (), changed, why, **more)


_UNREAD = """\
The doctor cannot read which pairs this call sees, but tokens reach each other through it or through code \
around it"""
_INVERTED = "The mask is inverted: valid queries see exactly the pairs that it must hide"
_INVERT = "Invert the mask: in JAX and in attnspan, True shows a key"
_MEANS = "{} valid queries see no key, and return the mean of all values"


def _is_explained(trial: Trial, rule: Rule) -> bool:
    """Whether nothing changes if calls with a softmax over another axis, and queries without a key, return 0.

    Both have a finding of their own.
    """
    emptied = dict[int, np.ndarray]()
    for number, call in enumerate(trial.calls):
        if call.hidden is None or call.out is None or call.hidden.shape != call.out.nan.shape:
            continue
        padding = trial.padding(call.hidden.shape[1])
        lost = call.hidden & ~(padding if len(call.hidden) > 1 else padding.all(0))
        rows = np.ones_like(lost) if call.uneven else lost & (call.padding is not None)
        emptied |= {number: rows} if rows.any() else {}
    return bool(emptied) and replace(trial, emptied=emptied).changed(rule.groups, rule.only) == ""


def _count(call: Attention, foreign: np.ndarray) -> int:
    """Count visible foreign pairs. Attention may leave out the last token, as in tokens[:, :-1]."""
    if call.visible is None or not _fits(call, foreign):
        return 0
    length = call.visible.shape[1]
    return int((call.visible & foreign[:, :length, :length]).sum())


def _means(call: Attention, rule: Rule) -> int:
    """Count valid queries that return the mean of all values, because the mask shows only padding."""
    if call.hidden is None or call.out is None or not _shows_only_padding(call, rule):
        return 0
    return int((call.hidden & call.out.even & (rule.groups == 0)[:, : call.hidden.shape[1]]).sum())


def inverted(trial: Trial, call: Attention) -> bool:
    """Whether the mask of a call is inverted."""
    return any(_shows_only_padding(call, x) for x in rules(trial)) or _shows_the_complement(trial, call)


def _shows_the_complement(trial: Trial, call: Attention) -> bool:
    """Whether valid queries see the pairs that they must not see, and no other pairs."""
    if call.visible is None or (found := _allowed(trial, call)) is None:
        return False
    allowed, valid = found
    return bool((call.visible != allowed)[valid].all() and (~allowed[valid]).any())


def _allowed(trial: Trial, call: Attention) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the pairs that may be visible, (B, Sq, Sk), and the valid queries, if keys are tokens."""
    given = [x.foreign for x in rules(trial)]
    if call.visible is None or not given or not all(_fits(call, x) for x in given):
        return None
    length, valid = call.visible.shape[1], trial.subject.valid(trial.batch)
    valid = np.ones(trial.size, bool) if valid is None else valid
    allowed = ~np.any(given, 0) & valid[:, None, :]
    return allowed[:, :length, :length], valid[:, :length]


def _shows_only_padding(call: Attention, rule: Rule) -> bool:
    """Whether a mask made from the padding mask is inverted."""
    if call.visible is None or rule.kind != "mask-lost" or not _fits(call, rule.foreign):
        return False
    made = any(rule.names & x.arguments() for x, _ in call.masks)
    valid = (rule.groups == 0)[:, None, : call.visible.shape[1]]
    return made and bool(call.visible.any()) and not (call.visible & valid).any()


def _fits(call: Attention, foreign: np.ndarray) -> bool:
    """Whether the queries and keys of a call are the tokens of a rule."""
    if call.visible is None or call.visible.shape[1] != call.visible.shape[2]:
        return False
    fits = foreign.shape[1] - 1 <= call.visible.shape[1] <= foreign.shape[1]
    return fits and len(call.visible) in (1, len(foreign))


def _form(trial: Trial, rule: Rule, call: Attention) -> str:
    """Write the mask that a call needs: the pairs that it shows, without foreign pairs."""
    if call.visible is None:
        return ""
    wanted = [call.visible]
    if _fits(call, rule.foreign):
        length = call.visible.shape[1]
        wanted = [call.visible & ~rule.foreign[:, :length, :length]]
        if rule.kind == "mask-lost":  # Queries of padding may see anything.
            wanted = [call.visible & (rule.groups[:, None, :length] == 0), *wanted]
    return next(filter(None, (form_of(trial.subject, trial.batch, x) for x in wanted)), "")


def _told(trial: Trial, rule: Rule, call: Attention, site: list[Attention]) -> tuple[str, dict[str, Any]]:
    """Say why a call shows foreign pairs: the case of the kind, and its texts.

    ``site`` are all calls of its line.
    """
    if _shows_the_complement(trial, call) and not _shows_only_padding(call, rule):
        return "", {"cause": _INVERTED, "remedy": _INVERT}
    case, values, remedy = _why(trial, rule, call, site)
    allowed, valid = _allowed(trial, call) or (np.zeros((1, 1, 1), bool), np.zeros((1, 1), bool))
    lost = int((allowed.any(-1) & ~(allowed & np.asarray(call.visible)).any(-1) & valid).sum())
    if lost and case in ("", ".shown"):
        form = form_of(trial.subject, trial.batch, allowed)
        remedy = f"Call attnspan.jax.attention with mask={form}" if form else "Make another mask"
        same = [
            x for x in site if x.visible is not None and np.array_equal(x.visible, np.asarray(call.visible))
        ]
        remedy = only(site, same) + remedy
        remedy += f". If your mask also hid these pairs, {lost} valid queries would see no key"
    return case, {"values": values, "remedy": remedy}


def _why(trial: Trial, rule: Rule, call: Attention, site: list[Attention]) -> tuple[str, dict[str, Any], str]:
    """Say why a call shows foreign pairs. ``site`` are all calls of its line.

    Returns:
        The case of the kind, its values, and the remedy. "" stands for the remedy of the case.
    """
    shown = np.asarray(call.visible)
    length = shown.shape[1]
    foreign = rule.foreign[:, :length, :length]
    visible = np.broadcast_to(shown, foreign.shape)
    said = "Call attnspan.jax.attention"
    remedy = masks_of(site, [_form(trial, rule, x) for x in site], f"{said} with mask={{}}", said)
    if rule.kind == "causality-lost":
        index = np.arange(length)
        most = int((index - index[:, None])[visible.any(0)].max())
        is_last = most >= index[visible.any((0, 1))].max()
        return ("" if is_last else ".shown"), {"most": most}, remedy
    masks = [x for x, _ in call.masks if rule.names & x.arguments()]
    if not masks:
        return "", {}, remedy
    mask, name = np.asarray(masks[0].array), ", ".join(sorted(rule.names & masks[0].arguments()))
    values = {"name": name, "shown": shown_code(name)}
    if rule.kind == "leak":
        by_head = call.by_head and mask.ndim > 2
        return (".by-head" if by_head else ".shown"), values, remedy
    # Lengths become a mask in the step.
    if "mask" in name and (masks[0], True, False) in call.varies:
        return ".of-queries", values, ""
    if _shows_only_padding(call, rule):
        return ".inverted", values, remedy
    if mask.dtype != bool and np.isin(mask, (0, 1)).all():
        return ".numbers", values, ""
    return ".shown", values, remedy
