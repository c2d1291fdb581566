"""Padding of any sequence that attention shows: padded entries are changed, and hidden by trial."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.names import marks_padding, words_of
from attnspan_lab.doctor.places import Place, at, place_of
from attnspan_lab.doctor.torch.isolation.declared import Declared, paddings
from attnspan_lab.doctor.torch.isolation.padding_causes import SEEN, Changed, Fault, fault_of, inverse
from attnspan_lab.doctor.torch.isolation.sequences import sequences
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.attention_call import Attention, seen_as
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step
from attnspan_lab.doctor.torch.recording.changes import hiding, with_other_tokens
from attnspan_lab.doctor.torch.recording.trace import change_of
from attnspan_lab.doctor.words import counted

__all__ = ["padding_findings"]

_SAME = 1e-6
_ROUNDS = 8  # calls behind a mended call whose keys are then known
Site = tuple[str, str, int, int]


class _Shown(NamedTuple):
    """A call that shows padding, the first key of the sequence, the fault, and the watcher's record.

    The queries (B, Sq) are not made from padding.
    """

    call: Call
    start: int
    fault: Fault
    seen: Attention | None
    queries: Tensor


def padding_findings(
    step: Step, calls: list[Attention], coverage: Coverage, done: set[Place]
) -> Iterator[Finding]:
    """Yield calls through which padded entries of a sequence change results.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    named = step.subject.named(step.batch)
    # Packed tokens (S,) have no padding.
    names = [x for x in sequences(step.subject, step.batch) if named[x].dim() > 1]
    for name in names:
        masks = dict(paddings(named, (named[name].shape[0], named[name].shape[1])))
        same = [x for x in names if named[x].shape[:2] == named[name].shape[:2]]
        if len(masks) > 1 or len(same) > 1:
            masks = {k: x for k, x in masks.items() if words_of(k) == words_of(name)}
        padding, valid = next(iter(masks.items()), ("", torch.ones(1)))
        if len(masks) == 1 and not bool(valid.all()):
            check = _Padded(step, calls, name, padding, valid)
            try:
                yield from check.findings(coverage, done)
            except CannotRun as error:
                coverage.missed(check.topic, str(error))


