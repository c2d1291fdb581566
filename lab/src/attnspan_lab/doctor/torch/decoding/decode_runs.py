"""Runs of a model that decodes: a prefill and steps with a cache, and the same tokens in one prefill."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.torch.decoding.own_key import has_cache, key_of_last, longer
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Replace, Run, Step
from attnspan_lab.doctor.torch.recording.lineage import Lineage
from attnspan_lab.doctor.torch.subject import Subject, copied

__all__ = ["Runs", "runs_of", "starts"]

_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "kv_cache", "caches", "cache")
_STARTS, _POSITIONS = ("start_pos", "offset"), ("input_pos", "cache_position")
#: Positions of tokens (B, S), which the caller passes with a cache.
_PLACES = ("position_ids", "positions")
_STEPS = 3  # Decode steps that the doctor makes.

#: Calls a model several times, and tells the number of tokens after each call.
Drive = Callable[[Subject, Callable[[int], None]], dict[str, Tensor]]


@dataclass(eq=False)
class Runs:
    """A prefill with decode steps, and one prefill of these tokens.

    Attributes:
        steps, whole: The two runs.
        made, wanted: How the tensors of the two runs were made.
        groups: Attention calls of the prefill, and then of each step.
        lengths: Number of tokens of each group.
        size: Number of tokens of the other run's prefill.
        how: The comparison, in words.
    """

    steps: Step
    whole: Step
    made: Lineage
    wanted: Lineage
    groups: list[list[Call]]
    lengths: list[int]
    size: int
    how: str
    run: Run | None

    def repeat(self, replace: Replace) -> Runs:
        """Decode again with other results of attention calls."""
        steps = self.steps.again(run=self.run, replace=replace)
        return dataclasses.replace(self, steps=steps)


def runs_of(step: Step) -> Runs | None:
    """Run a model's decode steps, and one prefill. None if the model has no cache.

    Raises:
        CannotRun: The model has a cache, and the two ways cannot be compared. The message is the reason.
    """
    found, groups = step.subject.tokens(step.batch), _groups(step.calls)
    if found is None:
        return None
    subject = step.subject
    names = [x for x in subject.parameters if x in (*_CACHES, *_STARTS, *_POSITIONS)]
    config = getattr(subject.model, "config", None)
    if "decoder_input_ids" in subject.parameters or getattr(config, "is_encoder_decoder", False):
        if names:
            raise CannotRun("the model has an encoder and a decoder")
        return None
    length, lengths = found[1].shape[1], [x[0].rows.shape[-2] for x in groups]
    decodes = any(_more_keys(x) for group in groups[1:] for x in group)
    if decodes and sum(lengths) == length:
        return _inside(step, lengths, found[1].shape[:2])
    grows = all(_keys(y) >= sum(lengths[: i + 1]) for i, x in enumerate(groups) for y in x)
    if decodes and lengths[0] == length and grows:
        raise CannotRun("the model decodes tokens that are not in the batch")
    if names and step.calls and not _sees_later(step):
        return _driven(step, names, found[1].shape[:2])
    if any(has_cache(x) and key_of_last(step, x) is not None for x in step.calls):
        raise CannotRun("the batch is one step, and the tokens of its cache are unknown")
    return None


def _groups(calls: list[Call]) -> list[list[Call]]:
    """Cut calls where the model starts again with its first layer."""

    def again(x: Call) -> bool:
        first = calls[0]
        own = first.modules[-1] if first.modules else ""
        return x.modules == first.modules and x.turns.get(own, 0) > first.turns.get(own, 0)

    numbers = range(1, len(calls))
    many = next(
        (i for i in numbers if calls[i].rows.shape[-2] != calls[0].rows.shape[-2] or again(calls[i])),
        len(calls),
    )
    found = [calls[i : i + many] for i in range(0, len(calls), many or 1)]
    same = all(len(x) == many and len({y.rows.shape[-2] for y in x}) == 1 for x in found)
    return found if same else []


def _keys(call: Call) -> int:
    return int(call.given["key"].shape[-2] if call.is_torchs else call.rows.shape[-1])


def _more_keys(call: Call) -> bool:
    return _keys(call) > call.rows.shape[-2]


def _sees_later(step: Step) -> bool:
    """Whether tokens see later ones, as in an encoder, which does not decode."""
    shown = [x for x in map(visible_in, step.calls) if x is not None and x.shape[1] == x.shape[2]]
    return any(bool(x.triu(1).any()) for x in shown)


def _inside(step: Step, lengths: list[int], shape: Any) -> Runs:
    """Compare with a longer row, whose prefill has all tokens. Or decode the tokens of this row's prefill."""
    first, length = lengths[0], sum(lengths)
    named, why = _named(step.subject, step.batch), ""
    pairs = [(_part(named, shape, 0, first), named), (named, longer(named, shape, length))]
    for short, long in pairs if 2 * first > length else pairs[1:]:
        try:
            return _runs(step, short, long, "in one forward pass")
        except CannotRun as error:
            why = why or str(error)
    raise CannotRun(why)


