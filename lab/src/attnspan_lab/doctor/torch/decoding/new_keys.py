"""Keys of an attention call that come from the batch's own tokens, next to keys of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.watch import watching
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["made_of_tokens", "own_pairs"]


def own_pairs(
    calls: list[Attention], subject: Subject, batch: Any, length: int, coverage: Coverage
) -> dict[Attention, Tensor]:
    """Find the visible pairs (B, S, S) of the batch's own tokens in each call, without keys of a cache."""
    found, cached = dict[Attention, Tensor](), list[Attention]()
    name, tokens = subject.tokens(batch) or ("", torch.empty(1, 0))
    rows = len(tokens)
    for x in calls:
        if x.visible is None:
            why = f"the {x.kind} call at {x.place} does not show which pairs it computes"
            coverage.missed("masks", why)
        elif x.visible.shape[1:] == (length, length):
            found[x] = _by_element(x.visible, rows)
        elif x.visible.shape[1] == length and x.key is not None and not x.recomputed:
            cached.append(x)
    if not cached:
        return found
    places = _own_keys(subject, batch, calls)
    for x in cached:
        if isinstance(places, str):
            coverage.missed("keys of a cache", f"{places}, so the call at {x.place} was not examined")
        elif (start := places.get(calls.index(x))) is not None:
            x.first_own = start
            found[x] = _by_element(x.visible[..., start : start + length], rows)  # type: ignore[index]
        else:
            why = f"the keys at {x.place} are not made from {name}, so their mask was not examined for it"
            coverage.missed("other keys", why)
    return found


def _by_element(visible: Tensor, rows: int) -> Tensor:
    """Join the pairs of groups of a batch element, such as windows: bool (1, S, S) or (B, S, S)."""
    joined = rows if len(visible) % rows == 0 else 1
    return visible.reshape(joined, -1, *visible.shape[1:]).any(1)


def _own_keys(subject: Subject, batch: Any, calls: list[Attention]) -> dict[int, int] | str:
    """Find the first own key of each call whose queries and keys differ in number.

    Two copies of the model run with different tokens. The keys that differ are made from the tokens.

    Args:
        subject, batch: The step.
        calls: Calls of this step.

    Returns:
        The index of the first own key by number of the call. A call is left out if its keys are not made
        from each token, as in cross-attention. A text is the reason why nothing was found.
    """
    name, tokens = subject.tokens(batch) or ("", torch.empty(0))
    numbers = [i for i, x in enumerate(calls) if x.key is not None and not x.recomputed]
    try:
        own, other = (
            _keys_of(subject.copy(), subject.with_tokens(batch, name, x), numbers)
            for x in (tokens, _changed(tokens))
        )
    except Exception as error:
        return f"a copy of the model does not run with other tokens ({str(error)[:80]})"
    found: dict[int, int] = {}
    for i, a, b in zip(numbers, own, other, strict=True):
        if a.shape != b.shape:
            return "the number of keys depends on the tokens"
        if a.shape[-2] != calls[i].k[-2]:
            return "the number of keys depends on earlier calls"
        differs = (a != b).flatten(0, -3).any(0).any(-1).nonzero().flatten().tolist()
        length = tokens.shape[1]
        if differs and differs[-1] - differs[0] + 1 <= length and len(differs) > length // 2:
            # A token may repeat the changed one by chance, so the last and the first key may be equal.
            found[i] = min(differs[0], a.shape[-2] - length) if differs[-1] == a.shape[-2] - 1 else differs[0]
    return found


def made_of_tokens(subject: Subject, batch: Any, calls: list[Attention]) -> set[int] | str:
    """Find the calls whose keys are made from the tokens. A text is the reason why nothing was found."""
    name, tokens = subject.tokens(batch) or ("", torch.empty(0))
    try:
        own, other = (
            _all_keys(subject, subject.with_tokens(batch, name, x)) for x in (tokens, _changed(tokens))
        )
    except Exception as error:
        return f"a copy of the model does not run with other tokens ({str(error)[:80]})"
    numbers = [i for i, x in enumerate(calls) if not x.recomputed]
    if not len(own) == len(other) == len(numbers):
        return "the number of attention calls depends on the tokens"
    found = {
        i
        for i, a, b in zip(numbers, own, other, strict=True)
        if a is None or b is None or a.shape != b.shape or not torch.equal(a, b)
    }
    places = {calls[i].place for i in found}
    return found | {i for i, x in enumerate(calls) if x.recomputed and x.place in places}


def _all_keys(subject: Subject, batch: Any) -> list[Tensor | None]:
    subject = subject.copy()
    subject.model.eval()  # Dropout would change all keys.
    with watching(subject.rows(batch)) as watcher, torch.no_grad():
        watcher.record.keeps_keys = True
        subject.step(subject.model, batch, backward=False)
    return [x.key for x in watcher.calls]


def _keys_of(subject: Subject, batch: Any, numbers: list[int]) -> list[Tensor]:
    with watching(subject.rows(batch)) as watcher, torch.no_grad():
        subject.step(subject.model, batch, backward=False)
    keys = [watcher.calls[i].key for i in numbers]
    if any(x is None for x in keys):
        raise RuntimeError("the number of keys depends on the tokens")
    return [x.detach() for x in keys if x is not None]


def _changed(tokens: Tensor) -> Tensor:
    """Replace each token by another one: a number of the batch, or a shifted vector."""
    if tokens.is_floating_point():
        return tokens + 1
    highest = int(tokens.max())
    return torch.where(tokens == highest, tokens - 1 if highest else tokens + 1, tokens + 1)
