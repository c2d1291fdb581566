"""Findings on watched attention calls: stored scores, copies, hidden keys, leaks and repeated calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import KINDS, Finding
from attnspan_lab.doctor.guarded import guarded
from attnspan_lab.doctor.places import Place, at, is_installed
from attnspan_lab.doctor.torch.isolation.pair_findings import findings_of_pairs
from attnspan_lab.doctor.torch.masks.dense_masks import DenseMasks
from attnspan_lab.doctor.torch.masks.fused import Refusal, refusal, refusal_of_multihead
from attnspan_lab.doctor.torch.masks.growth import scores_bytes, stored_text
from attnspan_lab.doctor.torch.masks.heads import HeadMap
from attnspan_lab.doctor.torch.masks.hidden_queries import hidden_findings
from attnspan_lab.doctor.torch.recording.attention_call import Attention, StepFacts
from attnspan_lab.doctor.torch.recording.calls import Step
from attnspan_lab.doctor.torch.recording.watch import Watcher
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, dtype_name, first_line

__all__ = ["findings_of", "sites_of", "with_caller"]


def findings_of(
    watcher: Watcher, subject: Subject, batch: Any, masks: DenseMasks, coverage: Coverage, again: Step | None
) -> Iterator[Finding]:
    """Yield the findings of a watched step.

    Args:
        watcher, subject, batch: The step, which has ended.
        again: The recorded step, or None if the model cannot be copied.
        masks: Collects dense masks. Their remedies must hold in all batches.
        coverage: Collects the checks.
    """
    if watcher.unread:
        coverage.missed("operators", watcher.unread)
    sites = sites_of(watcher, subject, batch)
    pairs = findings_of_pairs(watcher.calls, subject, batch, coverage)
    yield from guarded("pairs of tokens", pairs, coverage)
    hidden = hidden_findings(watcher, subject, batch, again, coverage)
    yield from guarded("queries without a key", hidden, coverage)
    for site in sites:
        yield from guarded("costs", _costs(site, subject, batch), coverage)
        masks.add(site)
    yield from guarded("operators", _operators(watcher), coverage)
    yield from guarded("repeated products", watcher.record.repeats.findings(), coverage)
    for place, count in watcher.reads.items():
        yield Finding("sync", "A value of a tensor is read on the host here", at(place), count=count)


def sites_of(watcher: Watcher, subject: Subject, batch: Any) -> list[list[Attention]]:
    """Tell the calls of a watched step about it, and group them by their lines."""
    tokens, sites = subject.tokens(batch), defaultdict[Any, list[Attention]](list)
    length = 0 if tokens is None else tokens[1].shape[1]
    step = StepFacts(subject.declared(batch), length, watcher.seconds)
    for call in watcher.calls:
        call.step = step
        sites[call.place, call.kind].append(call)
    return list(sites.values())


def with_caller(finding: Finding, calls: list[Attention]) -> Finding:
    """Add the user's own line that leads to a line of an installed library.

    Args:
        finding: A finding.
        calls: Calls whose lines are known. One of them has the finding's line.
    """
    place = finding.places[0] if finding.places else None
    if place is None or not is_installed(place.file):
        return finding
    for lines in (x.lines for x in calls if str(place) in x.lines):
        for line in lines[lines.index(str(place)) :]:
            file, _, number = line.rpartition(":")
            if file.endswith(".py") and not is_installed(file):  # The command itself has no suffix.
                return replace(finding, places=at(*finding.places, Place(file, int(number))))
    return finding


def _costs(site: list[Attention], subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield avoidable costs of the calls of one line."""
    call, many = site[0], len(site)
    if stored := [x for x in site if x.stores_scores and (x.kind == "sdpa" or x.in_multihead)]:
        yield from _stored(stored, site, subject, batch)
    if repeated := next((x.repeated for x in site if x.repeated), None):
        what = "Keys or values are copied once for each query head that shares them"
        heads, cause, remedy = _of_heads({y for x in site for y in x.head_maps})
        yield _of_copy("kv-copy", what, repeated, site, heads, cause, remedy)
    if copied := next((x.copied for x in site if x.copied and x.kernel), None):
        yield _of_copy(
            "copy", "An operand of attention is copied here only to make it contiguous", copied, site
        )
    yield from _conversions(site, subject)
    if again := sum(x.recomputed for x in site):
        first = many - again
        what = f"Checkpointing runs attention {many / max(first, 1):.3g} times for each forward pass"
        evidence = f"{counted(first, 'call')} in the forward pass, {again} more in the backward pass"
        yield Finding("recompute", what, at(call.place), (evidence,), remedy=_saved(call), count=again)


def _of_copy(
    kind: str,
    what: str,
    copy: tuple[Place | None, int],
    site: list[Attention],
    evidence: tuple[str, ...] = (),
    cause: str = "",
    remedy: str = "",
) -> Finding:
    (place, size), many = copy, len(site)
    total = f"{bytes_text(size)} per tensor, at least {bytes_text(size * many)} per step"
    return Finding(
        kind, what, at(place, site[0].place), (total, *evidence), cause, remedy, count=many, cost=size * many
    )


