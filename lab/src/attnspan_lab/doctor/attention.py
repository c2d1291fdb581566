"""From watched calls of attention to findings: what was stored, copied, hidden, leaked and run twice."""

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

_LONG = 32_768  # tokens, for which memory of all pairs is predicted


def findings_of(watcher: Watcher, subject: Subject, batch: Any, seconds: float) -> Iterator[Finding]:
    """Findings of a watched step; ``seconds`` is what it takes when it is not watched."""
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
    """Avoidable costs of the calls of one line."""
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
    # torch's function makes masks of its own where it stores scores.
    if masked is not None and masked.mask is not None and not (call.reason and masked.mask[1] == call.place):
        yield _mask(masked, masked.mask, many, seconds)
    if repeated := next((x.repeated for x in site if x.repeated), None):
        what = "Keys or values are copied once for each query head that shares them"
        evidence = f"{bytes_text(repeated[1])} a tensor, at least {bytes_text(repeated[1] * many)} a step"
        yield Finding("kv-copy", what, _at(repeated[0], call.place), (evidence,), count=many)
    if copied := next((x.copied for x in site if x.copied and x.kernel), None):
        what = "An operand of attention is copied here only to be contiguous"
        evidence = f"{bytes_text(copied[1])} a tensor, at least {bytes_text(copied[1] * many)} a step"
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
    """Rows without a visible key, and the first NaN that is not theirs."""
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
            what = "their softmax is NaN" if nan else "they return a mean of all values"
            places = _at(call.place, call.mask[1] if call.mask else None)
            evidence = f"{len(rows)} rows, (batch row, query): {', '.join(map(str, rows[:4]))}"
            what = f"Rows of this attention may see no key: {what}"
            yield Finding("hidden-rows", what, places, (evidence,), count=len(rows))
    if nan is not None and not found:
        name, shape, place, backward = nan
        where = "the backward pass of this line" if backward else "this line"
        what, cause = f"The first NaN comes from {where}: operator {name}, result {shape}", ""
        if watcher.first_overflow is not None:
            cause = f"{watcher.first_overflow} overflows to inf, and inf - inf or 0 * inf is NaN"
        yield Finding("nan", what, _at(watcher.first_overflow, place), (), cause)


def _seen(calls: list[Attention], subject: Subject, batch: Any) -> Iterator[Finding]:
    """Pairs that are visible and must not be: documents, padding and later tokens."""
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
    """Calls whose visible pairs are known, and the step that they belong to."""

    def __init__(self, calls: list[Attention], subject: Subject, batch: Any, name: str) -> None:
        self.calls, self.subject, self.batch, self.name = calls, subject, batch, name

    def proven(
        self, kind: str, what: str, foreign: Tensor, groups: Tensor, only: int | None
    ) -> Iterator[Finding]:
        """A finding for each line where foreign pairs are visible, if changed tokens change foreign results.

        Args:
            kind, what: Of the finding.
            foreign: Bool (B, S, S): pairs that should not be visible.
            groups: Integer (B, S): tokens that are changed together.
            only: The one group that counts; None: each.
        """
        pairs = {
            id(x): int((x.visible & foreign[: len(x.visible)]).sum())
            for x in self.calls
            if x.visible is not None
        }
        guilty = [x for x in self.calls if pairs[id(x)]]
        try:
            changed = self._changed(groups, only)
        except Exception as error:  # The model's own: it may not take other tokens.
            changed = f"not confirmed by changing tokens: {str(error)[:120]}" if guilty else None
        if changed is None:
            return
        for place, mask in dict.fromkeys((x.place, x.mask[1] if x.mask else None) for x in guilty):
            most = f"{max(pairs.values())} pairs of tokens that should not see each other"
            yield Finding(kind, what, _at(place, mask), (most, changed))
        if not guilty:
            what, cause = what.replace(" here", ""), "Something else than attention mixes tokens"
            yield Finding(
                kind, f"{what}, by another way than attention", self._first(groups), (changed,), cause
            )

    def _first(self, groups: Tensor) -> tuple[Place, ...]:
        """Line of the first module whose results change, if the batch can be probed by module."""
        if not isinstance(self.batch, dict) or self.name not in ("input_ids", "inputs_embeds", "x"):
            return ()
        leaks = probe(self.subject.model, self.batch, groups).leaks
        modules, name = dict(self.subject.model.named_modules()), leaks[0].module if leaks else ""
        while name in modules:
            code = type(modules[name]).forward.__code__
            if is_users(code.co_filename):
                return (Place(code.co_filename, code.co_firstlineno, code.co_qualname),)
            name = name.rpartition(".")[0]  # A module of torch's: what it got was already mixed.
        return ()

    def _changed(self, groups: Tensor, only: int | None) -> str | None:
        """Say whose results change with other tokens of a group: a sentence, or None."""
        subject, batch, name = self.subject, self.batch, self.name
        tokens = subject.named(batch)[name]
        key = "x" if tokens.is_floating_point() else "input_ids"

        def call(**given: Tensor) -> Any:
            return subject.call(subject.model, subject.with_tokens(batch, name, given[key]))

        before, again = (subject.step(subject.model, batch, backward=False) for _ in range(2))
        if not all(torch.equal(before[x], again[x]) for x in before):
            raise RuntimeError("the same batch gives other results each time, or NaN")
        found = probe(subject.model, {key: tokens}, groups, call=call)
        leaks = [x for x in found.leaks if only is None or x.document == only]
        if not leaks:
            return None
        rows, most = sum(len(x.rows) for x in leaks), max(x.change for x in leaks)
        return f"other tokens there change {rows} rows of results, by up to {most:.1e} of their size"


def _operators(watcher: Watcher) -> Iterator[Finding]:
    """Operators of other libraries whose fake kernels do not return what the real ones return."""
    for name, (op, args, kwargs, outs, place) in watcher.custom.items():
        try:
            with FakeTensorMode() as mode:
                given, named = tree_map(
                    lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
                )
                promised = [x for x in tree_leaves(op(*given, **named)) if isinstance(x, Tensor)]
        except Exception as error:
            cause = f"It has no working fake kernel: {(str(error).strip().splitlines() or [''])[0][:200]}"
            what = f"The compiler cannot look through the operator {name}"
            yield Finding("operator", what, _at(place), (), cause)
            continue
        for real, fake in zip(outs, promised, strict=False):
            got = [f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}" for x in (real, fake)]
            if got[0] != got[1] and real.numel() > 1:
                what = f"The operator {name} returns another layout than its fake kernel promises"
                yield Finding("operator", what, _at(place), (f"real {got[0]}", f"fake {got[1]}"))
                break
