"""Arguments of models that decode: a cache, the number of its tokens, or positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.places import is_users_class
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step
from attnspan_lab.doctor.torch.subject import Subject, copied

__all__ = [
    "PLACES",
    "Roles",
    "at",
    "caches_in",
    "known_roles",
    "named_in",
    "part_of",
    "returned",
    "tried_roles",
]

#: Names of arguments: each is a "cache", the "start" of a step, or "positions".
Roles = dict[str, str]
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "kv_cache", "caches", "cache")
_KNOWN = {
    **dict.fromkeys(_CACHES, "cache"),
    **dict.fromkeys(("start_pos", "offset"), "start"),
    **dict.fromkeys(("input_pos", "cache_position"), "positions"),
}
#: Positions of tokens (B, S), which the caller passes with a cache.
PLACES = ("position_ids", "positions")
_MOST = 8  # Arguments that the doctor tries.


def known_roles(subject: Subject) -> Roles:
    """Find the arguments with usual names."""
    return {x: _KNOWN[x] for x in subject.parameters if x in _KNOWN}


def tried_roles(step: Step, shape: Any) -> Roles | None:
    """Find the argument with which the last token of a batch sees the keys of all tokens before it.

    No argument is needed if the model keeps keys and counts them. None if no keys are kept.

    Args:
        step: The step.
        shape: Batch size and number of tokens.
    """
    if shape[1] < 3:
        return None
    named = named_in(step.subject, step.batch)
    given = {**_defaults(step.subject), **named}
    caches: list[Roles] = [{k: "cache"} for k, x in given.items() if _is_empty(x)]
    tried = [{}, *starts_beside(step, {}), *caches][:_MOST]
    return next((x for x in tried if _sees_all(step, x, named, shape)), None)


def starts_beside(step: Step, roles: Roles) -> list[Roles]:
    """List roles in which an argument of 0 may count the cached tokens too."""
    given = {**_defaults(step.subject), **named_in(step.subject, step.batch)}
    counted = {"start", "positions"} & set(roles.values())
    return [{**roles, k: "start"} for k, x in given.items() if _is_zero(x) and not counted]


def _is_zero(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.is_floating_point() and x.dtype != torch.bool and not bool(x.any())
    return type(x) is int and x == 0


def _is_empty(x: Any) -> bool:
    """Whether an argument may be a cache before a prefill: nothing, or an object of the user's class."""
    return x is None or (isinstance(x, (list, dict)) and not x) or is_users_class(type(x))


def _sees_all(step: Step, roles: Roles, named: Mapping[str, Any], shape: Any) -> bool:
    """Run all tokens but the last one, and then the last one. It must see one key more than the others."""
    length = shape[1]

    def run(own: Subject) -> dict[str, Tensor]:
        kept = caches_in(roles, named)
        for start, stop in ((0, length - 1), (length - 1, length)):
            batch = part_of({k: x for k, x in named.items() if k not in kept}, shape, start, stop)
            kept |= returned(own.model(**{**batch, **at(own, roles, named, start, stop), **kept}), roles)
        return {}

    def seen(call: Call) -> set[int]:
        visible = visible_in(call)
        return {call.k_len} | (set() if visible is None else {int(visible[:, -1].sum(-1).max())})

    try:
        calls = step.again(run=run).calls
    except CannotRun:
        return False
    sizes = [[(x.q_len, n) for x in calls if x.turns.get("") == turn for n in seen(x)] for turn in (1, 2)]
    return (length - 1, length - 1) in sizes[0] and (1, length) in sizes[1]


def _defaults(subject: Subject) -> dict[str, Any]:
    parameters = inspect.signature(type(subject.model).forward).parameters
    return {k: x.default for k, x in parameters.items()}


def at(subject: Subject, roles: Roles, named: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Make the arguments of a step that the batch does not have: its first token, or its positions.

    Raises:
        CannotRun: The model needs a cache that the batch does not have.
    """
    defaults, caches = _defaults(subject), [k for k, x in roles.items() if x == "cache"]
    unknown = [x for x in caches if x not in named and defaults[x] is inspect.Parameter.empty]
    if unknown:
        raise CannotRun(f"the batch has no {unknown[0]}, and the doctor does not know its form")
    starts = [k for k, x in roles.items() if x == "start"]
    made: dict[str, Any] = {x: start if named.get(x) is None else named[x] + start for x in starts}
    places = [k for k, x in roles.items() if x == "positions" and not caches and k not in named]
    made |= {x: torch.arange(start, stop) for x in places}
    return made | ({"use_cache": True} if "use_cache" in defaults else {})


def caches_in(roles: Roles, named: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the caches of a batch, which steps change."""
    caches = {k: named[k] for k, x in roles.items() if x == "cache" and named.get(k) is not None}
    return tree_map(copied, caches)  # type: ignore[no-any-return]


def returned(out: Any, roles: Roles) -> dict[str, Any]:
    """Find the cache in a model's results: by its name, or as the last result of a tuple."""
    name = next((k for k, x in roles.items() if x == "cache"), None)
    if name is None:
        return {}
    for key in (name, *_CACHES):
        found = out.get(key) if isinstance(out, Mapping) else getattr(out, key, None)
        if found is not None:
            return {name: found}
    last = out[-1] if isinstance(out, (tuple, list)) and len(out) > 1 else None
    is_cache = last is not None and (not isinstance(last, Tensor) or last.dim() > 3)
    return {name: last} if is_cache else {}


def named_in(subject: Subject, batch: Any) -> dict[str, Any]:
    """Name the arguments of a batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    listed = batch if isinstance(batch, (tuple, list)) else [batch]
    return dict(zip(subject.parameters[1:], listed, strict=False))


def part_of(batch: Mapping[str, Any], shape: Any, start: int, stop: int) -> dict[str, Any]:
    """Take tokens of a batch, with the entries of masks for all tokens up to the last one."""
    rows, length = shape

    def part(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return tree_map(copied, x)  # The call may write to it.
        if x.dim() > 2 and x.shape[-2:] == (length, length):
            return x[..., start:stop, :stop]
        if x.shape[:2] == shape:
            return x[:, :stop] if "mask" in name else x[:, start:stop]
        has_tokens = x.shape == (length,) or (x.dim() == 3 and x.shape[1:] == (rows, length))
        return x[..., start:stop] if has_tokens else x

    return {k: part(k, x) for k, x in batch.items()}
