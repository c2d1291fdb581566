"""Findings on causal masks that count from the first key, although keys of a cache are in front."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.mask_forms import only
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention

__all__ = ["misaligned"]


def misaligned(trial: Trial) -> Iterator[Finding]:
    """Yield calls in which query i sees the keys up to key i, and its own key comes later.

    Two runs with different tokens show which keys are made from the tokens.
    """
    if not any(map(_counts_from_the_first_key, trial.calls)):
        return
    pairs = trial.beside(trial.leaves(np.ones(trial.size, bool)))
    guilty = [(x, _first_own_key(x, y)) for x, y in pairs if _counts_from_the_first_key(x)]
    for site in grouped((x for x in guilty if x[1]), lambda x: x[0].places[:1]).values():
        call, first = site[0]
        queries, keys = np.asarray(call.visible).shape[1:]
        what = f"The causal mask counts from the first key: {queries} queries, {keys} keys"
        said = f"query 0 sees keys 0 to 0, and its own key is key {first}"
        aligned = [x for x in trial.calls if _is_triangle(x, from_the_last=True)]
        apart = only(trial.calls, [*(x for x, _ in site), *aligned])
        yield finding("causal-alignment", what, call.places[:2], said, apart, count=len(site), call=call)


def _counts_from_the_first_key(call: Attention) -> bool:
    if call.visible is None or call.visible.shape[1] >= call.visible.shape[2]:
        return False
    return _is_triangle(call)


def _is_triangle(call: Attention, *, from_the_last: bool = False) -> bool:
    """Whether a call is causal, counted from its first key or from its last key."""
    if call.visible is None:
        return False
    queries, keys = call.visible.shape[1:]
    return bool((call.visible == np.tri(queries, keys, (keys - queries) * from_the_last)).all())


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
