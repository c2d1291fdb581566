"""Padding of other sequences, such as an encoder's states: padded entries change, and results must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.float64_reference import difference
from attnspan_lab.doctor.jax.mask_forms import only
from attnspan_lab.doctor.jax.subject import wide
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.names import shown_code, valid_entries
from attnspan_lab.doctor.pairs import SAME, PaddingOf

__all__ = ["padding_of_others"]


def padding_of_others(trial: Trial, coverage: Coverage) -> Iterator[Finding]:
    """Yield calls through which padded entries of another sequence than the tokens change results."""
    named = trial.subject.named(trial.batch)
    for name, mask in trial.subject.other_masks(trial.batch).items():
        valid = valid_entries(mask, np.asarray(named[mask]))
        hidden = ~valid & valid.any(1, keepdims=True)
        said = PaddingOf(name, mask, int(hidden.sum()))
        if not said.count:
            coverage.absent(said.topic, f"{mask} marks no padding")
            continue
        leaves = trial.leaves(hidden, (name,))
        change = difference(*(_results(trial, x, valid) for x in (leaves, trial.traced.leaves)))
        if change <= SAME:
            coverage.made(said.topic, said.unchanged)
            continue
        showing = [x for x, y in trial.beside(leaves) if _shows(x, y, hidden)]
        if not showing:
            why = f"{said.changed(change)}, and no attention call is known to show it"
            coverage.missed(said.topic, why)
            continue
        coverage.made(said.topic, f"read from {mask}: {said.changed(change)}")
        for site in grouped(showing, lambda x: x.places[:1]).values():
            yield _finding(site, said, change, only(trial.calls, site))


def _finding(site: list[Attention], said: PaddingOf, change: float, apart: str) -> Finding:
    call, shown = site[0], shown_code(said.mask)
    known = [x for x in call.varies if said.mask in x[0].arguments()]
    case, remedy = "mask-lost.keys", f"Pass mask={shown}[:, None, None, :] to jax.nn.dot_product_attention"
    remedy += f", or mask=keys{shown} to attnspan.jax.attention"
    if known and known[0][1:] == (True, False):
        case, remedy = "mask-lost.of-queries", f"Put the mask on the axis of the keys. {remedy}"
    elif known:
        case = "mask-lost.shown-keys"
    elif call.varies:
        remedy = f"Combine your mask with it. {remedy}"
    places = (*call.places[:2], *(x for y in known[:1] for x in y[0].places[:1]))
    more = {"values": {"name": said.mask, "shown": shown}, "remedy": apart + remedy, "count": len(site)}
    return finding(case, said.seen, places, *said.evidence(change), call=call, **more)


def _results(trial: Trial, leaves: list[Any], valid: np.ndarray) -> list[np.ndarray]:
    """Run the step. Rows of padding do not count."""
    found = wide(trial.traced.trial(*leaves))
    return [x[valid] if x.shape[:2] == valid.shape else x for x in found]


def _shows(call: Attention, other: Attention, hidden: np.ndarray) -> bool:
    """Whether queries see keys that are made from padded entries."""
    if call.visible is None or call.visible.shape[2] != hidden.shape[1]:
        return False
    q, k = (
        np.array_equal(np.asarray(x.array), np.asarray(y.array))
        for x, y in zip(call.operands[:2], other.operands[:2], strict=True)
    )
    if k or len(call.visible) not in (1, len(hidden)):
        return False
    shown = call.visible & hidden[:, None, :]
    if not q and call.visible.shape[1] == hidden.shape[1]:
        shown = shown & ~hidden[:, :, None]  # Queries of the same sequence may be padding too.
    return bool(shown.any())
