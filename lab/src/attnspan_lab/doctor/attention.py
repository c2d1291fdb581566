"""Findings on watched attention calls: stored scores, copies, hidden keys, leaks and repeated calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from attnspan.testing import probe
from attnspan_lab.console import bytes_text, seconds_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, is_users
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.doctor.watch import Attention, Watcher

__all__ = ["findings_of"]

_LONG = 32_768  # tokens, for which the memory of a dense mask is predicted


def findings_of(watcher: Watcher, subject: Subject, batch: Any, seconds: float) -> Iterator[Finding]:
    """Yield the findings of a watched step. ``seconds`` is the time of the same step without watching."""
    sites: dict[tuple[Any, str], list[Attention]] = {}
    for call in watcher.calls:
        sites.setdefault((call.place, call.kind), []).append(call)
    for site in sites.values():
        yield from _costs(site, subject, seconds)
    yield from _hidden(watcher, subject, batch)
    yield from _seen(watcher.calls, subject, batch)
    yield from _operators(watcher)
    for place, count in watcher.reads.items():
        yield Finding("sync", "A value of a tensor is read on the host here", _at(place), count=count)


def _at(*places: Place | None) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(x for x in places if x is not None))


def _costs(site: list[Attention], subject: Subject, seconds: float) -> Iterator[Finding]:
    """Yield avoidable costs of the calls of one line."""
    call, many = site[0], len(site)
    long = prod(call.q[:-2]) * _LONG**2 * call.dtype.itemsize
    if call.stores_scores and call.kind != "flex":
        what = "Attention is written out here: scores and weights of all pairs are stored"
        if call.kind == "sdpa":
            what = "scaled_dot_product_attention ran its math kernel here and stored all scores"
        evidence = f"{many} calls; a tensor of scores has {bytes_text(long)} at {_LONG:,} tokens"
        remedy = "Remove what the fused kernels refuse" if call.reason else ""
        yield Finding("unfused", what, _at(call.place), (evidence,), call.reason, remedy, count=many)
    masked = next((x for x in site if x.mask is not None), None)
    # Where torch's function stores scores, it also creates masks: these are not the user's.
    if masked is not None and masked.mask is not None and not (call.reason and masked.mask[1] == call.place):
        yield _mask(masked, masked.mask, many, seconds)
    if repeated := next((x.repeated for x in site if x.repeated), None):
        what = "Keys or values are copied once for each query head that shares them"
        evidence = f"{bytes_text(repeated[1])} per tensor, at least {bytes_text(repeated[1] * many)} per step"
        yield Finding("kv-copy", what, _at(repeated[0], call.place), (evidence,), count=many)
    if copied := next((x.copied for x in site if x.copied and x.kernel), None):
        what = "An operand of attention is copied here only to make it contiguous"
        evidence = f"{bytes_text(copied[1])} per tensor, at least {bytes_text(copied[1] * many)} per step"
        yield Finding("copy", what, _at(copied[0], call.place), (evidence,), count=many)
    narrow = min((x.itemsize for x in subject.model.parameters() if x.is_floating_point()), default=8)
    upcast = next((x.upcast for x in site if x.upcast and x.dtype.itemsize > narrow), None)
    if upcast is not None:
        what = (
            f"Attention runs in {str(call.dtype).removeprefix('torch.')}, wider than the model's parameters"
        )
        yield Finding("upcast", what, _at(upcast, call.place), count=many)
    if again := sum(x.recomputed for x in site):
        first = many - again
        what = f"Checkpointing runs attention {many / max(first, 1):.3g} times for each forward pass"
        evidence = f"{first} calls in the forward pass, {again} more in the backward pass"
        yield Finding("recompute", what, _at(call.place), (evidence,), count=again)


def _mask(
    call: Attention, mask: tuple[tuple[int, ...], Place | None, bool], many: int, seconds: float
) -> Finding:
    shape, place, floating = mask
    long = call.mask_bytes // max(prod(shape[-2:]), 1) * _LONG**2
    share = f", {call.mask_seconds / seconds:.0%} of the step" if seconds else ""
    evidence = (
        f"{bytes_text(call.mask_bytes)}; {bytes_text(long)} at {_LONG:,} tokens",
        f"made in {seconds_text(call.mask_seconds)}{share}, used by {many} calls",
    )
    kind = "bias" if floating else "mask"
    what = f"A {kind} with an entry for each pair of tokens is made here, shape {shape}"
    return Finding("dense-mask", what, _at(place, call.place), evidence, count=many)


def _hidden(watcher: Watcher, subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield queries without a visible key, and the first NaN that they do not cause."""
    nan, found = watcher.first_nan, False
    for call in watcher.calls:
        rows = call.hidden
        # If an encoder and a decoder have one length, a mask may belong to either.
        for valid in subject.masks(batch) if call.visible is not None else ():
            if valid.shape[1] == call.visible.shape[1]:  # type: ignore[union-attr]
                rows = [(b, s) for b, s in rows if bool(valid[min(b, len(valid) - 1), s])]
        rows = rows or (call.hidden if nan else [])
        if rows and not call.recomputed:
            found = True
            what = "their softmax is NaN" if nan else "they return the mean of all values"
            places = _at(call.place, call.mask[1] if call.mask else None)
            evidence = f"{len(rows)} queries, (batch element, query): {', '.join(map(str, rows[:4]))}"
            what = f"Some queries of this attention call see no key: {what}"
            yield Finding("hidden-rows", what, places, (evidence,), count=len(rows))
    if nan is not None and not found:
        name, shape, place, backward = nan
        where = "the backward pass of this line" if backward else "this line"
        what, cause = f"The first NaN comes from {where}: operator {name}, result {shape}", ""
        if watcher.first_overflow is not None:
            cause = f"{watcher.first_overflow} overflows to inf, and inf - inf or 0 * inf is NaN"
        yield Finding("nan", what, _at(watcher.first_overflow, place), (), cause)


