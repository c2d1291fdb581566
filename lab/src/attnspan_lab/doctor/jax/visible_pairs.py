"""Findings on pairs of tokens that are visible and must not be: other documents, padding, later tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.mask_forms import form_of
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention

__all__ = ["Rule", "rules", "seen"]

_UNPROVEN = "not confirmed by changing tokens: the step returns no results (B, S, ...)"


@dataclass(frozen=True)
class Rule:
    """Pairs that must not be visible.

    Attributes:
        kind, what: Of the finding.
        foreign: The pairs (B, S, S).
        groups: Group of each token, (B, S). Changing the tokens of a group must not change results of others.
        only: The group that is changed, or None for every group.
        names: Arguments that a mask must be made from.
    """

    kind: str
    what: str
    foreign: np.ndarray
    groups: np.ndarray
    only: int | None
    names: frozenset[str] = frozenset()

    @property
    def topic(self) -> str:
        """The check that the rule belongs to."""
        return {"leak": "documents", "mask-lost": "padding"}.get(self.kind, "causality")


def rules(trial: Trial) -> Iterator[Rule]:
    """Yield the pairs that must not be visible in a batch."""
    subject, batch, size = trial.subject, trial.batch, trial.size
    documents, valid = subject.document_ids(batch), subject.valid(batch)
    if documents is not None and documents.shape[-1] == size[1]:
        documents = np.broadcast_to(documents, size)
        pairs = documents[:, :, None] != documents[:, None, :]
        names = frozenset(subject.document_names(batch))
        yield Rule("leak", "Packed documents see each other here", pairs, documents, None, names)
    if valid is not None:
        pairs, names = valid[:, :, None] & ~valid[:, None, :], frozenset(subject.padding_names(batch))
        yield Rule("mask-lost", "Valid tokens see padding here", pairs, (~valid).astype(int), 1, names)
    if subject.causal and not subject.has_several_sequences(batch):
        index = np.arange(size[1])
        later = np.broadcast_to(index[:, None] < index, (*size, size[1]))
        last = np.broadcast_to((index == size[1] - 1).astype(int), size)
        what = "Tokens see later ones here, in a model that predicts the next token"
        yield Rule("causality-lost", what, later, last, 1)


def seen(trial: Trial, coverage: Coverage) -> Iterator[Finding]:
    """Yield pairs that must not be visible and are, if changed tokens confirm it."""
    for rule in rules(trial):
        yield from _found(trial, rule, coverage)


def _cover(trial: Trial, rule: Rule, changed: str | None, coverage: Coverage) -> None:
    """Note what the trial gave."""
    if changed is not None:
        coverage.made(rule.topic, changed or "changed tokens change no result of others")
    elif trial.calls and all(_fits(x, rule.foreign) for x in trial.calls):
        coverage.made(rule.topic, f"read from the masks, {_UNPROVEN}")
    else:
        coverage.missed(rule.topic, _UNPROVEN)


def _found(trial: Trial, rule: Rule, coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding for each line with visible foreign pairs, if changed tokens change foreign results."""
    pairs = {id(x): _count(x, rule.foreign) for x in trial.calls}
    guilty = [x for x in trial.calls if pairs[id(x)]]
    changed = trial.changed(rule.groups, rule.only)
    _cover(trial, rule, changed, coverage)
    if changed == "":
        return
    for call in {x.places[:1]: x for x in guilty}.values():
        most = f"{max(pairs.values())} visible pairs of tokens that must not see each other"
        places = (*call.places[:2], *(x for y in call.pairs for x in y.places[:1]))
        cause, remedy = _why(trial, rule, call)
        more = {"cause": cause, "remedy": remedy} | ({} if changed else {"severity": "note"})
        told = (most, changed or _UNPROVEN)
        yield finding(rule.kind, rule.what, places, evidence=told, call=call, **more)
    if guilty or changed is None:
        return
    what, why = rule.what.replace(" here", ""), trial.decides(rule.groups, rule.only)
    evidence, more = (changed, *([why] if why else [])), {"severity": "note"} if why else {}
    unread = [x for x in trial.calls if x.visible is None and trial.size[1] in np.shape(x.operands[0].array)]
    if unread:
        cause = "The doctor cannot read which pairs this call sees, but tokens reach each other through it"
        cause += " or through code around it"
        call = unread[0]
        yield finding(rule.kind, what, call.places[:1], evidence=evidence, cause=cause, call=call, **more)
    else:
        cause, remedy = "Another part of the model mixes tokens", _ELSEWHERE
        more |= {"cause": cause, "remedy": remedy}
        yield finding(rule.kind, f"{what}, outside of attention", (), evidence=evidence, **more)


