"""Findings on watched attention calls: stored scores, copies, hidden keys, leaks and repeated calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.dense_masks import LONG, DenseMasks
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.fused import refusal, refusal_of_multihead
from attnspan_lab.doctor.pairs import findings_of_pairs
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.doctor.watch import Attention, Watcher
from attnspan_lab.doctor.words import counted

__all__ = ["findings_of"]


def findings_of(
    watcher: Watcher, subject: Subject, batch: Any, seconds: float, masks: DenseMasks, coverage: Coverage
) -> Iterator[Finding]:
    """Yield the findings of a watched step.

    Args:
        watcher, subject, batch: The step, which has ended.
        seconds: Time of the same step without watching.
        masks: Collects dense masks. Their remedies must hold in all batches.
        coverage: Collects the checks.
    """
    yield from findings_of_pairs(watcher.calls, subject, batch, coverage)
    yield from _hidden(watcher, subject, batch)
    sites: dict[tuple[Any, str], list[Attention]] = {}
    for call in watcher.calls:
        sites.setdefault((call.place, call.kind), []).append(call)
    for site in sites.values():
        yield from _costs(site, subject, batch)
        masks.add(site, subject.declared(batch), seconds)
    yield from _operators(watcher)
    for place, count in watcher.reads.items():
        yield Finding("sync", "A value of a tensor is read on the host here", at(place), count=count)


def _costs(site: list[Attention], subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield avoidable costs of the calls of one line."""
    call, many = site[0], len(site)
    long = prod(call.q[:-2]) * LONG**2 * call.dtype.itemsize
    if call.stores_scores and call.kind != "flex":
        what = "Attention is written out here: scores and weights of all pairs are stored"
        cause = remedy = tried = ""
        if call.kind == "sdpa":
            what = "scaled_dot_product_attention ran its math kernel here and stored all scores"
            cause, remedy, tried = refusal(call)
        elif call.in_multihead:
            what = "nn.MultiheadAttention stores scores and weights of all pairs here"
            cause, remedy, tried = refusal_of_multihead(subject, batch, call.place)
        evidence = f"{counted(many, 'call')}; a tensor of scores has {bytes_text(long)} at {LONG:,} tokens"
        yield Finding("unfused", what, at(call.place), (evidence,), cause, remedy, tried, count=many)
    if repeated := next((x.repeated for x in site if x.repeated), None):
        what = "Keys or values are copied once for each query head that shares them"
        evidence = f"{bytes_text(repeated[1])} per tensor, at least {bytes_text(repeated[1] * many)} per step"
        yield Finding("kv-copy", what, at(repeated[0], call.place), (evidence,), count=many)
    if copied := next((x.copied for x in site if x.copied and x.kernel), None):
        what = "An operand of attention is copied here only to make it contiguous"
        evidence = f"{bytes_text(copied[1])} per tensor, at least {bytes_text(copied[1] * many)} per step"
        yield Finding("copy", what, at(copied[0], call.place), (evidence,), count=many)
    narrow = min((x.itemsize for x in subject.model.parameters() if x.is_floating_point()), default=8)
    upcast = next((x.upcast for x in site if x.upcast and x.dtype.itemsize > narrow), None)
    if upcast is not None:
        what = (
            f"Attention runs in {str(call.dtype).removeprefix('torch.')}, wider than the model's parameters"
        )
        yield Finding("upcast", what, at(upcast, call.place), count=many)
    if again := sum(x.recomputed for x in site):
        first = many - again
        what = f"Checkpointing runs attention {many / max(first, 1):.3g} times for each forward pass"
        evidence = f"{counted(first, 'call')} in the forward pass, {again} more in the backward pass"
        yield Finding("recompute", what, at(call.place), (evidence,), count=again)


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
            places = at(call.place, call.mask[1] if call.mask else None)
            many = counted(len(rows), "query", "queries")
            evidence = f"{many}, (batch element, query): {', '.join(map(str, rows[:4]))}"
            what = f"Some queries of this attention call see no key: {what}"
            yield Finding("hidden-rows", what, places, (evidence,), count=len(rows))
    if nan is not None and not found:
        name, shape, place, backward = nan
        where = "the backward pass of this line" if backward else "this line"
        what, cause = f"The first NaN comes from {where}: operator {name}, result {shape}", ""
        if watcher.first_overflow is not None:
            cause = f"{watcher.first_overflow} overflows to inf, and inf - inf or 0 * inf is NaN"
        yield Finding("nan", what, at(watcher.first_overflow, place), (), cause)


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
            yield Finding("operator", what, at(place), (), cause)
            continue
        for real, fake in zip(outs, promised, strict=False):
            got = [f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}" for x in (real, fake)]
            if got[0] != got[1] and real.numel() > 1:
                what = f"The operator {name} returns a different layout than its fake kernel"
                yield Finding("operator", what, at(place), (f"real {got[0]}", f"fake {got[1]}"))
                break