def _seen(calls: list[Attention], subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield pairs that must not be visible and are: other documents, padding and later tokens."""
    tokens = subject.tokens(batch)
    if tokens is None:
        return
    rows, length = tokens[1].shape[:2]
    see = _Visible(
        [x for x in calls if x.visible is not None and x.visible.shape[1:] == (length, length)],
        subject,
        batch,
        tokens[0],
    )
    documents, valid, index = subject.documents(batch), subject.valid(batch), torch.arange(length)
    if documents is not None:
        documents = documents.expand(rows, length)
        foreign = documents[:, :, None] != documents[:, None, :]
        yield from see.proven("leak", "Packed documents see each other here", foreign, documents, None)
    if valid is not None:
        hidden = valid[:, :, None] & ~valid[:, None, :]
        yield from see.proven("mask-lost", "Valid tokens see padding here", hidden, (~valid).long(), 1)
    if subject.is_causal:
        later = (index[:, None] < index)[None].expand(rows, -1, -1)
        last = (index == length - 1).long().expand(rows, length)
        what = "Tokens see later ones here, in a model that predicts the next token"
        yield from see.proven("causality-lost", what, later, last, 1)


class _Visible:
    """Calls with known visible pairs, and their step."""

    def __init__(self, calls: list[Attention], subject: Subject, batch: Any, name: str) -> None:
        self.calls, self.subject, self.batch, self.name = calls, subject, batch, name

    def proven(
        self, kind: str, what: str, foreign: Tensor, groups: Tensor, only: int | None
    ) -> Iterator[Finding]:
        """Yield a finding for each line with visible foreign pairs, if changed tokens change foreign results.

        Args:
            kind, what: Kind and text of the finding.
            foreign: Pairs that must not be visible, bool (B, S, S).
            groups: Tokens that are changed together, integer (B, S).
            only: The group to change, or None for every group.
        """
        pairs = {
            id(x): int((x.visible & foreign[: len(x.visible)]).sum())
            for x in self.calls
            if x.visible is not None
        }
        guilty = [x for x in self.calls if pairs[id(x)]]
        try:
            changed = self._changed(groups, only)
        except Exception as error:  # The model may raise: it may not accept other tokens.
            changed = f"not confirmed by changing tokens: {str(error)[:120]}" if guilty else None
        if changed is None:
            return
        for place, mask in dict.fromkeys((x.place, x.mask[1] if x.mask else None) for x in guilty):
            most = f"{max(pairs.values())} visible pairs of tokens that must not see each other"
            yield Finding(kind, what, _at(place, mask), (most, changed))
        if not guilty:
            what, cause = what.replace(" here", ""), "Another part of the model mixes tokens"
            yield Finding(kind, f"{what}, outside of attention", self._first(groups), (changed,), cause)

    def _first(self, groups: Tensor) -> tuple[Place, ...]:
        """Find the line of the first module with changed results, if the batch allows it."""
        if not isinstance(self.batch, dict) or self.name not in ("input_ids", "inputs_embeds", "x"):
            return ()
        leaks = probe(self.subject.model, self.batch, groups).leaks
        modules, name = dict(self.subject.model.named_modules()), leaks[0].module if leaks else ""
        while name in modules:
            code = type(modules[name]).forward.__code__
            if is_users(code.co_filename):
                return (Place(code.co_filename, code.co_firstlineno, code.co_qualname),)
            name = name.rpartition(".")[0]  # A module of torch: its inputs were already mixed.
        return ()

    def _changed(self, groups: Tensor, only: int | None) -> str | None:
        """Describe the results that change with other tokens of a group. None if no result changes."""
        subject, batch, name = self.subject, self.batch, self.name
        tokens = subject.named(batch)[name]
        key = "x" if tokens.is_floating_point() else "input_ids"

        def call(**given: Tensor) -> Any:
            return subject.call(subject.model, subject.with_tokens(batch, name, given[key]))

        before, again = (subject.step(subject.model, batch, backward=False) for _ in range(2))
        if not all(torch.equal(before[x], again[x]) for x in before):
            raise RuntimeError("the model returns different results for the same batch, or NaN")
        found = probe(subject.model, {key: tokens}, groups, call=call)
        leaks = [x for x in found.leaks if only is None or x.document == only]
        if not leaks:
            return None
        rows, most = sum(len(x.rows) for x in leaks), max(x.change for x in leaks)
        return f"changing these tokens changes {rows} rows of results by up to {most:.1e} (relative error)"


def _operators(watcher: Watcher) -> Iterator[Finding]:
    """Yield operators of other libraries whose fake kernels and real kernels return different layouts."""
    for name, (op, args, kwargs, outs, place) in watcher.custom.items():
        try:
            with FakeTensorMode() as mode:
                given, named = tree_map(
                    lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
                )
                promised = [x for x in tree_leaves(op(*given, **named)) if isinstance(x, Tensor)]
        except Exception as error:
            cause = f"It has no working fake kernel: {(str(error).strip().splitlines() or [''])[0][:200]}"
            what = f"The compiler cannot trace the operator {name}"
            yield Finding("operator", what, _at(place), (), cause)
            continue
        for real, fake in zip(outs, promised, strict=False):
            got = [f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}" for x in (real, fake)]
            if got[0] != got[1] and real.numel() > 1:
                what = f"The operator {name} returns a different layout than its fake kernel"
                yield Finding("operator", what, _at(place), (f"real {got[0]}", f"fake {got[1]}"))
                break