def _runs(step: Step, short: Any, long: Any, how: str, drive: Drive | None = None) -> Runs:
    made, wanted = Lineage(step.lines), Lineage(step.lines)
    parts: list[tuple[int, int]] = []  # Tokens of each driven call, and attention calls so far.

    def run(own: Subject) -> dict[str, Tensor]:
        assert drive is not None
        return drive(own, lambda many: parts.append((many, len(made.attends))))

    steps = step.again(short, run=run if drive else None, mode=made)
    groups, lengths = _groups(steps.calls), [many for many, _ in parts]
    if drive is not None:
        edges = [0, *(calls for _, calls in parts)]
        groups = [steps.calls[i:j] for i, j in itertools.pairwise(edges)]
    else:
        lengths = [x[0].rows.shape[-2] for x in groups]
    whole = step.again(long, mode=wanted)
    first = whole.calls if drive is not None else next(iter(_groups(whole.calls)), [])
    if len(groups) < 2 or not first or {len(x) for x in groups} != {len(first)}:
        raise CannotRun("the attention calls of prefill and decode steps differ in number")
    if len(made.attends) != len(steps.calls) or len(wanted.attends) != len(whole.calls):
        raise CannotRun("the doctor cannot see all operands of attention")
    size = first[0].rows.shape[-2]
    if size < sum(lengths):
        raise CannotRun("no batch is a prefill of all its tokens")
    return Runs(steps, whole, made, wanted, groups, lengths, size, how, run if drive else None)


def _driven(step: Step, names: list[str], shape: Any) -> Runs | None:
    """Decode the last tokens of a batch through the model's arguments."""
    subject, length = step.subject, int(shape[1])
    named = {k: x for k, x in _named(subject, step.batch).items() if k != "labels"}
    if length < 3:
        raise CannotRun("the batch has less than three tokens, so there is no prefill")
    if subject.declared(step.batch).documents is not None:
        raise CannotRun("the batch has several documents")
    if any(not bool(x[:, -_STEPS - 1 :].all()) for x in subject.masks(step.batch)):
        raise CannotRun("the batch has padding behind its tokens")
    named |= {x: _places(subject, step, shape) for x in _PLACES if x in subject.parameters and x not in named}
    steps = min(_STEPS, length - 2)
    given = _given(subject, names, named)

    def drive(own: Subject, called: Callable[[int], None]) -> dict[str, Tensor]:
        found: list[dict[str, Tensor]] = []
        kept: dict[str, Any] = tree_map(copied, {k: named[k] for k in _CACHES if named.get(k) is not None})
        stops = [length - steps, *range(length - steps + 1, length + 1)]
        for start, stop in zip([0, *stops], stops, strict=False):
            batch = _part({k: x for k, x in named.items() if k not in kept}, shape, start, stop)
            out = own.model(**{**batch, **_at(given, named, start, stop), **kept})
            kept |= _returned(out, names)
            if start == 0 and not kept and not set(names) & {*_STARTS, *_POSITIONS}:
                raise CannotRun(f"the model takes {names[0]}, and its results have no cache")
            found.append(own.results(out, {}))
            called(stop - start)
        rows = [k for k, x in found[0].items() if x.shape[:2] == (shape[0], length - steps)]
        return {k: torch.cat([x[k] for x in found], 1) for k in rows if all(k in x for x in found)}

    whole = {**named, **_at(given, named, 0, length)} if not set(names) & set(_CACHES) else named
    how = f"with {', '.join(sorted({*names, *given}))}"
    return _runs(step, step.batch, whole, how, drive)


def _given(subject: Subject, names: list[str], named: Mapping[str, Any]) -> set[str]:
    """Name the arguments that the doctor passes in each step."""
    parameters = inspect.signature(type(subject.model).forward).parameters
    caches = [x for x in names if x in _CACHES]
    unknown = [x for x in caches if x not in named and parameters[x].default is parameters[x].empty]
    if unknown:
        raise CannotRun(f"the batch has no {unknown[0]}, and the doctor does not know its form")
    found = {x for x in names if x in _STARTS}
    found |= {x for x in names if x in _POSITIONS and not caches and x not in named}
    return found | ({"use_cache"} & set(parameters))


def _places(subject: Subject, step: Step, shape: Any) -> Tensor:
    """Count positions (B, S) from the first token that is no padding."""
    valid = next(iter(subject.masks(step.batch)), torch.ones(tuple(shape)))
    return (valid.long().cumsum(-1) - 1).clamp(min=0)


def _at(given: set[str], named: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    made: dict[str, Any] = {"use_cache": True} if "use_cache" in given else {}
    for name in given - {"use_cache"}:
        if name in _POSITIONS:
            made[name] = torch.arange(start, stop)
        else:
            first = named.get(name)
            made[name] = start if first is None else first + start
    return made


def _returned(out: Any, names: list[str]) -> dict[str, Any]:
    """Find the cache in a model's results: by its name, or as the last result of a tuple."""
    name = next((x for x in names if x in _CACHES), None)
    if name is None:
        return {}
    for key in _CACHES:
        found = out.get(key) if isinstance(out, Mapping) else getattr(out, key, None)
        if found is not None:
            return {name: found}
    last = out[-1] if isinstance(out, (tuple, list)) and len(out) > 1 else None
    is_cache = last is not None and (not isinstance(last, Tensor) or last.dim() > 3)
    return {name: last} if is_cache else {}


def _named(subject: Subject, batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    listed = batch if isinstance(batch, (tuple, list)) else [batch]
    return dict(zip(subject.parameters[1:], listed, strict=False))


def _part(batch: Mapping[str, Any], shape: Any, start: int, stop: int) -> dict[str, Any]:
    """Take tokens of a batch, with the entries of masks for all tokens up to the last one."""
    size, found = tuple(shape), dict[str, Any]()
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            found[name] = x
        elif x.dim() > 2 and x.shape[-2:] == (size[1], size[1]):
            found[name] = x[..., start:stop, :stop]
        elif tuple(x.shape[:2]) == size:
            found[name] = x[:, :stop] if "mask" in name else x[:, start:stop]
        elif x.dim() in (1, 3) and x.shape[-1] == size[1] and (x.dim() == 1 or x.shape[1] == size[0]):
            found[name] = x[..., start:stop]
        else:
            found[name] = x
    return found


def starts(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield the number of each decode step, and the number of its first token."""
    for number in range(1, len(runs.groups)):
        yield number, sum(runs.lengths[:number])
