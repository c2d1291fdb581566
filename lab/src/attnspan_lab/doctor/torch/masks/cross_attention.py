"""Causal masks where the keys belong to another sequence than the queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.new_keys import made_of_tokens
from attnspan_lab.doctor.torch.isolation.sequences import sequences
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.masks.hiding_values import highest_hiding, highest_hiding_in
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Call, Step, changed_tokens, sdpa
from attnspan_lab.doctor.words import counted

__all__ = ["cross_findings", "visible_in"]


def visible_in(call: Call, rows: int = 1) -> Tensor | None:
    """Read the pairs that some head sees, bool (B, Sq, Sk), or (1, Sq, Sk) if samples share them.

    Args:
        call: The call.
        rows: Number of samples, if the first dim may be batch and heads.
    """
    if not call.is_torchs:
        scores: Tensor = call.given["scores"]
        keys_last = scores.dim() > 2 and call.given["dim"] in (-1, scores.dim() - 1)
        return _by_sample(scores > highest_hiding(scores), rows) if keys_last else None
    query, mask = call.given["query"], call.given.get("attn_mask")
    sizes = query.shape[-2], call.given["key"].shape[-2]
    visible = torch.ones(sizes, dtype=torch.bool, device=query.device)
    visible = visible.tril() if call.given.get("is_causal") else visible
    if mask is None:
        return visible[None]
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask > highest_hiding_in(mask, query, call.given["key"], call.given.get("scale"))
    return _by_sample(shown.expand(*shown.shape[:-2], *sizes), rows) & visible


def _by_sample(shown: Tensor, rows: int) -> Tensor:
    """Bring pairs (B, H, Sq, Sk) or (B * H, Sq, Sk) to (B, Sq, Sk). Other layouts count as one sample."""
    if shown.dim() == 4:
        return shown.any(1)
    rows = rows if shown.dim() == 3 and len(shown) % rows == 0 else 1
    return shown.reshape(rows, -1, *shown.shape[-2:]).any(1)


def _is_causal(visible: Tensor | None) -> bool:
    """Whether query i sees the keys up to key i. Some keys may be hidden for all queries."""
    if visible is None or min(visible.shape[1:]) < 2:
        return False
    visible = visible.any(0)
    first = torch.ones_like(visible).tril()
    shown = visible.any(0)
    return bool((visible == (first & shown)).all()) and bool(shown[1])


def cross_findings(step: Step, calls: list[Attention], done: set[Place]) -> Iterator[Finding]:
    """Yield calls with a causal mask whose keys do not depend on the tokens of the queries.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        done: Lines that have a finding.
    """
    subject, batch, places = step.subject, step.batch, set[Place | None]()
    if subject.expected.get("streaming"):
        return
    guilty = [x for x in step.calls if x.place is not None and _is_causal(visible_in(x))]
    guilty = [x for x in guilty if x.place not in done]
    for name in sequences(subject, batch) if guilty else []:
        changed = step.again(subject.with_tokens(batch, name, changed_tokens(subject.named(batch)[name])))
        if len(changed.calls) != len(step.calls):
            continue
        moved = [x for x in guilty if _differ(x, changed, "query" if x.is_torchs else "scores")]
        if any(not x.is_torchs for x in moved):
            made = made_of_tokens(replace(subject, first=name), batch, calls)
            # If it is unknown which keys are made from the tokens, no call has a finding.
            places = {x.place for i, x in enumerate(calls) if isinstance(made, str) or i in made}
        for call in moved:
            own = _differ(call, changed, "key", "value") if call.is_torchs else call.place in places
            if not own and call.place is not None and call.place not in done:
                done.add(call.place)
                yield _finding(call, name)


def _differ(call: Call, other: Step, *names: str) -> bool:
    pairs = [(call.given[x], other.calls[call.number].given[x]) for x in names]
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _finding(call: Call, name: str) -> Finding:
    visible = visible_in(call)
    assert visible is not None
    visible = visible.any(0)
    evidence = [
        f"{counted(int((~visible).sum()), 'pair')} of {visible.numel()} are hidden",
        f"changing {name} changes the queries, and not the keys",
    ]
    if unseen := int((~visible.any(0)).sum()):
        evidence.append(f"no query sees the last {counted(unseen, 'key')}")
    tried = ""
    if call.is_torchs:
        kept = {k: x for k, x in call.given.items() if k not in ("attn_mask", "is_causal", "dropout_p")}
        error = distance(sdpa(**kept), call.result)
        tried = f"without the mask, results of this call change by {error:.1e} (relative)"
    what = "A causal mask hides keys of another sequence here"
    return Finding("cross-causal", what, at(call.place), tuple(evidence), tried=tried)
