"""Visible pairs of a step. Tokens are changed to prove that a visible pair changes results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.testing import probe
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.pairs import SEEN, TOPICS, visible
from attnspan_lab.doctor.places import Place, at, place_of
from attnspan_lab.doctor.torch.decoding.new_keys import made_of_tokens, own_pairs
from attnspan_lab.doctor.torch.isolation.leak_causes import cause_of_shown, righted
from attnspan_lab.doctor.torch.isolation.mixing_operators import mixing_operator
from attnspan_lab.doctor.torch.isolation.mixing_remedies import cause_of_mixing, remedy_of_mixing
from attnspan_lab.doctor.torch.isolation.padding_causes import Changed, Fault
from attnspan_lab.doctor.torch.isolation.sequences import has_rows, of_predicted, sequences, with_rows
from attnspan_lab.doctor.torch.masks.forms import Form, forms
from attnspan_lab.doctor.torch.masks.hidden_queries import MEAN, OTHER, UNMASKED, returned
from attnspan_lab.doctor.torch.masks.replacement import Masked, aligned, ends_with_own, route, written
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.changes import evaluating
from attnspan_lab.doctor.torch.recording.trace import forward_line
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text, first_line

__all__ = ["OUTSIDE_OF_ATTENTION", "Foreign", "Visible"]

#: The check of padding that other layers read. A sample without its padding also shows it.
OUTSIDE_OF_ATTENTION = "padding outside of attention"
# The check to list as not made if no attention call shows a fault, and other layers could not be examined.
_OUTSIDE_TOPICS = {
    "leak": "other documents seen by other layers",
    "mask-lost": OUTSIDE_OF_ATTENTION,
    "causality-lost": "later tokens seen by other layers",
}


class Foreign(NamedTuple):
    """Pairs of tokens that must not be visible.

    Args:
        kind, what: Kind and text of the finding.
        pairs: The pairs, bool (B, S, S).
        groups: Tokens that are changed together to prove a fault, integer (B, S).
        only: The group to change, or None for every group.
    """

    kind: str
    what: str
    pairs: Tensor
    groups: Tensor
    only: int | None = None


class _Line(NamedTuple):
    """Calls of a line that show foreign pairs, the fault of their mask, and the mask that they need."""

    place: Place | None
    calls: list[Attention]
    fault: Fault | None
    form: Form | None


class Visible:
    """Calls with known visible pairs of a sequence of tokens, and their step."""

    def __init__(self, calls: list[Attention], subject: Subject, batch: Any, coverage: Coverage) -> None:
        self.subject, self.batch, self.coverage = subject, batch, coverage
        self.name, tokens = subject.tokens(batch) or ("", torch.empty(0, 0))
        self.rows, self.length = tokens.shape[:2]
        self.own, self.every = own_pairs(calls, subject, batch, self.length, coverage), calls
        self.calls = [x for x in calls if x in self.own]
        self.unread = [x for x in calls if x.visible is None]
        self.names, self.said = sequences(subject, batch), subject.declared(batch)
        self.others = [x for x in self.names if x != self.name]

    def of(self, name: str) -> Visible:
        """See the pairs of another sequence of the batch."""
        found = Visible(self.every, replace(self.subject, first=name), self.batch, Coverage())
        found.coverage = self.coverage
        return found

    @property
    def later(self) -> Foreign:
        """Pairs of a token and a later one. The last token is changed to prove them."""
        what = SEEN["causality-lost"]
        pairs = torch.ones(self.length, self.length, dtype=torch.bool).triu(1).expand(self.rows, -1, -1)
        last = (torch.arange(self.length) == self.length - 1).long().expand(self.rows, -1)
        if self.said.valid is not None:
            last = last.masked_fill(~self.said.valid, -1)
        return Foreign("causality-lost", what, pairs, last, 1)

    @cached_property
    def made(self) -> set[int] | str:
        """Numbers of the calls whose keys are made from the tokens, or the reason why they are unknown."""
        return made_of_tokens(self.subject, self.batch, self.every)

    @property
    def is_causal(self) -> bool:
        """Whether these tokens must not see later ones."""
        declared = self.subject.is_causal or self.said.later is False
        return declared and of_predicted(self.names) == [self.name]

    def proven(self, foreign: Foreign) -> Iterator[Finding]:
        """Yield a finding for each line that shows foreign pairs, if changed tokens change other results."""
        shown = {x: int((self.own[x] & foreign.pairs[: len(self.own[x])]).sum()) for x in self.calls}
        guilty = [x for x in self.calls if shown[x]]
        try:
            changed = self.changed(foreign)
        except Exception as error:  # The model may raise: it may not accept other tokens.
            changed = self._unconfirmed(foreign.kind, first_line(error), shows=bool(guilty))
        if changed is None:
            return
        if guilty:
            if not isinstance(self.made, str):
                guilty = [x for i, x in enumerate(self.every) if i in self.made and x in guilty]
            elif self.others:
                why = f"{changed}, but no call is known to cause it: {self.made}"
                self.coverage.missed(TOPICS[foreign.kind], why)
                return
        places = dict.fromkeys(x.place for x in guilty)
        lines = [self._line(x, [y for y in guilty if y.place == x], foreign) for x in places]
        tried = self._tried(lines, foreign) if lines else ""
        for line in lines:
            most = visible(max(shown[x] for x in line.calls))
            yield from self._of_line(line, foreign, (most, changed), tried)
        # An earlier finding names the queries that see only hidden keys.
        if not guilty and not any({MEAN, UNMASKED, OTHER} & set(returned(x, x.hidden)) for x in self.calls):
            yield self._outside(foreign, changed)

    def _unconfirmed(self, kind: str, why: str, *, shows: bool) -> str | None:
        """Note that changed tokens proved nothing. Return evidence if the visible pairs alone are a fault."""
        if not shows:
            self.coverage.absent(_OUTSIDE_TOPICS[kind], f"nothing could be compared: {why}")
            return None
        lengths = [self.subject.named(self.batch)[x].shape[1] for x in self.others]
        if lengths and (kind == "causality-lost" or isinstance(self.made, str) or self.length in lengths):
            # The call may have another sequence's tokens.
            several = f"the batch has several sequences ({', '.join(self.names)})"
            said = f"{several}, and changing tokens of {self.name} proved nothing: {why}"
            self.coverage.missed(TOPICS[kind], said)
            return None
        return f"not confirmed by changing tokens: {why}"

    def _line(self, place: Place | None, calls: list[Attention], foreign: Foreign) -> _Line:
        fault, form = None, self._form(calls, foreign.pairs)
        if foreign.kind == "mask-lost":
            # A mask of keys also hides padding from padding.
            everywhere = foreign.pairs.any(1, keepdim=True).expand_as(foreign.pairs)
            fault, form = calls[0].padding, form or self._form(calls, everywhere)
        return _Line(place, calls, fault, form)

    def _of_line(
        self, line: _Line, foreign: Foreign, evidence: tuple[str, ...], tried: str
    ) -> Iterator[Finding]:
        kind, what, calls = foreign.kind, foreign.what, line.calls
        alone, caller = _among(calls, [x for x in self.every if x.place == line.place])
        remedy = written(line.form, is_torch=all(bool(x.given) and len(x.q) == 4 for x in calls))
        cached = [x for x in calls if x.visible is not None and x.visible.shape[2] != self.length]
        if cached and kind == "causality-lost":  # is_causal=True is wrong behind a cache.
            remedy = aligned(all(ends_with_own(x, self.length) for x in cached))
        if remedy and any(x.keys is not None for x in calls):
            remedy = f"{remedy}. Pass its sinks too: sinks="
        cause, other = cause_of_shown(kind, calls[0], self.own[calls[0]], self.said)
        remedy = remedy or other
        if remedy and caller is not None and self.others and kind == "causality-lost":
            remedy += f". If this is cross-attention, pass it keys of {self.others[0]} instead"
        origin = None
        if (fault := line.fault) is not None:
            what, cause, remedy, origin = fault.what, fault.cause, fault.remedy or remedy, fault.place
            for x in calls if fault.inverted else ():
                x.hidden = []  # The inverted mask explains queries that see nothing.
        for mask in dict.fromkeys(x.mask[1] if x.mask else None for x in calls):
            places = at(line.place, caller, origin, mask)
            yield Finding(kind, what, places, (*evidence, *alone), cause, remedy, tried)

    def _outside(self, foreign: Foreign, changed: str) -> Finding:
        """Write the finding for tokens that another part of the model mixes."""
        kind, operator = foreign.kind, ""
        if not self.unread and (found := mixing_operator(self.subject, self.step, self.name, foreign)):
            places, operator = at(found.place), found.name
        else:
            places = self._first(foreign.groups)
        cause, remedy = cause_of_mixing(operator), remedy_of_mixing(kind, operator, self.said.padding)
        if self.unread:
            place = self.unread[0].place
            cause, remedy = f"{cause}, or the mask of {place}, which the doctor cannot read", ""
            places = places or at(place)
        what = f"{foreign.what.replace(' here', '')}, outside of attention"
        return Finding(kind, what, places, (changed,), cause, remedy)

    def _form(self, calls: list[Attention], foreign: Tensor) -> Form | None:
        """Find the mask that hides the foreign pairs and shows all others that the calls of a line show."""
        found = list[Form]()
        if self.is_causal:
            foreign = foreign | torch.ones_like(foreign).triu(1)
        if (apart := self.said.apart) is not None:
            foreign = foreign | apart
        for x in calls:
            own = righted(self.own[x]) if self.is_causal else self.own[x]
            if x.visible is None or x.visible.shape[2] != own.shape[2]:
                return None
            found += list(forms(own.expand(len(foreign), -1, -1) & ~foreign, self.said))[:1]
        same = len(found) == len(calls) and len({text for text, _ in found}) == 1
        return found[0] if same else None

    def _tried(self, lines: list[_Line], foreign: Foreign) -> str:
        """Replace the masks of all guilty calls, change the tokens again, and describe the outcome."""
        faults = [x.fault for x in lines if x.fault is not None and x.fault.change is not None]
        lost = [x for x in lines if x.fault not in faults]
        masks = {x.place: x.form[1] for x in lost if x.form is not None}
        if len(masks) < len(lost):
            return ""
        try:
            routes = {route(y.lines) for x in lines for y in x.calls}
            with Masked(masks, routes, self.rows) as masked, Changed({x.place: x for x in faults}):
                changed = self.changed(foreign)
        except Exception as error:  # The model does not run with attnspan's results.
            return f"with this mask, the step raises {error_text(error)}"
        if masked.used != set(masks):
            return ""  # Another function than torch's computes attention, so nothing was replaced.
        if changed is None:
            return "with this mask, changing these tokens changes no other result"
        return f"with this mask, {changed}: another part of the model also mixes tokens"

    def _first(self, groups: Tensor) -> tuple[Place, ...]:
        """Find the line of the first module with changed results, if the batch allows it."""
        batch, is_named = self.batch, self.name in ("input_ids", "inputs_embeds", "x")
        if not (isinstance(batch, dict) and is_named and batch[self.name].shape[:2] == groups.shape):
            return ()
        leaks = probe(self.subject.model, batch, groups).leaks
        modules = dict(self.subject.model.named_modules())
        if leaks and leaks[0].module not in modules:  # Only the model's own result differs.
            return ()
        parts = leaks[0].module.split(".") if leaks else []
        # A module of torch only passes on that its inputs were mixed.
        around = (modules.get(".".join(parts[:i])) for i in range(len(parts), -1, -1))
        return at(*(forward_line(x) for x in around if x is not None))[:1]

    @cached_property
    def step(self) -> Any:
        """The batch, without labels if the model returns results for each token only then."""
        return with_rows(self.subject, self.batch)

    def changed(self, foreign: Foreign) -> str | None:
        """Describe the results that change with other tokens of a group. None if no result changes."""
        subject, batch, name = self.subject, self.step, self.name
        _, tokens = subject.tokens(batch) or ("", foreign.groups)
        packed = subject.named(batch)[name].dim() < tokens.dim()
        key = "x" if tokens.is_floating_point() else "input_ids"

        def call(**given: Tensor) -> Any:
            out = subject.call(subject.model, subject.with_tokens(batch, name, given[key]))
            # Packed tokens have no batch axis, and neither have their results.
            return [x[None] for x in subject.results(out, {}).values()] if packed else out

        with evaluating(subject.model):  # As `probe` does: dropout is no reason to give up.
            before, again = (subject.step(subject.model, batch, backward=False) for _ in range(2))
            out = subject.results(subject.call(subject.model, batch), {})
        if out and all(x.dim() == 0 for x in out.values()):
            raise RuntimeError("the model returned only a scalar loss")
        if not has_rows(out, tokens):
            shape = tuple(tokens.shape[:2])
            raise RuntimeError(f"the model returned no result with a row for each of the {shape} tokens")
        if not all(torch.equal(before[x], again[x]) for x in before):
            raise RuntimeError("the model returns different results for the same batch, or NaN")
        found = probe(subject.model, {key: tokens}, foreign.groups, call=call)
        leaks = [x for x in found.leaks if foreign.only in (None, x.document)]
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
    return (said,), place_of(shared[0]) if shared else None
