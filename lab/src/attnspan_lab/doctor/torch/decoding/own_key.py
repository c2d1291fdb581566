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
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, noise, sdpa

__all__ = ["SAME", "has_cache", "key_of_last", "longer", "own_key_findings"]

#: Results with a larger relative difference are not equal.
SAME = 1e-4


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
    return call.is_torchs and call.given["key"].shape[-2] > call.given["query"].shape[-2]


def _last(visible: Tensor) -> int:
    """Number of the last key that the last query sees, or -1."""
    shown = visible[:, -1].any(0).nonzero()
    return int(shown.max()) if len(shown) else -1


def key_of_last(step: Step, call: Call) -> int | None:
    """Find the key that is made from the token of the last query, by changing the token."""
    source, q_len = source_of(step, call), call.rows.shape[-2]
    if source is None or not call.is_torchs:
        return None

    def change(x: Tensor) -> Tensor:
        if x.shape[1] != q_len:
            return x
        x = x.clone()
        x[:, -1:] += noise(x[:, -1:])
        return x

    again = step.again(inject=(source, change), turn=call.turns[source])
    if len(again.calls) != len(step.calls):
        return None
    found = []
    for name in ("query", "key"):
        a, b = call.given[name], again.calls[call.number].given[name]
        if a.shape != b.shape:
            return None
        found.append((a != b).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist())
    queries, keys = found
    return keys[0] if queries == [q_len - 1] and len(keys) == 1 else None


def _finding(step: Step, call: Call, own: int, last: int, calls: list[Attention]) -> Finding | None:
    """Write the finding. A module that hides the own key from all queries does so on purpose."""
    source, k_len = source_of(step, call), call.given["key"].shape[-2]
    sizes = call.rows.shape[-2], k_len
    others = [x for x in step.calls if source_of(step, x) == source and not has_cache(x)]
    seen = [
        bool(visible[:, -1, key].all())
        for x in others[:1]
        if (visible := visible_in(x)) is not None and (key := key_of_last(step, x)) is not None
    ]
    if seen == [False]:
        return None
    upto = f"keys up to {last}" if last >= 0 else "no key"
    evidence = [f"the last query of this call sees {upto}, and its own key is {own} of {k_len}"]
    if seen:
        evidence.append(f"the call at {others[0].place} shows queries their own keys")
    tried, proven = "", False
    try:
        tried, proven = _tried(step, call, own - last)
    except CannotRun as error:
        tried = f"a longer row, for a comparison without the cache, is not possible: {error}"
    if not seen and not proven and not step.subject.is_causal:
        return None
    masks = [x.mask[1] for x in calls if x.place == call.place and x.mask and (x.q[-2], x.k[-2]) == sizes]
    severity = "" if proven else "note"
    what = "A query of a decode step does not see its own key here"
    return Finding(
        "own-key", what, at(call.place, *masks[:1]), tuple(evidence), tried=tried, severity=severity
    )


def _tried(step: Step, call: Call, offset: int) -> tuple[str, bool]:
    """Show the own keys, and compare with the same tokens at the front of a longer row, without the cache."""
    found = step.subject.tokens(step.batch)
    source = source_of(step, call)
    decoded = sum(x.rows.shape[-2] for x in step.calls if source_of(step, x) == source and has_cache(x))
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
    if not after < SAME < before:
        return f"with the own key visible, results differ from those without a cache by {after:.1e}", False
    text = f"with the own key visible, results differ from those without a cache by {after:.1e}"
    return f"{text} instead of {before:.1e} (relative)", True


def longer(batch: Any, shape: Any, many: int) -> Any:
    """Repeat the last token of a batch whose tokens have this shape (B, S)."""

    def repeated(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.shape[:2] == shape
        return torch.cat([x, x[:, -1:].expand(-1, many, *x.shape[2:])], 1) if fits else x

    return tree_map(repeated, batch)


def _mended(call: Call, offset: int) -> Tensor | None:
    """Compute a call in which each query also sees the keys behind its last one, up to its own."""
    visible, given = visible_in(call), call.given
    if visible is None:
        return None
    q_len, k_len = visible.shape[1:]
    own = _last(visible) + offset + torch.arange(q_len) - q_len + 1
    index = torch.arange(k_len)
    last = torch.where(visible, index, -1).amax(-1, keepdim=True)
    new = (index > last) & (index <= own[:, None])
    mask = given.get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        shown = (visible | new)[:, None]
    else:
        shown = mask.expand(*given["query"].shape[:-1], k_len).masked_fill(new[:, None], 0)
    return sdpa(**{**given, "attn_mask": shown, "is_causal": False, "dropout_p": 0.0})
