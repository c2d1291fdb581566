"""Findings on heads that are split by a reshape alone, so that a head holds parts of neighboring tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.jax.watch import Attention

__all__ = ["split_wrongly"]

_MOST = 32  # operators between the reshape and attention, such as rotary embeddings


def split_wrongly(trial: Trial) -> Iterator[Finding]:
    """Yield calls whose operands (B, H, S, D) have the memory order of (B, S, H, D).

    One token changes. It must reach one position of all heads, and it reaches several positions of one head.
    """
    suspects = [(i, x, made) for i, x in enumerate(trial.calls) if (made := _reshaped(x, trial.size))]
    if not suspects:
        return
    own = np.zeros(trial.size, bool)
    own[:, trial.size[1] // 3] = True
    pairs = trial.beside(trial.leaves(own))
    number, call, made = suspects[0]  # In later layers, attention has mixed the tokens.
    heads, length = np.shape(made.array)[1:3]
    again = pairs[number][1].operands if pairs else call.operands
    for x, y in zip(call.operands, again, strict=True):
        changed = np.asarray(x.array) != np.asarray(y.array)
        if changed.shape[1:3] != (heads, length) or not changed.any():
            continue
        rows = changed.any(3)
        tokens = rows.reshape(len(rows), length, heads).any((0, 2))
        if tokens.sum() == 1 and tokens[trial.size[1] // 3] and not rows.any((0, 2)).all():
            break
    else:
        return
    head, position = np.argwhere(rows.any(0))[0]
    what = "The heads are split by a reshape alone, so a head holds parts of neighboring tokens"
    said = f"changing token {trial.size[1] // 3} changes head {head} from position {position} on"
    said += f", and only {int(rows.any((0, 2)).sum())} of {heads} heads"
    places = (*made.places[:2], *call.places[:1])
    yield finding("token-axis", what, places, said, count=len(suspects))


def _reshaped(call: Attention, size: tuple[int, int]) -> Value | None:
    """Find a reshape of tokens (B, S, W) to (B, H, S, D), before operators that keep this shape."""
    if call.layouts - {""} != {"bhsd"}:
        return None
    todo, known = list(call.operands), set[int]()
    while todo and len(known) < _MOST:
        x = todo.pop(0)
        shape = np.shape(x.array)
        if id(x) in known or len(shape) != 4:
            continue
        known.add(id(x))
        before = np.shape(x.parents[0].array) if x.parents else ()
        if x.name == "reshape" and before[:2] == size and len(before) == 3 and shape[::2] == size:
            return x if shape[1] > 1 else None
        # Rotary embeddings split the features and join them again.
        todo += [y for y in x.parents if np.shape(y.array)[:3] == shape[:3] or x.name == "transpose"]
    return None
