"""Loops in a step that compute a prefix again for each new token, where a KV cache would keep it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import Call, Step
from attnspan_lab.doctor.torch.recording.differences import SAME
from attnspan_lab.doctor.words import counted

__all__ = ["cache_findings"]

_FEWEST = 3  # calls in a row that grow. Two calls may be two different uses of a layer.


def cache_findings(step: Step, done: set[Place]) -> Iterator[Finding]:
    """Yield lines whose calls begin with the queries, keys and results of an earlier call.

    Each layer of a line must do so: behind attention without a causal mask, a prefix changes with new tokens.

    Args:
        step: The step.
        done: Lines that have a finding.
    """
    lines: dict[Place, list[list[Call]]] = {}
    for call in step.calls:
        if call.place is not None and call.place not in done and call.rows.dim() > 2:
            layers = lines.setdefault(call.place, [])
            layer = next((x for x in layers if _grows(x[-1], call)), None)
            if layer is None:
                layers.append([call])
            else:
                layer.append(call)
    for place, layers in lines.items():
        calls = [x for own in layers for x in own]
        if min(map(len, layers)) < _FEWEST:
            continue
        done.add(place)
        computed = sum(x.q_len for x in calls)
        needed = sum(own[-1].q_len for own in layers)
        evidence = (
            f"{counted(len(calls), 'call')} compute {computed} rows of queries, and {needed} are needed",
            f"lengths of one layer: {_lengths(layers[0])}",
            "queries, keys and results of each call begin with all rows of the call before",
        )
        what = "A prefix is computed again here for each new token"
        yield Finding("no-cache", what, at(place), evidence, count=len(calls))


def _lengths(calls: list[Call]) -> str:
    sizes = [str(x.q_len) for x in calls]
    return ", ".join(sizes if len(sizes) < 7 else [*sizes[:3], "...", sizes[-1]])


def _grows(call: Call, following: Call) -> bool:
    """Whether a call has the same queries, keys and results as the call before, and more behind them."""
    return (
        call.is_torchs == following.is_torchs
        and call.k_len == call.q_len < following.q_len
        and all(_begins(call.given[x], following.given[x]) for x in call.operands)
        and _begins(call.result, following.result)
    )


def _begins(x: Tensor, longer: Tensor) -> bool:
    longer = longer[..., : x.shape[-2], : x.shape[-1]]
    same = x.shape == longer.shape and torch.equal(x.isfinite(), longer.isfinite())
    return same and distance(longer, x) <= SAME
