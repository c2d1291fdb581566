"""Findings on pairs of tokens that an attention call shows or hides, proven by changing tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan import Mask
from attnspan.testing import probe
from attnspan.torch import attention
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.declared import Declared
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.own_keys import made_of_tokens, own_keys
from attnspan_lab.doctor.padding import Changed, Fault, fault_of
from attnspan_lab.doctor.places import Place, at, is_users, place_here
from attnspan_lab.doctor.remedies import Form, arguments, distance, forms, present
from attnspan_lab.doctor.returned import MEAN, OTHER, UNMASKED, returned
from attnspan_lab.doctor.sequences import has_rows, of_predicted, sequences, with_rows
from attnspan_lab.doctor.shown import OUTSIDE, cause_of_shown, righted
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.doctor.watch import Attention
from attnspan_lab.doctor.words import counted

__all__ = ["findings_of_pairs"]

# What is not checked if a finding cannot be confirmed.
_TOPICS = {"leak": "documents", "mask-lost": "padding", "causality-lost": "causality"}
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
        for topic in ("documents", "padding", "causality"):
            coverage.missed(topic, why)
        return
    rows, length = tokens[1].shape[:2]
    said, own = subject.declared(batch), _own_pairs(calls, subject, batch, length, coverage)
    see = _Visible(calls, own, subject, batch, tokens[0], coverage)
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
        coverage.absent("padding", "no batch has padding that the doctor knows")
    yield from _causality(see, said, rows, length)
    yield from _alignments(see, length)


def _causality(see: _Visible, said: Declared, rows: int, length: int) -> Iterator[Finding]:
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


def _later_seen(see: _Visible) -> Iterator[Finding]:
    """Yield a finding if a change of the last predicted token changes earlier results."""
    what = "Tokens see later ones here, in a model that predicts the next token"
    names, broken, reasons = of_predicted(see.names), list[_Visible](), list[str]()
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
            reasons.append(_first_line(error))
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _own_pairs(
    calls: list[Attention], subject: Subject, batch: Any, length: int, coverage: Coverage
) -> dict[int, Tensor]:
    """Find the visible pairs (B, S, S) of the batch's own tokens in each call, without keys of a cache."""
    found, cached = dict[int, Tensor](), list[Attention]()
    for x in calls:
        if x.visible is None:
            why = f"the {x.kind} call at {x.place} does not show which pairs it computes"
            coverage.missed("masks", why)
        elif x.visible.shape[1:] == (length, length):
            found[id(x)] = x.visible
        elif x.visible.shape[1] == length and x.key is not None and not x.recomputed:
            cached.append(x)
    if not cached:
        return found
    places = own_keys(subject, batch, calls)
    for x in cached:
        if isinstance(places, str):
            coverage.missed("keys of a cache", f"{places}, so the call at {x.place} was not examined")
        elif (start := places.get(calls.index(x))) is not None:
            x.first_own = start
            found[id(x)] = x.visible[..., start : start + length]  # type: ignore[index]
        else:
            coverage.missed("other keys", f"the keys at {x.place} are not of the tokens of the batch")
    return found


def _alignments(see: _Visible, length: int) -> Iterator[Finding]:
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
        if x.given is not None:
            now = present(x)
            args = arguments(*x.given)
            kept = {k: args[k] for k in ("query", "key", "value", "scale", "enable_gqa") if k in args}
            then = F.scaled_dot_product_attention(**kept, attn_mask=right)
            tried = f"results of this call change by {distance(now, then):.1e} (relative)"
            evidence.append("no query sees its own key")
        yield Finding(
            "causal-alignment",
            "The causal mask counts from the first key here, but the queries are later tokens",
            at(x.place),
            tuple(evidence),
            remedy=_aligned(_ends_with_own(x, length)),
            tried=tried,
        )


def _ends_with_own(call: Attention, length: int) -> bool:
    return call.visible is not None and call.first_own + length == call.visible.shape[2]


def _aligned(at_the_end: bool) -> str:
    """Write the remedy of an alignment. `causal()` counts from the last key, which must be a query's own."""
    ours = "Pass mask=causal() to attnspan.torch.attention"
    theirs = "attn_mask=torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)"
    other = "Pass an attn_mask that shows each query the keys up to its own"
    return f"{ours}. Or: pass {theirs}" if at_the_end else other


