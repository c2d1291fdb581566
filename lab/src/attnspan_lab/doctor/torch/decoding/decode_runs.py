"""Runs of a model that decodes: a prefill and steps with a cache, and the same tokens in one prefill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.torch.decoding.decode_arguments import (
    PLACES,
    Roles,
    at,
    caches_in,
    known_roles,
    named_in,
    part_of,
    returned,
    starts_beside,
    tried_roles,
)
from attnspan_lab.doctor.torch.decoding.own_key import has_cache, longer
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Run, Step, changed_tokens
from attnspan_lab.doctor.torch.recording.lineage import Attend, Lineage
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Pair", "Runs", "runs_of"]

_STEPS = 3  # Decode steps that the doctor makes.


@dataclass(frozen=True, eq=False)
class Pair:
    """An attention call of a decode step, and the prefill's call of the same layer.

    Attributes:
        layer: Number of the call in its step.
        call, other: The two calls.
        made, wanted: Their operands.
        tokens: Number of the step's last token in each call.
        sizes: Number of tokens of each call.
        start: Order of the last function before the step's calls.
    """

    layer: int
    call: Call
    other: Call
    made: Attend
    wanted: Attend
    tokens: tuple[int, int]
    sizes: tuple[int, int]
    start: int


@dataclass(eq=False)
class Runs:
    """A prefill with decode steps, and one prefill of these tokens.

    Attributes:
        steps, whole: The two runs.
        made, wanted: How the tensors of the two runs were made.
        groups: Attention calls of the prefill, and then of each step.
        others: Calls of the other run's prefill.
        lengths: Number of tokens of each group.
        size: Number of tokens of the other run's prefill.
        how: The comparison, in words.
    """

    steps: Step
    whole: Step
    made: Lineage
    wanted: Lineage
    groups: list[list[Call]]
    others: list[Call]
    lengths: list[int]
    size: int
    how: str
    run: Run | None

    def start(self, number: int) -> int:
        """Return the order of the last function before the calls of a group."""
        before = self.made.attends[self.groups[number - 1][-1].number]
        return 0 if before is None else before.order

    def pairs(self) -> Iterator[Pair]:
        """Yield the calls of all decode steps, layer by layer, until operands are unknown."""
        for layer, other in enumerate(self.others):
            for number in range(1, len(self.groups)):
                call = self.groups[number][layer]
                made, wanted = self.made.attends[call.number], self.wanted.attends[other.number]
                if made is None or wanted is None:
                    return
                many, start = self.lengths[number], self.start(number)
                # A library may pack heads in another way for one query.
                if made.query.value.shape[-2] == many:
                    tokens = many - 1, sum(self.lengths[: number + 1]) - 1
                    yield Pair(layer, call, other, made, wanted, tokens, (many, self.size), start)


def runs_of(step: Step) -> list[Runs]:
    """Run a model's decode steps, and one prefill. Nothing if the model has no cache.

    The doctor may not know if an argument counts tokens. Then it runs the steps in several ways.

    Raises:
        CannotRun: The model has a cache, and the two ways cannot be compared. The message is the reason.
    """
    found, groups = step.subject.tokens(step.batch), _groups(step.calls)
    if found is None:
        return []
    subject = step.subject
    roles: Roles | None = known_roles(subject)
    config = getattr(subject.model, "config", None)
    if "decoder_input_ids" in subject.parameters or getattr(config, "is_encoder_decoder", False):
        if roles:
            raise CannotRun("the model has an encoder and a decoder")
        return []
    length, lengths = found[1].shape[1], [x[0].q_len for x in groups]
    decodes = any(x.k_len > x.q_len for group in groups[1:] for x in group)
    # The first sequence of the batch may belong to an encoder.
    given = [found[1], *(x for x in subject.named(step.batch).values() if x.dim() > 1)]
    decoded = next((x.shape[:2] for x in given if decodes and x.shape[1] == sum(lengths)), None)
    if decoded is not None:
        return [_inside(step, lengths, decoded)]
    grows = all(any(y.k_len >= sum(lengths[: i + 1]) for y in x) for i, x in enumerate(groups))
    if decodes and lengths[0] == length and grows:
        raise CannotRun("the model decodes tokens that are not in the batch")
    causal = _causal_lengths(step)
    if step.calls and causal != set():
        own = (x.shape[:2] for x in given if causal and x.shape[1] in causal)
        shape = next(own, found[1].shape[:2])
        roles = roles or tried_roles(step, shape)
        if roles is not None:
            others = starts_beside(step, roles) if "cache" in roles.values() else []
            return [_driven(step, roles, shape), *_possible(step, others, shape)]
    if any(map(has_cache, step.calls)) and _has_old_keys(step, *found):
        raise CannotRun("the batch is one step, and the tokens of its cache are unknown")
    return []


def _possible(step: Step, others: list[Roles], shape: Any) -> Iterator[Runs]:
    for roles in others:
        try:
            yield _driven(step, roles, shape)
        except CannotRun:  # The argument does not count tokens.
            continue


def _has_old_keys(step: Step, name: str, tokens: Tensor) -> bool:
    """Whether the tokens of the batch change a key for each query of a call, and the call has more keys."""
    other = step.again(step.subject.with_tokens(step.batch, name, changed_tokens(tokens)))
    pairs = [(x, y) for x, y in zip(step.calls, other.calls, strict=False) if has_cache(x) and y.is_torchs]
    keys = [(x.q_len, x.given["key"], y.given["key"]) for x, y in pairs]
    changed = [(n, (a != b).any(-1).flatten(0, -2).any(0)) for n, a, b in keys if a.shape == b.shape]
    return any(int(x.sum()) == n for n, x in changed)


def _groups(calls: list[Call]) -> list[list[Call]]:
    """Cut the decoder's calls where the model starts again with its first layer."""
    calls = _decoder(calls)

    def starts(x: Call) -> bool:
        first = calls[0]
        return x.q_len != first.q_len or (x.modules == first.modules and x.turns != first.turns)

    many = next((i for i, x in enumerate(calls) if starts(x)), len(calls))
    found = _cut(calls, many)
    same = all(len(x) == many and len({y.q_len for y in x}) == 1 for x in found)
    return found if same else []


