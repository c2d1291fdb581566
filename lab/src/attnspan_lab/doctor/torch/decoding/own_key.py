"""Queries of a decode step that do not see their own key, although other queries of the module do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.isolation.axes import source_of
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.attention_call import Attention, seen_as
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, changed_tokens
from attnspan_lab.doctor.torch.recording.differences import SAME

__all__ = ["has_cache", "key_of_last", "longer", "own_key_findings"]


def own_key_findings(step: Step, calls: list[Attention], done: set[Place]) -> Iterator[Finding]:
    """Yield calls with a cache whose last query does not see the key of its own token.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        done: Lines that have a finding.
    """
    checked = set(done)
    for call in step.calls:
        visible = visible_in(call) if has_cache(call) else None
        if call.place is None or call.place in checked or visible is None or bool(visible[:, -1].all()):
            continue
        checked.add(call.place)
        own = key_of_last(step, call)
        if own is None or bool(visible[:, -1, own].any()):
            continue
        if (finding := _finding(step, call, own, _last(visible), calls)) is not None:
            done.add(call.place)
            yield finding


def has_cache(call: Call) -> bool:
    """Whether a call of torch's function has more keys than queries."""
    return call.is_torchs and call.k_len > call.q_len


def _last(visible: Tensor) -> int:
    """Number of the last key that the last query sees, or -1."""
    shown = visible[:, -1].any(0).nonzero()
    return int(shown.max()) if len(shown) else -1


def key_of_last(step: Step, call: Call) -> int | None:
    """Find the key that is made from the token of the last query, by changing the token."""
    source = source_of(step, call)
    if source is None or not call.is_torchs:
        return None

    def change(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], changed_tokens(x[:, -1:])], 1) if x.shape[1] == call.q_len else x

    again = step.again(inject=(source, change), turn=call.turns[source])
    if len(again.calls) != len(step.calls):
        return None
    other = again.calls[call.number].given
    pairs = [(call.given[x], other[x]) for x in ("query", "key")]
    if any(a.shape != b.shape for a, b in pairs):
        return None
    queries, keys = ((a != b).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist() for a, b in pairs)
    return int(keys[0]) if queries == [call.q_len - 1] and len(keys) == 1 else None


def _finding(step: Step, call: Call, own: int, last: int, calls: list[Attention]) -> Finding | None:
    """Write the finding. A module that hides the own key from all queries does so on purpose."""
    source = source_of(step, call)
    other = next((x for x in step.calls if source_of(step, x) == source and not has_cache(x)), None)
    visible = None if other is None else visible_in(other)
    key = None if other is None or visible is None else key_of_last(step, other)
    shows = None if visible is None or key is None else bool(visible[:, -1, key].all())
    if shows is False:
        return None
    upto = f"keys up to {last}" if last >= 0 else "no key"
    evidence = [f"the last query of this call sees {upto}, and its own key is {own} of {call.k_len}"]
    if shows and other is not None:
        evidence.append(f"the call at {other.place} shows queries their own keys")
    try:
        tried, proven = _tried(step, call, own - last)
    except CannotRun as error:
        tried, proven = f"a longer row, for a comparison without the cache, is not possible: {error}", False
    if not shows and not proven and not step.subject.is_causal:
        return None
    mask = None if (seen := seen_as(call, step, calls)) is None or seen.mask is None else seen.mask[1]
    what, places = "A query of a decode step does not see its own key here", at(call.place, mask)
    severity = "" if proven else "note"
    return Finding("own-key", what, places, tuple(evidence), tried=tried, severity=severity)


def _tried(step: Step, call: Call, offset: int) -> tuple[str, bool]:
    """Show the own keys, and compare with the same tokens at the front of a longer row, without the cache."""
    found = step.subject.tokens(step.batch)
    source = source_of(step, call)
    decoded = sum(x.q_len for x in step.calls if source_of(step, x) == source and has_cache(x))
    if found is None or not decoded:
        return "", False
    shape = found[1].shape[:2]

    def mended(other: Call) -> Tensor | None:
        return _mended(other, offset) if other.place == call.place and has_cache(other) else None

    wanted, shown = step.again(longer(step.batch, shape, decoded)), step.again(replace=mended)
    rows = [k for k, x in step.results.items() if x.shape[:2] == shape and k in wanted.results]
    if not rows or any(wanted.results[k].shape[1] < shape[1] for k in rows):
        return "", False
    before, after = (
        max(distance(x.results[k], wanted.results[k][:, : shape[1]]) for k in rows) for x in (step, shown)
    )
    text = f"with the own key visible, results differ from those without a cache by {after:.1e}"
    proven = after < SAME < before
    return f"{text} instead of {before:.1e} (relative)" if proven else text, proven


def longer(batch: Any, shape: Any, many: int) -> Any:
    """Repeat the last token of a batch whose tokens have this shape (B, S)."""

    def repeated(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.shape[:2] == shape
        return torch.cat([x, x[:, -1:].expand(-1, many, *x.shape[2:])], 1) if fits else x

    return tree_map(repeated, batch)


def _mended(call: Call, offset: int) -> Tensor | None:
    """Compute a call in which each query also sees the keys behind its last one, up to its own."""
    visible, mask = visible_in(call), call.given.get("attn_mask")
    if visible is None:
        return None
    index = torch.arange(call.k_len)
    own = _last(visible) + offset + torch.arange(call.q_len) - call.q_len + 1
    last = torch.where(visible, index, -1).amax(-1, keepdim=True)
    new = (index > last) & (index <= own[:, None])
    if mask is None or mask.dtype == torch.bool:
        shown = (visible | new)[:, None]
    else:
        shown = mask.expand(*call.rows.shape[:-1], call.k_len).masked_fill(new[:, None], 0)
    return call.result_of(attn_mask=shown, is_causal=False)