def _written(form: Form | None, *, is_torch: bool) -> str:
    """Write the remedy of a lost mask, or "" for the kind's remedy."""
    if form is None:
        return ""
    text, _ = form
    ids = " (ids: the document of each token)" if "segments(ids)" in text else ""
    ours = f"ass mask={text} to attnspan.torch.attention{ids}"
    if text == "causal()" and is_torch:
        return f"Pass is_causal=True. Or: p{ours}"
    if text.startswith("keys(") and " & " not in text and is_torch and "valid" not in text:
        return f"Pass attn_mask=({text[5:-1]})[:, None, None]. Or: p{ours}"
    return f"P{ours}. Or: pass cu_seqlens to flash-attn" if "segments(" in text else f"P{ours}"


class _Masked(TorchFunctionMode):
    """Calls attnspan's attention with other masks instead of torch's function, at some lines."""

    def __init__(self, masks: Mapping[Place | None, Mask]) -> None:
        super().__init__()
        self.masks, self.used = masks, set[Place | None]()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = arguments(args, kwargs or {})
        name = getattr(fn, "__name__", "")
        place = place_here() if name in ("scaled_dot_product_attention", "softmax") else None
        if place is None or place not in self.masks:
            return fn(*args, **(kwargs or {}))
        self.used.add(place)
        if name == "softmax":
            return fn(_hidden(args[0], self.masks[place]), *args[1:], **(kwargs or {}))
        q, k, v = (given[x] for x in ("query", "key", "value"))
        return attention(q, k, v, mask=self.masks[place], scale=given.get("scale"))


def _hidden(scores: Tensor, mask: Mask) -> Tensor:
    """Hide pairs of written-out scores (B, H, Sq, Sk)."""
    batch, _, q_len, k_len = scores.shape
    shown = torch.as_tensor(mask.spans(q_len, k_len, batch=batch, like=scores).dense())
    return scores.masked_fill(~shown, -torch.inf)