def _stored(
    stored: list[Attention], site: list[Attention], subject: Subject, batch: Any
) -> Iterator[Finding]:
    """Yield a finding for each reason why torch's functions store the scores of some calls of one line."""
    call, reasons = stored[0], defaultdict[Refusal, list[Attention]](list)
    if call.kind == "sdpa":
        what = "scaled_dot_product_attention ran its math kernel here and stored all scores"
        known = {_alike(x): x for x in stored}
        why = {key: refusal(x, training=subject.model.training) for key, x in known.items()}
        for x in stored:
            reasons[why[_alike(x)]].append(x)
    else:
        what = "nn.MultiheadAttention stores scores and weights of all pairs here"
        reasons[refusal_of_multihead(subject, batch, call.place)] = stored
    for (cause, remedy, tried), own in reasons.items():
        evidence = stored_text(own, site)
        yield Finding(
            "unfused",
            what,
            at(call.place),
            (evidence,),
            cause,
            remedy,
            tried,
            count=len(own),
            cost=sum(map(scores_bytes, own)),
        )


def _alike(call: Attention) -> Any:
    """Describe the arguments of a call, without the numbers of its tensors."""
    return tuple(
        (k, (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x))
        for k, x in call.given.items()
    )


def _saved(call: Attention) -> str:
    """Write the remedy for attention that a checkpoint repeats, or "" if no operator computes it."""
    if not call.kernel:
        return ""
    kernel = call.kernel if call.kernel.count(".") == 2 else f"{call.kernel}.default"
    contexts = f"partial(create_selective_checkpoint_contexts, [torch.ops.{kernel}])"
    return f"Save the results of attention: checkpoint(..., use_reentrant=False, context_fn={contexts})"


def _of_heads(maps: set[HeadMap | None]) -> tuple[tuple[str, ...], str, str]:
    """Explain which key heads query heads use, with evidence, cause and remedy. Kernels group query heads."""
    found = next(iter(maps)) if len(maps) == 1 else None
    if found is None:
        why = "keys and values differ in it" if len(maps) > 1 else "the copy was changed"
        remedy = (
            f"{KINDS['kv-copy'].remedy}. Both let neighbouring query heads share a key head. Check first "
        )
        return (), "", f"{remedy}that the copy does so: the doctor does not know its order ({why})"
    if found.is_grouped:
        return (), "", ""
    many, evidence = len(found.heads), f"key heads of {found.text}"
    if not found.is_even:
        cause = "A map of heads gives key heads different numbers of query heads"
        return (evidence,), cause, "Keep the copy: kernels give each key head the same number of query heads"
    order = f"torch.tensor({found.order})"
    cause = "A map of heads gives query heads their key heads in another order than kernels do"
    if found.is_tiled:
        order = f"torch.arange({many}).view({found.group}, {found.count}).T.flatten()"
        cause = f"The heads are tiled, as by k.repeat: query head i uses key head i % {found.count}"
    remedy = (
        f"enable_gqa=True alone changes results: query head i then uses key head i // {found.group}. Reorder "
        f"the query heads too, with order = {order}: call attention(q[:, order], k, v)[:, order.argsort()] "
        "with enable_gqa=True, or with attnspan.torch.attention. Or permute the heads once in the weights: "
        "the rows of q's projection and the columns of the output projection"
    )
    return (evidence,), cause, remedy


def _conversions(site: list[Attention], subject: Subject) -> Iterator[Finding]:
    """Yield attention, or only its scores, in a wider dtype than the model's."""
    many = len(site)
    narrow = min((x.itemsize for x in subject.model.parameters() if x.is_floating_point()), default=8)
    wide = [x for x in site if x.upcast and x.dtype.itemsize > narrow]
    if wide:
        call, name = wide[0], dtype_name(wide[0].dtype)
        what = f"Attention runs in {name}, wider than the model's parameters"
        evidence = [f"{bytes_text(call.upcast_bytes)} of q, k and v in {name} per call"]
        if call.stores_scores:
            size = call.score_count * call.dtype.itemsize
            evidence.append(f"{bytes_text(size)} for each tensor of scores in {name}")
        yield Finding(
            "upcast",
            what,
            at(call.upcast, call.place),
            tuple(evidence),
            count=many,
            cost=call.upcast_bytes * many,
        )
    if found := next((x for x in site if x.wide), None):
        assert found.wide is not None
        place, dtype, size = found.wide
        what = f"Scores of {dtype_name(found.dtype)} are computed in {dtype_name(dtype)} from here on"
        evidence = [f"{bytes_text(size)} of {dtype_name(dtype)} scores and weights per call"]
        evidence.append(f"{bytes_text(size * many)} per step")
        remedy = "Call F.scaled_dot_product_attention or attnspan.torch.attention: both add in float32 inside"
        cause = "The softmax or the operator before it converts all scores"
        yield Finding(
            "upcast",
            what,
            at(place, found.place),
            tuple(evidence),
            cause,
            remedy,
            count=many,
            cost=size * many,
        )


def _operators(watcher: Watcher) -> Iterator[Finding]:
    """Yield operators of other libraries whose fake kernels and real kernels return different layouts."""
    for name, x in watcher.custom.items():
        place = x.place
        try:
            with FakeTensorMode() as mode:
                given, named = tree_map(
                    lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (x.args, x.kwargs)
                )
                promised = [y for y in tree_leaves(x.op(*given, **named)) if isinstance(y, Tensor)]
        except Exception as error:
            cause = f"It has no working fake kernel: {first_line(error, 200)}"
            what = f"The compiler cannot trace the operator {name}"
            yield Finding("operator", what, at(place), (), cause)
            continue
        for real, fake in zip(x.outs, promised, strict=False):
            got = [f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}" for x in (real, fake)]
            if got[0] != got[1] and real.numel() > 1:
                what = f"The operator {name} returns a different layout than its fake kernel"
                yield Finding("operator", what, at(place), (f"real {got[0]}", f"fake {got[1]}"))
                break
