"""Keys of an attention call that come from the batch's own tokens, next to keys of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import changed_tokens
from attnspan_lab.doctor.torch.recording.watch import watching
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import first_line

__all__ = ["made_of_tokens", "own_pairs"]

#: Keys of one call from two runs with different tokens. A call of a library's operator may have none.
_Pair = tuple[Tensor | None, Tensor | None]


def own_pairs(
    calls: list[Attention], subject: Subject, batch: Any, length: int, coverage: Coverage
) -> dict[Attention, Tensor]:
    """Find the visible pairs (B, S, S) of the batch's own tokens in each call, without keys of a cache."""
    found, cached = dict[Attention, Tensor](), list[tuple[int, Attention]]()
    name, tokens = subject.tokens(batch) or ("", torch.empty(1, 0))
    rows = len(tokens)
    for i, x in enumerate(calls):
        if x.visible is None:
            why = f"the {x.kind} call at {x.place} does not show which pairs it computes"
            coverage.missed("masks", why)
        elif x.visible.shape[1:] == (length, length):
            found[x] = _by_element(x.visible, rows)
        elif x.visible.shape[1] == length and x.key is not None and not x.recomputed:
            cached.append((i, x))
    keys = _keys(subject, batch, calls) if cached else {}
    for i, x in cached:
        if isinstance(keys, str):
            coverage.missed("keys of a cache", f"{keys}, so the call at {x.place} was not examined")
        elif (start := _first_own(keys[i], x.k_len, length)) is not None:
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


def _first_own(keys: _Pair, k_len: int, length: int) -> int | None:
    """Find the first of the keys that other tokens change. None if not each token makes a key."""
    a, b = keys
    if a is None or b is None or a.shape != b.shape or a.shape[-2] != k_len:
        return None  # The number of keys depends on the tokens, or on earlier calls.
    differs = (a != b).flatten(0, -3).any(0).any(-1).nonzero().flatten().tolist()
    if not differs or differs[-1] - differs[0] + 1 > length or len(differs) <= length // 2:
        return None
    # A token may repeat the changed one by chance, so the last and the first key may be equal.
    return min(differs[0], k_len - length) if differs[-1] == k_len - 1 else int(differs[0])


def made_of_tokens(subject: Subject, batch: Any, calls: list[Attention]) -> set[int] | str:
    """Find the calls whose keys are made from the tokens. A text is the reason why nothing was found."""
    keys = _keys(subject, batch, calls)
    if isinstance(keys, str):
        return keys
    found = {i for i, (a, b) in keys.items() if a is None or b is None or not torch.equal(a, b)}
    places = {calls[i].place for i in found}
    return found | {i for i, x in enumerate(calls) if x.recomputed and x.place in places}


def _keys(subject: Subject, batch: Any, calls: list[Attention]) -> dict[int, _Pair] | str:
    """Run two copies of the model with different tokens, and list the keys of each call by its number.

    A checkpoint computes calls again, and these are left out. A text is the reason why nothing was found.
    """
    name, tokens = subject.tokens(batch) or ("", torch.empty(0))
    numbers = [i for i, x in enumerate(calls) if not x.recomputed]
    try:
        runs = [_run(subject, subject.with_tokens(batch, name, x)) for x in (tokens, changed_tokens(tokens))]
    except Exception as error:
        return f"a copy of the model does not run with other tokens ({first_line(error, 80)})"
    if {len(x) for x in runs} != {len(numbers)}:
        return "the number of attention calls depends on the tokens"
    return dict(zip(numbers, zip(*runs, strict=True), strict=True))


def _run(subject: Subject, batch: Any) -> list[Tensor | None]:
    subject = subject.copy()
    subject.model.eval()  # Dropout would change all keys.
    with watching(subject.rows(batch)) as watcher, torch.no_grad():
        watcher.record.keeps_keys = True
        subject.step(subject.model, batch, backward=False)
    return [x.key for x in watcher.calls]
