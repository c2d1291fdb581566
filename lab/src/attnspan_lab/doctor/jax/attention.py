"""Findings on the attention calls of a watched step: costs, hidden keys, NaN and foreign tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.forms import form_of, instead_of
from attnspan_lab.doctor.jax.hlo import Program
from attnspan_lab.doctor.jax.said import finding
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced, floats
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.jax.watch import Attention, watched
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import counted

__all__ = ["changed_rows", "costs", "hidden", "nan_origin", "seen"]

_LONG = 32_768  # tokens, for which the memory of scores is predicted
_WITHIN = 1e-4  # relative change of a row of results that counts
_MOST_GROUPS = 8
_DTYPES = {
    "bool": "pred",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "s32",
    "int8": "s8",
}


def costs(calls: list[Attention], program: Program, subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield avoidable costs of the calls of each line. ``program`` is the compiled step."""
    sites: dict[tuple[Any, str], list[Attention]] = {}
    for call in calls:
        sites.setdefault((call.places[:1], call.kind), []).append(call)
    for site in sites.values():
        call, many = site[0], len(site)
        shape, size = call.scores
        if call.kind == "written out":
            pairs = prod(sorted(shape)[-2:])
            evidence = (
                f"{counted(many, 'call')}; scores of shape {shape} take {bytes_text(size)} each",
                f"{bytes_text(size // pairs * _LONG**2)} at {_LONG:,} tokens",
            )
            what = "The scores of all pairs of tokens are stored here"
            more = {"evidence": evidence, "remedy": instead_of(subject, batch, call), "count": many}
            yield finding("unfused", what, call.places[:2], **more)
        masks = [(x, y) for y in site for x in y.pairs]
        if masks and (said := _stored(masks[0][0], call.scores[0], program)):
            mask = masks[0][0]
            shape = np.shape(mask.array)
            what = f"An array with an entry for each pair of tokens, shape {shape}, {said}"
            long = bytes_text(mask.bytes // prod(sorted(shape)[-2:]) * _LONG**2)
            text = (
                f"{bytes_text(mask.bytes)}; {long} at {_LONG:,} tokens; used by {counted(len(masks), 'call')}"
            )
            places = (*mask.places[:1], *call.places[:2])
            yield finding("dense-mask", what, places, evidence=(text,), count=many)
        copies = [x for y in site for z in y.operands if (x := z.repeated()) is not None]
        if copies:
            yield _copied(copies, call, program)
        wide = [x for y in site for x in y.operands if x.upcast is not None]
        if wide:
            what = f"Attention runs in {wide[0].array.dtype}, wider than the arrays it gets"
            text = f"{bytes_text(sum(x.bytes for x in wide))} in {len(wide)} operands per step"
            at = (wide[0].upcast, *call.places[:1])
            yield finding("upcast", what, at, evidence=(text,), count=many)


def _copied(copies: list[Value], call: Attention, program: Program) -> Finding:
    first = copies[0]
    size = sum(x.bytes for x in copies)
    evidence = [f"{first.distinct:,} numbers become {first.size:,}; {bytes_text(size)} per step"]
    at = set(first.places[:1])
    found = [x for x in program.stored if at & set(x.places) and x.size == first.size]
    if found:
        evidence.append(f"the compiled program stores it: {found[0].dtype}{list(found[0].shape)}")
    what = "Keys or values are repeated for query heads that share them"
    places = (*first.places[:1], *call.places[:2])
    return finding("kv-copy", what, places, evidence=tuple(evidence), count=len(copies))


def _stored(mask: Value, scores: tuple[int, ...], program: Program) -> str:
    """Say where the memory of a mask is, or "" if XLA computes it inside of other loops."""
    if mask.name == "argument":
        return "is an argument of the step"
    dims = tuple(sorted(x for x in np.shape(mask.array) if x != 1))
    dtype = _DTYPES.get(str(mask.array.dtype), "")
    # A bias of the shape and dtype of the scores cannot be told from them.
    if dtype != "pred" and dims == tuple(sorted(x for x in scores if x != 1)):
        return ""
    found = [x for x in program.stored if x.dims == dims and x.dtype == dtype and x.name != "parameter"]
    at = set(mask.places[:1])
    if mask.name == "constant":
        return "is a constant of the compiled program" if any(x.name == "constant" for x in found) else ""
    return "is made in the step and stored" if any(at & set(x.places) for x in found) else ""


def hidden(calls: list[Attention], results: list[Value], valid: np.ndarray | None) -> Iterator[Finding]:
    """Yield queries without a visible key, and the first NaN that they do not cause."""
    broken = next((x for x in results if x.nan), None)
    found = False
    for call in calls:
        out = call.out
        if call.hidden is None or out is None or not call.hidden.shape == out.nan.shape == out.even.shape:
            continue
        rows = call.hidden & ~out.zero
        real = rows & valid if valid is not None and valid.shape == rows.shape else rows
        real = real & ~out.nan if broken is None else real if real.any() else rows
        if not real.any():
            continue
        found = True
        even = "they return the mean of all values" if out.even[real].all() else "they return a mix of values"
        what = "their results are NaN" if out.nan[real].any() else even
        numbers = ", ".join(f"({b}, {s})" for b, s in np.argwhere(real)[:4])
        evidence = f"{real.sum()} queries, (batch element, query): {numbers}"
        places = (*call.places[:2], *(x for y in call.pairs for x in y.places[:1]))
        what = f"Some queries of this attention call see no key: {what}"
        yield finding("hidden-rows", what, places, evidence=(evidence,), count=int(real.sum()))
    if broken is not None and not found:
        yield nan_origin(broken, "this line")


def nan_origin(broken: Value, where: str) -> Finding:
    """Name the operator from which the NaN of a result comes, and the overflow before it."""
    first = broken.origin("nan")
    shape = np.shape(first.array)
    what, cause = f"The first NaN comes from {where}: operator {first.name}, result {shape}", ""
    places: tuple[Place, ...] = ()
    large = next((x for x in first.parents if x.inf), None)
    if large is not None:
        source = large.origin("inf")
        if source.parents and source.name not in ("broadcast_in_dim", "select_n"):
            at, places = source.places[0] if source.places else source.name, source.places[:1]
            cause = f"{at} overflows to inf in {source.array.dtype}, and inf - inf or 0 * inf is NaN"
    return finding("nan", what, (*places, *first.places[:2]), cause=cause)


def seen(subject: JaxSubject, batch: Any, traced: Traced, calls: list[Attention]) -> Iterator[Finding]:
    """Yield pairs that must not be visible and are: other documents, padding and later tokens."""
    size = subject.size(batch)
    if size is None:
        return
    rows, length = size
    documents, valid, index = subject.document_ids(batch), subject.valid(batch), np.arange(length)
    check = partial(_proven, subject, batch, traced, calls)
    if documents is not None and documents.shape[-1] == length:
        documents = np.broadcast_to(documents, size)
        foreign = documents[:, :, None] != documents[:, None, :]
        yield from check("leak", "Packed documents see each other here", foreign, documents, None)
    if valid is not None:
        pairs = valid[:, :, None] & ~valid[:, None, :]
        yield from check("mask-lost", "Valid tokens see padding here", pairs, (~valid).astype(int), 1)
    if subject.causal and not subject.has_several_sequences(batch):
        later = np.broadcast_to(index[:, None] < index, (rows, length, length))
        last = np.broadcast_to((index == length - 1).astype(int), size)
        what = "Tokens see later ones here, in a model that predicts the next token"
        yield from check("causality-lost", what, later, last, 1)


def _proven(
    subject: JaxSubject,
    batch: Any,
    traced: Traced,
    calls: list[Attention],
    kind: str,
    what: str,
    foreign: np.ndarray,
    groups: np.ndarray,
    only: int | None,
) -> Iterator[Finding]:
    """Yield a finding for each line with visible foreign pairs, if changed tokens change foreign results."""
    size = groups.shape
    pairs: dict[int, int] = {}
    for x in calls:
        if x.visible is not None and x.visible.shape[1:] == foreign.shape[1:]:
            pairs[id(x)] = int((x.visible & foreign).sum())
    guilty = [x for x in calls if pairs.get(id(x))]
    changed = changed_rows(subject, batch, traced, groups, only)
    if changed == "":
        return
    for call in {x.places[:1]: x for x in guilty}.values():
        most = f"{max(pairs.values())} visible pairs of tokens that must not see each other"
        places = (*call.places[:2], *(x for y in call.pairs for x in y.places[:1]))
        form = form_of(subject, batch, call.visible & ~foreign) if call.visible is not None else ""
        remedy = f"Call attnspan.jax.attention with mask={form}" if form else ""
        yield finding(kind, what, places, evidence=(most, changed or _UNPROVEN), remedy=remedy)
    if guilty or changed is None:
        return
    unread = [x for x in calls if x.visible is None and size[1] in np.shape(x.operands[0].array)]
    if unread:
        cause = "The doctor cannot read which pairs this call sees, but tokens reach each other through it"
        cause += " or through code around it"
        yield finding(kind, what.replace(" here", ""), unread[0].places[:1], evidence=(changed,), cause=cause)
    else:
        cause = "Another part of the model mixes tokens"
        what = f"{what.replace(' here', '')}, outside of attention"
        yield finding(kind, what, (), evidence=(changed,), cause=cause)


_UNPROVEN = "not confirmed by changing tokens: the step returns no results (B, S, ...)"


def changed_rows(
    subject: JaxSubject,
    batch: Any,
    traced: Traced,
    groups: np.ndarray,
    only: int | None,
    run: Callable[..., Any] | None = None,
) -> str | None:
    """Change the tokens of one group after the other, and describe the results of others that change.

    Args:
        subject, batch, traced: The subject and its traced step.
        groups: The group of each token, (B, S).
        only: The group to change, or None for every group.
        run: Replaces the step on one device: from leaves to results.

    Returns:
        A sentence, "" if no foreign result changes, or None if there are no results (B, S, ...).
    """
    names = [""] * traced.variables + traced.names
    tokens = {id(x) for x in subject.tokens(batch).values()}
    rows = _Rows(traced, groups.shape, run or traced.run)
    before = rows.of(traced.leaves)
    if not before or not tokens:
        return None
    count, most = 0, 0.0
    for group in [only] if only is not None else np.unique(groups)[:_MOST_GROUPS]:
        own = groups == group
        leaves = [
            _changed(x, own) if name and id(x) in tokens else x
            for name, x in zip(names, traced.leaves, strict=True)
        ]
        pairs = zip(before, rows.of(leaves), strict=True)
        change = np.where(own, 0, np.max([_change(x, y) for x, y in pairs], axis=0))
        count, most = count + int((change > _WITHIN).sum()), max(most, float(change.max()))
    said = f"changing these tokens changes {count} {rows.name} of others by up to {most:.1e} (relative error)"
    return said if count else ""


class _Rows:
    """The results of each token: of the step, or of its attention calls if the step returns only a loss."""

    def __init__(self, traced: Traced, size: tuple[int, ...], run: Callable[..., Any]) -> None:
        self.traced, self.size, self.run, self.name = traced, size, run, "rows of results"

    def of(self, leaves: list[Any]) -> list[np.ndarray]:
        """List arrays (B, S, D)."""
        found = [x for x in floats(self.run(*leaves)) if np.shape(x)[:2] == self.size]
        found = [x for x in found if np.ndim(x) > 2] or found
        if not found:
            self.name = "rows of attention's results"
            calls = watched(replace(self.traced, leaves=leaves), (self.size[0], self.size[1]))[0].calls
            found = [np.moveaxis(x.out.rows, -1, 1) for x in calls if x.out is not None]
        wide = [np.asarray(x, np.float64) for x in found if x.shape[:2] == self.size]
        return [x.reshape(*self.size, -1) for x in wide]


def _change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Relative change of each row."""
    scale = np.linalg.norm(before, axis=-1) + 1e-3 * np.abs(before).max() + 1e-30
    return np.asarray(np.linalg.norm(after - before, axis=-1) / scale)


def _changed(tokens: Any, own: np.ndarray) -> Any:
    """Replace tokens by other tokens of the batch, or move floating-point ones."""
    x = np.asarray(tokens)
    if x.dtype.kind in "iu":
        known = np.unique(x)
        other = (
            known[(np.searchsorted(known, x) + 1) % len(known)] if len(known) > 1 else np.where(x == 0, 1, 0)
        )
        return np.where(own, other, x).astype(x.dtype)
    other = (0.5 - x.astype(np.float64)).astype(x.dtype)
    return np.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), other, x)