class _Visible:
    """Calls with known visible pairs, and their step."""

    def __init__(
        self,
        calls: list[Attention],
        own: dict[int, Tensor],
        subject: Subject,
        batch: Any,
        name: str,
        coverage: Coverage,
    ) -> None:
        self.calls, self.own, self.every = [x for x in calls if id(x) in own], own, calls
        self.unread = [x for x in calls if x.visible is None]
        self.subject, self.batch, self.name, self.coverage = subject, batch, name, coverage
        self.names, self.said = sequences(subject, batch), subject.declared(batch)

    def of(self, name: str) -> _Visible:
        """See the pairs of another sequence of the batch."""
        subject = replace(self.subject, first=name)
        _, tokens = subject.tokens(self.batch) or ("", torch.empty(0, 0))
        own = _own_pairs(self.every, subject, self.batch, tokens.shape[1], Coverage())
        return _Visible(self.every, own, subject, self.batch, name, self.coverage)

    @cached_property
    def last(self) -> Tensor:
        """Number 1 for the last token, 0 for earlier ones and -1 for padding, (B, S)."""
        _, tokens = self.subject.tokens(self.batch) or ("", torch.empty(0, 0))
        rows, length = tokens.shape[:2]
        last = (torch.arange(length) == length - 1).long().expand(rows, length)
        return last if self.said.valid is None else last.masked_fill(~self.said.valid, -1)

    @cached_property
    def made(self) -> set[int] | str:
        """Numbers of the calls whose keys are made from the tokens, or the reason why they are unknown."""
        return made_of_tokens(self.subject, self.batch, self.every)

    def _is_certain(self, kind: str) -> bool:
        """Whether the visible pairs alone show a fault: their calls have no other sequence's tokens."""
        lengths = [self.subject.named(self.batch)[x].shape[1] for x in self.names if x != self.name]
        if not lengths or kind == "causality-lost" or isinstance(self.made, str):
            return not lengths
        return self.last.shape[1] not in lengths

    @property
    def is_causal(self) -> bool:
        """Whether these tokens must not see later ones."""
        declared = self.subject.is_causal or self.said.later is False
        return declared and of_predicted(self.names) == [self.name]

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
        pairs = {x: int((self.own[id(x)] & foreign[: len(self.own[id(x)])]).sum()) for x in self.calls}
        guilty = [x for x in self.calls if pairs[x]]
        try:
            changed = self.changed(groups, only)
        except Exception as error:  # The model may raise: it may not accept other tokens.
            why = _first_line(error)
            if not guilty:
                self.coverage.missed(f"{kind} by other layers", f"tokens could not be changed: {why}")
                return
            if not self._is_certain(kind):  # The call may have another sequence's tokens.
                several = f"the batch has several sequences ({', '.join(self.names)})"
                said = f"{several}, and changing tokens of {self.name} proved nothing: {why}"
                self.coverage.missed(_TOPICS[kind], said)
                return
            changed = f"not confirmed by changing tokens: {why}"
        if changed is None:
            return
        if guilty:
            made = self.made
            if not isinstance(made, str):
                guilty = [x for i, x in enumerate(self.every) if i in made and x in guilty]
            elif len(self.names) > 1:
                self.coverage.missed(_TOPICS[kind], f"{changed}, but no call is known to cause it: {made}")
                return
        lines = {x.place: [y for y in guilty if y.place == x.place] for x in guilty}
        instead = {place: self._form(own, foreign) for place, own in lines.items()}
        if kind == "mask-lost":  # A mask of keys also hides padding from padding.
            everywhere = foreign.any(1, keepdim=True).expand_as(foreign)
            instead = {place: form or self._form(lines[place], everywhere) for place, form in instead.items()}
        faults = {place: own[0].padding if kind == "mask-lost" else None for place, own in lines.items()}
        tried = self._tried(instead, faults, groups, only)
        for place, own in lines.items():
            most = f"{max(pairs[x] for x in own)} visible pairs of tokens that must not see each other"
            remedy = _written(instead[place], is_torch=all(self._is_torch(x) for x in own))
            cached = [x for x in own if x.visible is not None and x.visible.shape[2] != foreign.shape[2]]
            if cached and kind == "causality-lost":  # is_causal=True is wrong behind a cache.
                remedy = _aligned(all(_ends_with_own(x, foreign.shape[2]) for x in cached))
            if remedy and any(x.keys is not None for x in own):
                remedy = f"{remedy}. Pass its sinks too: sinks="
            fault, said = faults[place], what
            cause, other = cause_of_shown(kind, own[0], self.own[id(own[0])], self.said)
            remedy = remedy or other
            if fault is not None:
                said, cause, remedy = fault.what, fault.cause, fault.remedy or remedy
                for x in own if fault.inverted else ():
                    x.hidden = []  # The inverted mask explains queries that see nothing.
            for mask in dict.fromkeys(x.mask[1] if x.mask else None for x in own):
                places = at(place, fault.place if fault is not None else None, mask)
                yield Finding(kind, said, places, (most, changed), cause, remedy, tried)
        # An earlier finding names the queries that see only hidden keys.
        if not guilty and not any({MEAN, UNMASKED, OTHER} & set(returned(x, x.hidden)) for x in self.calls):
            what, cause = what.replace(" here", ""), "Another part of the model mixes tokens"
            remedy = "" if self.unread else OUTSIDE[kind]
            if self.unread:
                cause = f"{cause}, or the mask of {self.unread[0].place}, which the doctor cannot read"
            places = self._first(groups) or at(*(x.place for x in self.unread[:1]))
            yield Finding(kind, f"{what}, outside of attention", places, (changed,), cause, remedy)

    @staticmethod
    def _is_torch(call: Attention) -> bool:
        return call.given is not None and len(call.q) == 4

    def _form(self, calls: list[Attention], foreign: Tensor) -> Form | None:
        """Find the mask that hides the foreign pairs and shows all others that the calls of a line show."""
        said, found = self.said, list[Form]()
        if self.is_causal:
            foreign = foreign | torch.ones_like(foreign).triu(1)
        if said.documents is not None and said.documents.shape == foreign.shape[:2]:
            apart = said.documents[:, :, None] != said.documents[:, None, :]
            foreign = foreign | (apart & (said.documents >= 0)[:, :, None])
        for x in calls:
            own = righted(self.own[id(x)]) if self.is_causal else self.own[id(x)]
            wanted = own.expand(len(foreign), -1, -1) & ~foreign
            if x.visible is None or x.visible.shape[2] != own.shape[2]:
                return None
            found += list(forms(wanted, said))[:1]
        same = len(found) == len(calls) and len({text for text, _ in found}) == 1
        return found[0] if same else None

    def _tried(
        self,
        instead: Mapping[Place | None, Form | None],
        faults: Mapping[Place | None, Fault | None],
        groups: Tensor,
        only: int | None,
    ) -> str:
        """Replace the masks of all guilty lines, change the tokens again, and describe the outcome."""
        changes = {x.place: x for x in faults.values() if x is not None and x.change is not None}
        lost = [place for place, x in faults.items() if x is None or x.change is None]
        masks = {place: form[1] for place in lost if (form := instead[place]) is not None}
        if len(masks) < len(lost):
            return ""
        try:
            with _Masked(masks) as masked, Changed(changes):
                changed = self.changed(groups, only)
        except Exception:  # The model does not run with attnspan's results.
            return ""
        if masked.used != set(masks):
            return ""  # Another function than torch's computes attention, so nothing was replaced.
        if changed is None:
            return "with this mask, changing these tokens changes no other result"
        return f"with this mask, {changed}: another part of the model also mixes tokens"

    def _first(self, groups: Tensor) -> tuple[Place, ...]:
        """Find the line of the first module with changed results, if the batch allows it."""
        if not isinstance(self.batch, dict) or self.name not in ("input_ids", "inputs_embeds", "x"):
            return ()
        if self.batch[self.name].shape[:2] != groups.shape:
            return ()
        leaks = probe(self.subject.model, self.batch, groups).leaks
        modules, name = dict(self.subject.model.named_modules()), leaks[0].module if leaks else ""
        while name in modules:
            code = type(modules[name]).forward.__code__
            if is_users(code.co_filename):
                return (Place(code.co_filename, code.co_firstlineno, code.co_qualname),)
            name = name.rpartition(".")[0]  # A module of torch: its inputs were already mixed.
        return ()

    @cached_property
    def step(self) -> Any:
        """The batch, without labels if the model returns results for each token only then."""
        return with_rows(self.subject, self.batch)

    def changed(self, groups: Tensor, only: int | None) -> str | None:
        """Describe the results that change with other tokens of a group. None if no result changes."""
        subject, batch, name = self.subject, self.step, self.name
        _, tokens = subject.tokens(batch) or ("", groups)
        packed = subject.named(batch)[name].dim() < tokens.dim()
        key = "x" if tokens.is_floating_point() else "input_ids"

        def call(**given: Tensor) -> Any:
            out = subject.call(subject.model, subject.with_tokens(batch, name, given[key]))
            # Packed tokens have no batch axis, and neither have their results.
            return [x[None] for x in subject.results(out, {}).values()] if packed else out

        training = subject.model.training
        subject.model.eval()  # As `probe` does: dropout is no reason to give up.
        try:
            before, again = (subject.step(subject.model, batch, backward=False) for _ in range(2))
            out = subject.results(subject.call(subject.model, batch), {})
        finally:
            subject.model.train(training)
        if out and all(x.dim() == 0 for x in out.values()):
            raise RuntimeError("the model returned only a scalar loss")
        if not has_rows(out, tokens):
            raise RuntimeError(
                f"the model returned no result with a row for each of the {tuple(tokens.shape[:2])} tokens"
            )
        if not all(torch.equal(before[x], again[x]) for x in before):
            raise RuntimeError("the model returns different results for the same batch, or NaN")
        found = probe(subject.model, {key: tokens}, groups, call=call)
        leaks = [x for x in found.leaks if only is None or x.document == only]
        if not leaks:
            return None
        rows, most = sum(len(x.rows) for x in leaks), max(x.change for x in leaks)
        changes = f"changes {counted(rows, 'row')} of results by up to {most:.1e} (relative error)"
        return f"changing these tokens {changes}"