_ELSEWHERE = "Look for operators along the sequence: convolutions, norms or sums over tokens, shifted arrays"


def _count(call: Attention, foreign: np.ndarray) -> int:
    """Count visible foreign pairs. Attention may leave out the last token, as in tokens[:, :-1]."""
    if call.visible is None or not _fits(call, foreign):
        return 0
    length = call.visible.shape[1]
    return int((call.visible & foreign[:, :length, :length]).sum())


def _fits(call: Attention, foreign: np.ndarray) -> bool:
    """Whether the queries and keys of a call are the tokens of a rule."""
    if call.visible is None or call.visible.shape[1] != call.visible.shape[2]:
        return False
    fits = foreign.shape[1] - 1 <= call.visible.shape[1] <= foreign.shape[1]
    return fits and len(call.visible) in (1, len(foreign))


def _why(trial: Trial, rule: Rule, call: Attention) -> tuple[str, str]:
    """Say why a call shows foreign pairs, and what to do. "" stands for the text of the kind."""
    shown = np.asarray(call.visible)
    length = shown.shape[1]
    foreign = rule.foreign[:, :length, :length]
    visible = np.broadcast_to(shown, foreign.shape)
    form = ""
    if rule.kind == "mask-lost":  # Queries of padding may see anything.
        form = form_of(trial.subject, trial.batch, visible & (rule.groups[:, None, :length] == 0))
    form = form or form_of(trial.subject, trial.batch, visible & ~foreign)
    remedy = f"Call attnspan.jax.attention with mask={form}" if form else ""
    if rule.kind == "causality-lost":
        index = np.arange(length)
        most, last = (
            int((index - index[:, None])[visible.any(0)].max()),
            int(index[visible.any((0, 1))].max()),
        )
        return f"The mask shows up to {most} later tokens" if most < last else "", remedy
    masks = [x for x, _ in call.masks if rule.names & x.arguments()]
    if not masks:
        return "", remedy
    name = ", ".join(sorted(rule.names & masks[0].arguments()))
    said = f"A mask made from {name} reaches this call, and still shows these pairs"
    if rule.kind == "mask-lost":
        padding = rule.groups[:, None, :length] == 1
        array = np.asarray(masks[0].array)
        is_mask = "mask" in name  # Lengths become a mask in the step.
        if is_mask and any(
            x is masks[0] and of_queries and not of_keys for x, of_queries, of_keys in call.varies
        ):
            said = f"The mask made from {name} hides queries instead of keys: it differs between queries only"
            remedy = f"Put the mask on the axis of the keys: mask=({name} != 0)[:, None, None, :]"
            remedy = remedy.replace("!=", "==") if "padding" in name else remedy
        elif not (visible & ~padding).any():
            said, remedy = (
                f"The mask made from {name} is inverted: only padding is visible",
                remedy or _INVERTED,
            )
        elif array.dtype != bool and np.isin(array, (0, 1)).all():
            said = (
                f"The 0 and 1 of {name} are added to the scores or multiplied with them, which hides nothing"
            )
            remedy = _AS_BOOLEAN
    elif call.by_head and np.ndim(masks[0].array) > 2:
        said += _BY_HEAD
        remedy = remedy or "Pass a mask (B, 1, Sq, Sk), for example mask[:, None]"
    return said, remedy


_BY_HEAD = (
    ". Heads see different pairs: jax.nn.dot_product_attention takes the first axis of a mask with 3 axes as "
    "heads"
)
_INVERTED = "Invert the mask: in JAX and in attnspan, True shows a key"
_AS_BOOLEAN = """\
Pass it as a boolean mask: mask=valid[:, None, None, :] with jax.nn.dot_product_attention, or keys(valid) \
with attnspan. Or add jnp.where(valid, 0, -jnp.inf)[:, None, None, :] to the scores"""
