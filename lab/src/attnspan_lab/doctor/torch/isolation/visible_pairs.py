"""Visible pairs of a step. Tokens are changed to prove that a visible pair changes results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnspan.testing import probe
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_users
from attnspan_lab.doctor.torch.decoding.new_keys import made_of_tokens, own_pairs
from attnspan_lab.doctor.torch.isolation.leak_causes import OUTSIDE, cause_of_shown, righted
from attnspan_lab.doctor.torch.isolation.mixing_operators import Mixing, mixing_operator
from attnspan_lab.doctor.torch.isolation.padding_causes import Changed, Fault
from attnspan_lab.doctor.torch.isolation.sequences import has_rows, of_predicted, sequences, with_rows
from attnspan_lab.doctor.torch.masks.forms import Form, forms
from attnspan_lab.doctor.torch.masks.hidden_queries import MEAN, OTHER, UNMASKED, returned
from attnspan_lab.doctor.torch.masks.replacement import Masked, aligned, ends_with_own, route, written
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text, first_line

__all__ = ["OUTSIDE_OF_ATTENTION", "Visible"]

#: The check of padding that other layers read. A sample without its padding also shows it.
OUTSIDE_OF_ATTENTION = "padding outside of attention"
# The check to list as not made if the doctor cannot confirm a finding.
_TOPICS = {"leak": "documents", "mask-lost": "padding", "causality-lost": "causality"}
_SEEN = {"leak": "other documents seen", "causality-lost": "later tokens seen"}


class Visible:
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

    def of(self, name: str) -> Visible:
        """See the pairs of another sequence of the batch."""
        subject = replace(self.subject, first=name)
        _, tokens = subject.tokens(self.batch) or ("", torch.empty(0, 0))
        own = own_pairs(self.every, subject, self.batch, tokens.shape[1], Coverage())
        return Visible(self.every, own, subject, self.batch, name, self.coverage)

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
            why = first_line(error)
            if not guilty:
                topic = OUTSIDE_OF_ATTENTION if kind == "mask-lost" else f"{_SEEN[kind]} by other layers"
                self.coverage.absent(topic, f"nothing could be compared: {why}")
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
        tried = self._tried(instead, faults, groups, only, guilty)
        for place, own in lines.items():
            most = f"{max(pairs[x] for x in own)} visible pairs of tokens that must not see each other"
            alone, caller = _among(own, [x for x in self.every if x.place == place])
            remedy = written(instead[place], is_torch=all(self._is_torch(x) for x in own))
            cached = [x for x in own if x.visible is not None and x.visible.shape[2] != foreign.shape[2]]
            if cached and kind == "causality-lost":  # is_causal=True is wrong behind a cache.
                remedy = aligned(all(ends_with_own(x, foreign.shape[2]) for x in cached))
            if remedy and any(x.keys is not None for x in own):
                remedy = f"{remedy}. Pass its sinks too: sinks="
            fault, said = faults[place], what
            cause, other = cause_of_shown(kind, own[0], self.own[id(own[0])], self.said)
            remedy = remedy or other
            foreigners = [x for x in self.names if x != self.name]
            if remedy and caller is not None and foreigners and kind == "causality-lost":
                remedy += f". If this is cross-attention, pass it keys of {foreigners[0]} instead"
            if fault is not None:
                said, cause, remedy = fault.what, fault.cause, fault.remedy or remedy
                for x in own if fault.inverted else ():
                    x.hidden = []  # The inverted mask explains queries that see nothing.
            for mask in dict.fromkeys(x.mask[1] if x.mask else None for x in own):
                places = at(place, caller, fault.place if fault is not None else None, mask)
                yield Finding(kind, said, places, (most, changed, *alone), cause, remedy, tried)
        # An earlier finding names the queries that see only hidden keys.
        if not guilty and not any({MEAN, UNMASKED, OTHER} & set(returned(x, x.hidden)) for x in self.calls):
            what, cause = what.replace(" here", ""), "Another part of the model mixes tokens"
            remedy = "" if self.unread else OUTSIDE[kind]
            if self.unread:
                cause = f"{cause}, or the mask of {self.unread[0].place}, which the doctor cannot read"
            places = at(*(x.place for x in self.unread[:1]))
            found = None if self.unread else self._mixing(groups, only)
            if found is not None:
                places, cause = (found.place,), found.cause
                remedy = (found.remedy if kind == "causality-lost" else "") or remedy
            else:
                places = self._first(groups) or places
            yield Finding(kind, f"{what}, outside of attention", places, (changed,), cause, remedy)

    @staticmethod
    def _is_torch(call: Attention) -> bool:
        return bool(call.given) and len(call.q) == 4

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
        guilty: list[Attention],
    ) -> str:
        """Replace the masks of all guilty calls, change the tokens again, and describe the outcome."""
        changes = {x.place: x for x in faults.values() if x is not None and x.change is not None}
        lost = [place for place, x in faults.items() if x is None or x.change is None]
        masks = {place: form[1] for place in lost if (form := instead[place]) is not None}
        if len(masks) < len(lost):
            return ""
        try:
            with Masked(masks, {route(x.lines) for x in guilty}) as masked, Changed(changes):
                changed = self.changed(groups, only)
        except Exception as error:  # The model does not run with attnspan's results.
            return f"with this mask, the step raises {error_text(error)}"
        if masked.used != set(masks):
            return ""  # Another function than torch's computes attention, so nothing was replaced.
        if changed is None:
            return "with this mask, changing these tokens changes no other result"
        return f"with this mask, {changed}: another part of the model also mixes tokens"

    def _mixing(self, groups: Tensor, only: int | None) -> Mixing | None:
        """Find the operator that mixes tokens, if the model runs the same operators for other tokens."""
        return mixing_operator(self.subject, self.step, self.name, groups, only)

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


def _among(guilty: list[Attention], site: list[Attention]) -> tuple[tuple[str, ...], Place | None]:
    """Say which calls of a line are guilty if others are not, and name the line that calls them."""
    others = [x for x in site if x not in guilty]
    if not others:
        return (), None
    said = f"{len(guilty)} of the {len(site)} calls of this line show them: change these calls alone"
    known = {line for x in others for line in x.lines}
    shared = [line for line in guilty[0].lines if all(line in x.lines for x in guilty) and line not in known]
    file, _, number = shared[0].rpartition(":") if shared else ("", "", "0")
    return (said,), Place(file, int(number)) if file else None
