"""Python loops that call attention once for each head, sample or document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnspan import causal, segments
from attnspan.torch import attention
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_installed
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Call, Step, awake, noise, sdpa
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.words import first_line, listed

__all__ = ["loop_findings"]

_FEWEST = 4  # calls that are a loop
_SAME = 1e-4  # relative difference of rounding. Other shapes change the order of sums
_MOST = 4  # groups of calls that are tried in a step
_OPERANDS = ("query", "key", "value")


def loop_findings(step: Step, calls: list[Attention], done: set[Place]) -> Iterator[Finding]:
    """Yield lines that call attention several times, although one call would do.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        done: Lines that have a finding.
    """
    groups = _groups(step)[:_MOST]
    changeable = awake(step) if groups else step
    for group in groups:
        place = group[0].place
        if place is None or place in done or is_installed(place.file):
            continue
        if not _is_independent(changeable, {x.number for x in group}):
            continue
        error = _together(group)
        if isinstance(error, float) and error > ROUNDING.get(group[0].rows.dtype, _SAME):
            continue
        done.add(place)
        yield _finding(group, calls, error)


def _groups(step: Step) -> list[list[Call]]:
    """List calls at one line: of one module, or of sibling modules in one call of their parent.

    Layers are such calls too.
    """
    found: dict[Any, list[Call]] = defaultdict(list)
    for call in step.calls:
        parents = call.modules[:-1]
        found[call.place, call.is_torchs, call.modules, 0].append(call)
        found[call.place, call.is_torchs, parents, 1 + call.turns.get("".join(parents[-1:]), 0)].append(call)
    kept: dict[tuple[int, ...], list[Call]] = {}
    for group in found.values():
        alike = len({x.rows.shape for x in group}) == 1 or _are_documents(group)
        if len(group) >= _FEWEST and alike and all(map(_is_whole, group)):
            kept[tuple(x.number for x in group)] = group
    return list(kept.values())


def _is_whole(call: Call) -> bool:
    """Whether a call has all queries of its keys. A part of them may save memory, or may be a decode step."""
    q_len, k_len = _lengths(call)
    return q_len > 1 and q_len == k_len


def _lengths(call: Call) -> tuple[int, int]:
    shape = call.rows.shape
    return (shape[-2], call.given["key"].shape[-2]) if call.is_torchs else (shape[-2], shape[-1])


def _are_documents(group: list[Call]) -> bool:
    """Whether calls differ only in their number of tokens, and have no mask of pairs that is known."""
    if any(x.given.get("attn_mask") is not None for x in group):
        return False
    sizes = {(x.rows.shape[:-2], x.rows.shape[-1] if x.is_torchs else 0) for x in group}
    return len(sizes) == 1 and len({bool(x.given.get("is_causal")) for x in group}) == 1


def _is_independent(step: Step, numbers: set[int]) -> bool:
    """Whether no call of a group depends on the results of the others: their results are changed."""
    again = step.again(replace=lambda x: noise(x.result) if x.number in numbers else None)
    if len(again.calls) != len(step.calls) or len(step.calls) <= max(numbers):
        return False
    for call in (step.calls[x] for x in numbers):
        given = again.calls[call.number].given
        for name in _OPERANDS if call.is_torchs else ("scores",):
            a, b = call.given[name], given.get(name)
            if b is None or a.shape != b.shape or not torch.equal(a, b):
                return False
    return True


def _together(group: list[Call]) -> float | str:
    """Compute all results in one call. Return the relative difference, or the reason against a trial."""
    if not group[0].is_torchs:
        return "attention is written out"
    try:
        made = _joined(group) if len({x.rows.shape for x in group}) > 1 else _stacked(group)
        return max(distance(x.reshape(y.result.shape), y.result) for x, y in zip(made, group, strict=True))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"one call raises {type(error).__name__}: {first_line(error)}"


def _stacked(group: list[Call]) -> list[Tensor]:
    """Stack calls of equal shapes along the batch."""
    given = {**group[0].given, "attn_mask": None, "dropout_p": 0.0}
    given |= {name: torch.cat([_with_batch(x.given[name]) for x in group]) for name in _OPERANDS}
    masks = [x.given.get("attn_mask") for x in group]
    if len({x is None for x in masks}) > 1:
        raise ValueError("only some calls have a mask")
    if masks[0] is not None:
        pairs = [x.given["query"].shape[:-1] + x.given["key"].shape[-2:-1] for x in group]
        given["attn_mask"] = torch.cat([_with_batch(x.expand(y)) for x, y in zip(masks, pairs, strict=True)])  # type: ignore[union-attr]
    return list(sdpa(**given).chunk(len(group)))


def _with_batch(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)


def _joined(group: list[Call]) -> list[Tensor]:
    """Join calls of other lengths along the tokens. The mask separates them."""
    q, k, v = (torch.cat([_with_batch(x.given[name]) for x in group], 2) for name in _OPERANDS)
    sizes = [x.rows.shape[-2] for x in group]
    ids = torch.arange(len(group)).repeat_interleave(torch.tensor(sizes)).to(q.device)
    mask = segments(ids) & causal() if group[0].given.get("is_causal") else segments(ids)
    out = attention(q, k, v, mask=mask, scale=group[0].given.get("scale"))
    return list(torch.split(out, sizes, 2))


def _finding(group: list[Call], calls: list[Attention], error: float | str) -> Finding:
    call, many = group[0], len(group)
    operand = "q" if call.is_torchs else "scores"
    evidence = [f"{many} calls with {operand} of shape {tuple(call.rows.shape)}"]
    what = f"Attention is called {many} times in a loop here, and one call would do"
    remedy = "Stack q, k and v of all calls along the heads or the batch, and call attention once"
    if len({x.rows.shape for x in group}) > 1:
        evidence = [f"{many} calls with {listed([x.rows.shape[-2] for x in group], 8)} tokens"]
        known = "causal() & " if call.given.get("is_causal") else ""
        form = f"{known if call.is_torchs else '(your mask) & '}segments(ids)"
        remedy = (
            f"Join the sequences along the tokens, and call attnspan.torch.attention(q, k, v, mask={form}) "
            "once (ids: the number of each token's sequence)"
        )
    elif len({x.modules for x in group}) > 1:
        evidence.append(f"each call belongs to another module, such as {call.modules[-1]}")
        remedy = (
            "If each module is a head, project all heads at once: one nn.Linear for each of q, k and v, "
            "x.view(B, S, heads, -1).transpose(1, 2), one call of F.scaled_dot_product_attention, and "
            "out.transpose(1, 2).flatten(2). To keep the weights, join the weights of the heads by torch.cat"
        )
    evidence.append("no operand of these calls depends on their results: the doctor changed the results")
    tried = f"one call is not tried: {error}"
    if isinstance(error, float):
        tried = f"one call: its results differ by at most {error:.1e} (relative)"
    # If the loop calls modules, another line has the loop.
    outer = [Place(x.rpartition(":")[0], int(x.rpartition(":")[2])) for x in _outer(group, calls)]
    severity = "note" if isinstance(error, str) and call.is_torchs else ""
    places, texts = at(call.place, *outer), tuple(evidence)
    return Finding("loop", what, places, texts, "", remedy, tried, count=many, severity=severity)


def _outer(group: list[Call], calls: list[Attention]) -> list[str]:
    """Find the line that calls the modules of a group."""
    if len({(x.modules, tuple(x.turns.items())) for x in group}) == 1:
        return []
    lines = next((x.lines for x in calls if x.place == group[0].place), [])
    return [x for x in lines[1:2] if not is_installed(x)]