def _decoder(calls: list[Call]) -> list[Call]:
    """Leave out modules that run less often than others, or with as many queries in each step: an encoder."""
    sizes = defaultdict[tuple[str, ...], set[int]](set)
    for x in calls:
        sizes[x.modules].add(x.q_len)
    varied = {x for x, found in sizes.items() if len(found) > 1} or set(sizes)
    times = Counter(x.modules for x in calls if x.modules in varied)
    return [x for x in calls if times[x.modules] == max(times.values())]


def _cut(calls: list[Call], many: int) -> list[list[Call]]:
    return [calls[i : i + many] for i in range(0, len(calls), many or 1)]


def _causal_lengths(step: Step) -> set[int] | None:
    """List the lengths of calls whose tokens do not see later ones. None if no call shows its pairs.

    An encoder has no such call, and does not decode.
    """
    shown = [x for x in map(visible_in, step.calls) if x is not None and x.shape[1] == x.shape[2]]
    return {x.shape[1] for x in shown if not bool(x.triu(1).any())} if shown else None


def _inside(step: Step, lengths: list[int], shape: Any) -> Runs:
    """Compare with a longer row, whose prefill has all tokens. Or decode the tokens of this row's prefill."""
    first, length = lengths[0], sum(lengths)
    named, why = named_in(step.subject, step.batch), ""
    pairs = [(part_of(named, shape, 0, first), named), (named, longer(named, shape, length))]
    for short, long in pairs if 2 * first > length else pairs[1:]:
        try:
            return _runs(step, short, long, "in one forward pass")
        except CannotRun as error:
            why = why or str(error)
    raise CannotRun(why)


def _runs(
    step: Step, short: Any, long: Any, how: str, run: Run | None = None, lengths: list[int] | None = None
) -> Runs:
    """Run a batch with decode steps, in one call or by a function, and a batch that is one prefill."""
    made, wanted = Lineage(step.lines), Lineage(step.lines)
    steps, whole = step.again(short, run=run, mode=made), step.again(long, mode=wanted)
    if lengths is not None:
        calls = _decoder(steps.calls)
        first = [x for x in whole.calls if x.modules in {y.modules for y in calls}]
        groups = _cut(calls, len(first))
    else:
        first, groups = next(iter(_groups(whole.calls)), []), _groups(steps.calls)
        lengths = [x[0].q_len for x in groups]
    if len(groups) < 2 or len(groups) != len(lengths) or {len(x) for x in groups} != {len(first)}:
        raise CannotRun("the attention calls of prefill and decode steps differ in number")
    if len(made.attends) != len(steps.calls) or len(wanted.attends) != len(whole.calls):
        raise CannotRun("the doctor cannot see all operands of attention")
    size = first[0].q_len
    if size < sum(lengths):
        raise CannotRun("no batch is a prefill of all its tokens")
    return Runs(steps, whole, made, wanted, groups, first, lengths, size, how, run)


def _driven(step: Step, roles: Roles, shape: Any) -> Runs:
    """Decode the last tokens of a batch through the model's arguments."""
    subject, length = step.subject, int(shape[1])
    named = {k: x for k, x in named_in(subject, step.batch).items() if k != "labels"}
    if length < 3:
        raise CannotRun("the batch has less than three tokens, so there is no prefill")
    if subject.declared(step.batch).documents is not None:
        raise CannotRun("the batch has several documents")
    if any(not bool(x[:, -_STEPS - 1 :].all()) for x in subject.masks(step.batch)):
        raise CannotRun("the batch has padding behind its tokens")
    named |= {x: _places(subject, step, shape) for x in PLACES if x in subject.parameters and x not in named}
    steps = min(_STEPS, length - 2)
    lengths = [length - steps, *[1] * steps]

    def run(own: Subject) -> dict[str, Tensor]:
        found, stop = list[dict[str, Tensor]](), 0
        kept = caches_in(roles, named)
        for many in lengths:
            start, stop = stop, stop + many
            batch = part_of({k: x for k, x in named.items() if k not in kept}, shape, start, stop)
            out = own.model(**{**batch, **at(subject, roles, named, start, stop), **kept})
            kept |= returned(out, roles)
            if not kept and set(roles.values()) == {"cache"}:
                raise CannotRun(f"the model takes {next(iter(roles))}, and its results have no cache")
            found.append(own.results(out, {}))
        rows = [k for k, x in found[0].items() if x.shape[:2] == (shape[0], lengths[0])]
        return {k: torch.cat([x[k] for x in found], 1) for k in rows if all(k in x for x in found)}

    passed = at(subject, roles, named, 0, length)
    whole = named if set(roles.values()) == {"cache"} else {**named, **passed}
    how = f"with {', '.join(sorted({*roles, *passed})) or 'the keys that the model keeps'}"
    return _runs(step, step.batch, whole, how, run, lengths)


def _places(subject: Subject, step: Step, shape: Any) -> Tensor:
    """Count positions (B, S) from the first token that is no padding."""
    valid = next(iter(subject.masks(step.batch)), torch.ones(tuple(shape)))
    return (valid.long().cumsum(-1) - 1).clamp(min=0)
