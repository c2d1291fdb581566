"""Padding of other sequences, such as an encoder's states: padded entries change, and results must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial, changed_tokens
from attnspan_lab.doctor.jax.subject import floats
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention, watched

__all__ = ["padding_of_others"]

_SAME = 1e-6


def padding_of_others(trial: Trial, coverage: Coverage) -> Iterator[Finding]:
    """Yield calls through which padded entries of another sequence than the tokens change results."""
    subject, batch = trial.subject, trial.batch
    named = subject.named(batch)
    for name, mask in subject.other_masks(batch).items():
        topic, marks = f"padding of {name}", np.asarray(named[mask])
        valid = marks == 0 if "padding" in mask else marks != 0
        hidden = ~valid & valid.any(1, keepdims=True)
        if not hidden.any():
            coverage.absent(topic, f"{mask} marks no padding")
            continue
        leaves = _changed(trial, name, hidden)
        change = _difference(trial, leaves, valid)
        if change <= _SAME:
            coverage.made(topic, f"read from {mask}: changed padding changes no result")
            continue
        said = f"changed padding ({mask}) changes results by {change:.1e}"
        other = watched(replace(trial.traced, leaves=leaves), trial.size)[0].calls
        sites: dict[Any, list[Attention]] = {}
        for x, y in zip(trial.calls, other, strict=False) if len(other) == len(trial.calls) else ():
            if _shows(x, y, hidden):
                sites.setdefault(x.places[:1], []).append(x)
        if not sites:
            coverage.missed(topic, f"{said}, and no attention call is known to show it")
            continue
        coverage.made(topic, f"read from {mask}: {said}")
        for site in sites.values():
            yield _finding(site, name, mask, change, int(hidden.sum()))


def _finding(site: list[Attention], name: str, mask: str, change: float, many: int) -> Finding:
    call = site[0]
    evidence = (
        f"changing padded entries of {name} changes results by {change:.1e} (relative error)",
        f"{name} has {many} padded entries, and queries see them here",
    )
    shown = f"({mask} {'==' if 'padding' in mask else '!='} 0)"
    own = f"mask={shown}[:, None, None, :]"
    remedy = f"Pass {own} to jax.nn.dot_product_attention, or mask=keys{shown} to attnspan.jax.attention"
    cause = f"No mask that is made from {mask} reaches this call"
    places = call.places[:2]
    known = [x for x in call.varies if mask in x[0].arguments()]
    if known and known[0][1] and not known[0][2]:
        cause = f"The mask made from {mask} hides queries instead of keys: it differs between queries only"
        remedy = f"Put the mask on the axis of the keys. {remedy}"
    elif known:
        cause = f"A mask made from {mask} reaches this call, and still shows these keys"
    elif call.varies:
        remedy = f"Combine your mask with it. {remedy}"
    places = (*places, *(x for y in known[:1] for x in y[0].places[:1]))
    more = {"evidence": evidence, "cause": cause, "remedy": remedy, "count": len(site)}
    what = f"Queries see the padding of {name} here"
    return finding("mask-lost", what, places, call=call, **more)


def _changed(trial: Trial, name: str, hidden: np.ndarray) -> list[Any]:
    """Change the padded entries of a sequence."""
    names = [""] * trial.traced.variables + trial.traced.names
    pairs = zip(names, trial.traced.leaves, strict=True)
    return [changed_tokens(x, hidden) if own == name else x for own, x in pairs]


def _difference(trial: Trial, leaves: list[Any], valid: np.ndarray) -> float:
    """Compare results. Rows of padding do not count."""
    most = 0.0
    runs = (floats(trial.traced.trial(*x)) for x in (trial.traced.leaves, leaves))
    for x, y in zip(*runs, strict=True):
        a, b = (np.asarray(z, np.float64) for z in (x, y))
        a, b = (z[valid] if z.shape[:2] == valid.shape else z for z in (a, b))
        most = max(most, float(np.linalg.norm(a - b) / (np.linalg.norm(a) + 1e-30)))
    return most


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
