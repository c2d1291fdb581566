"""Findings on causal masks that count from the first key, although keys of a cache are in front."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention, watched

__all__ = ["misaligned"]


def misaligned(trial: Trial) -> Iterator[Finding]:
    """Yield calls in which query i sees the keys up to key i, and its own key comes later.

    Two runs with different tokens show which keys are made from the tokens.
    """
    guilty = [i for i, x in enumerate(trial.calls) if _counts_from_the_first_key(x)]
    if not guilty:
        return
    every = np.ones(trial.size, bool)
    other = watched(replace(trial.traced, leaves=trial.leaves(every)), trial.size)[0].calls
    sites: dict[object, list[tuple[Attention, int]]] = {}
    for i in guilty if len(other) == len(trial.calls) else ():
        first = _first_own_key(trial.calls[i], other[i])
        if first:
            sites.setdefault(trial.calls[i].places[:1], []).append((trial.calls[i], first))
    for site in sites.values():
        call, first = site[0]
        queries, keys = np.asarray(call.visible).shape[1:]
        what = f"The causal mask counts from the first key: {queries} queries, {keys} keys"
        evidence = f"query 0 sees keys 0 to 0, and its own key is key {first}"
        yield finding(
            "causal-alignment", what, call.places[:2], evidence=(evidence,), count=len(site), call=call
        )


def _counts_from_the_first_key(call: Attention) -> bool:
    if call.visible is None or call.visible.shape[1] >= call.visible.shape[2]:
        return False
    return bool((call.visible == np.tri(*call.visible.shape[1:])).all())


def _first_own_key(call: Attention, other: Attention) -> int:
    """Find the first key that the tokens change, if keys of a cache are before it."""
    queries, keys = np.asarray(call.visible).shape[1:]
    for x, y in zip(call.operands[:2], other.operands[:2], strict=True):
        axes = [i for i, n in enumerate(np.shape(x.array)) if n == keys]
        for axis in axes if np.shape(x.array) == np.shape(y.array) else ():
            a, b = (np.moveaxis(np.asarray(z.array, np.float64), axis, 0).reshape(keys, -1) for z in (x, y))
            own = np.flatnonzero((a != b).any(1))
            if 0 < len(own) <= queries and own[-1] - own[0] < queries:
                return int(own[0])
    return 0