class _Padded:
    """A sequence with padding."""

    def __init__(self, step: Step, calls: list[Attention], name: str, padding: str, valid: Tensor) -> None:
        self.step, self.seen, self.name, self.padding, self.valid = step, calls, name, padding, valid
        self.topic = f"padding of {name}"
        self.hidden = ~valid & valid.any(1, keepdim=True)  # A sample without tokens has no right result.
        self.changed = with_other_tokens(step.subject, step.batch, name, self.hidden)
        self.sites: dict[Site, _Shown] = {}

    def findings(self, coverage: Coverage, done: set[Place]) -> Iterator[Finding]:
        step = self.step
        before, other = step, step.again(self.changed)
        left = change = self._difference(before, other)
        if self._difference(step, step.again()) > 0:
            coverage.missed(self.topic, "the model returns different results for the same batch")
            return
        if change <= _SAME:
            coverage.made(self.topic, f"read from {self.padding}: changed padding changes no result")
            return
        for _ in range(_ROUNDS):
            found = {k: x for k, x in self._shown(before, other).items() if k not in self.sites}
            self.sites |= found
            if not found:
                break
            before, other = self._again(step.batch), self._again(self.changed)
            left = self._difference(before, other)
            if left <= _SAME:
                break
        is_same = self._difference(step, before) <= _SAME
        if not self.sites or (is_same and all(x.fault.change is None for x in self.sites.values())):
            said = f"changed padding ({self.padding}) changes results by {change:.1e}"
            # Another check runs a sample without its padding.
            coverage.absent(self.topic, f"{said}, and no attention call was found that shows it")
            return
        coverage.made(self.topic, f"read from {self.padding}")
        tried = "no result"
        if left > _SAME:
            tried = f"results by {left:.1e} instead of {change:.1e}: another part of the model also sees it"
        tried = f"with padding hidden in this call, changed padding changes {tried}"
        tried = "the doctor could not change this mask" if is_same else tried
        for shown in self.sites.values():
            if shown.call.place not in done:
                done.update(at(shown.call.place))
                yield self._finding(shown, change, tried, self._blind(shown, before))

    def _finding(self, shown: _Shown, change: float, tried: str, blind: int) -> Finding:
        call, fault, seen = shown.call, shown.fault, shown.seen
        mask = seen.mask[1] if seen is not None and seen.mask else None
        what = fault.what.replace("Valid tokens see padding", f"Queries see the padding of {self.name}")
        evidence = (
            f"changing padded entries of {self.name} changes results by {change:.1e} (relative error)",
            f"{self.name} has {int(self.hidden.sum())} padded entries, and queries see them here",
        )
        alone, callers = self._callers(call)
        places = at(call.place, fault.place, mask, *callers)
        cause, remedy = fault.cause, fault.remedy or self._remedy(call)
        if blind:
            cause = f"This call's mask shows padding ({self.padding}), and hides real keys"
            remedy = f"Make the mask of this call from {self.padding} again: show real keys, and hide padding"
            tried = f"with padding hidden in this call, {counted(blind, 'query', 'queries')} would see no key"
        return Finding("mask-lost", what, places, (*evidence, *alone), cause, remedy, tried)

    def _callers(self, call: Call) -> tuple[tuple[str, ...], list[Place]]:
        """Say which calls of a line show padding if others do not, and name the lines that call them."""
        site = [x for x in self.step.calls if x.place == call.place]
        guilty = [x for x in site if self._site(x) in self.sites]
        if len(guilty) == len(site):
            return (), []
        said = f"{len(guilty)} of the {len(site)} calls of this line show it: change these calls alone"
        known = {line for x in site if x not in guilty for line in x.lines}
        callers = (next((line for line in x.lines if line not in known), "") for x in guilty)
        return (said,), [place_of(x) for x in dict.fromkeys(callers) if x]

    def _remedy(self, call: Call) -> str:
        shown, hidden = (f"({self.padding} {x} 0)" for x in ("!=", "=="))
        if marks_padding(self.padding):
            shown, hidden = hidden, shown
        modules = dict(self.step.subject.model.named_modules())
        if call.modules and isinstance(modules[call.modules[-1]], nn.MultiheadAttention):
            return f"Pass key_padding_mask={hidden} to the module"
        heads = len(call.rows) // len(self.valid)  # in the first dim
        dims = f".repeat_interleave({heads}, 0)" * (heads > 1)
        dims += f"[:, {', '.join(['None'] * (call.rows.dim() - 2))}]"
        if not call.is_torchs:
            return f"Hide padding: scores.masked_fill({hidden}{dims}, float('-inf'))"
        other = "mask & " if call.given.get("attn_mask") is not None or call.given.get("is_causal") else ""
        return f"Pass attn_mask={other}{shown}{dims}"

    def _difference(self, one: Step, other: Step) -> float:
        """Compare results. Rows of padding do not count, and a loss only counts without other results."""
        most = 0.0
        only_loss = all(x.dim() == 0 for x in one.results.values())
        for name, x in one.results.items():
            y = other.results.get(name)
            if y is None or x.shape != y.shape or (x.dim() == 0 and not only_loss) or not x.numel():
                continue
            if x.shape[:2] == self.valid.shape:
                x, y = x[self.valid], y[self.valid]
            most = max(most, change_of(y, x))
        return most

    def _site(self, call: Call) -> Site:
        """Identify the calls of all layers that share their lines and the numbers of queries and keys."""
        module = re.sub(r"\d+", "#", call.modules[-1] if call.modules else "")
        return " ".join(call.lines), module, call.rows.shape[-2], call.k_len

    def _shown(self, step: Step, other: Step) -> dict[Site, _Shown]:
        """Find the calls whose keys change at the padding, and whose unchanged queries see these keys."""
        said = Declared(valid=self.valid, padding=self.padding, mask=self.valid)
        found: dict[Site, _Shown] = {}
        for call in step.calls if len(step.calls) == len(other.calls) else ():
            site, visible = self._site(call), visible_in(call, len(self.valid))
            changes = self._changes(call, other.calls[call.number])
            if call.place is None or site in found or visible is None or changes is None:
                continue
            keys, queries = changes
            if (start := self._start(keys)) is None:
                continue
            own = visible.expand(len(keys), -1, -1)[..., start : start + self.valid.shape[1]]
            if bool((own & self.hidden[:, None] & ~queries[:, :, None]).any()):
                fault = Fault(SEEN, f"The batch has padding ({self.padding})")
                if (seen := seen_as(call, step, self.seen)) is not None:
                    fault = fault_of(seen, own, said, torch.ones_like(own[..., 0]))
                found[site] = _Shown(call, start, fault, seen, ~queries)
        return found

    def _changes(self, call: Call, other: Call) -> tuple[Tensor, Tensor] | None:
        """Find the keys (B, Sk) and the queries (B, Sq) that differ."""
        batch = len(self.valid)

        def rows(name: str) -> Tensor | None:
            a, b = call.given[name], other.given[name]
            if a.shape != b.shape or len(a) % batch or a.dim() < 3:
                return None
            found: Tensor = (a != b).reshape(batch, -1, *a.shape[-2:]).any(1)
            return found

        if not call.is_torchs:
            scores = rows("scores")
            if scores is None or call.given["dim"] not in (-1, call.rows.dim() - 1):
                return None
            # More scores of a changed query change.
            many = scores.sum(-1)
            fewest = many.masked_fill(many == 0, scores.shape[-1]).amin(1, keepdim=True)
            return (scores & (many == fewest)[:, :, None]).any(1), many > fewest
        query, key, value = (rows(x) for x in ("query", "key", "value"))
        if query is None or key is None or value is None or key.shape[1] != value.shape[1]:
            return None
        return key.any(-1) | value.any(-1), query.any(-1)

    def _start(self, changed: Tensor) -> int | None:
        """Find where the sequence begins among the keys, if exactly the keys of its padding changed."""
        row = int(changed.any(1).int().argmax())
        start = int(changed[row].int().argmax()) - int(self.hidden[row].int().argmax())
        fits = 0 <= start <= changed.shape[1] - self.hidden.shape[1]
        return start if fits and torch.equal(changed, self._keys(start, changed.shape[1])) else None

    def _keys(self, start: int, k_len: int) -> Tensor:
        """Mark the padding among the keys of a call, bool (B, Sk)."""
        return F.pad(self.hidden, (start, k_len - start - self.hidden.shape[1]))

    def _again(self, batch: Any) -> Step:
        """Run the step with mended masks, or with padding hidden where no change of a mask is known."""
        written = (x.fault for x in self.sites.values() if not x.call.is_torchs)
        faults = {x.place: x for x in written if x.change is not None}
        return self.step.again(batch, replace=self._replaced, mode=Changed(faults))

    def _replaced(self, call: Call) -> Tensor | None:
        mended = self._mended(call)
        return None if mended is None else mended.result_of()

    def _mended(self, call: Call) -> Call | None:
        """Hide the padding of a call. Masks of written-out attention change before their softmax."""
        if (shown := self.sites.get(self._site(call))) is None:
            return None
        change = shown.fault.change or (inverse if shown.fault.inverted and call.is_torchs else None)
        if change is None:
            return hiding(call, self._keys(shown.start, call.k_len))
        mask = {"attn_mask": change(call.given["attn_mask"])} if call.is_torchs else {}
        return replace(call, given=call.given | mask)

    def _blind(self, shown: _Shown, mended: Step) -> int:
        """Count the real queries of a call that see keys now, and no key in the mended step."""
        other = self._mended(mended.calls[shown.call.number])
        if other is None:
            return 0
        pairs = [x for y in (shown.call, other) if (x := visible_in(y, len(self.valid))) is not None]
        if len(pairs) < 2:
            return 0
        real = shown.queries & self.valid if shown.queries.shape == self.valid.shape else shown.queries
        now, then = (x.any(-1) for x in pairs)
        return int((now & ~then & real).sum())
