"""Findings on queries without a visible key, and on NaN in a step's results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.changes import Trial
from attnspan_lab.doctor.jax.subject import floats
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, bad, is_float
from attnspan_lab.doctor.jax.watch import watched

__all__ = ["hidden", "nan_origin"]

_WITHIN = 1e-4  # relative change that counts
_ONE_BY_ONE = "not confirmed: the compiled step returns no NaN, only its operators one by one"


def hidden(trial: Trial, results: list[Value]) -> Iterator[Finding]:
    """Yield queries without a visible key that the results depend on, and the first NaN of the results.

    Args:
        trial: The watched step.
        results: Its results.
    """
    traced, valid = trial.traced, trial.subject.stated(trial.batch, trial.size[1])
    broken = next((x for x in results if x.nan), None)
    confirmed = broken is None or any(bad(x)[0] for x in floats(traced.run(*traced.leaves)))
    unproven, severity = ("", "") if confirmed else (_ONE_BY_ONE, "note")
    found = False
    for number, call in enumerate(trial.calls):
        out = call.out
        if call.hidden is None or out is None or not call.hidden.shape == out.nan.shape == out.even.shape:
            continue
        rows = call.hidden & ~out.zero
        real = rows & valid if valid is not None and valid.shape == rows.shape else rows
        real = real & ~out.nan if broken is None else real if real.any() else rows
        if not real.any():
            continue
        is_nan = bool(out.nan[real].any())
        said, own = (unproven, severity) if is_nan else _with_zero(trial, number, real, results)
        if not (said or is_nan):
            continue
        found = found or is_nan
        mean = "they return the mean of all values" if out.even[real].all() else "they return a mix of values"
        returned = "their results are NaN" if is_nan else mean
        numbers = ", ".join(f"({b}, {s})" for b, s in np.argwhere(real)[:4])
        evidence = f"{real.sum()} queries, (batch element, query): {numbers}", said
        what = f"Some queries of this attention call see no key: {returned}"
        more = {"count": int(real.sum()), "call": call, "severity": own}
        yield finding("hidden-rows", what, call.with_masks, *evidence, **more)
    if broken is not None and not found:
        yield nan_origin(broken, "this line", unproven, severity=severity)


def _with_zero(trial: Trial, number: int, rows: np.ndarray, results: list[Value]) -> tuple[str, str]:
    """Let queries of a call return 0, and describe the results that change.

    Queries that see no key and are seen by no query are padding. A result of padding may be anything.

    Returns:
        A sentence, "" if no result of other tokens changes, and "note" if the change may be right.
    """
    is_known = trial.calls[number].padding is not None
    again = watched(trial.traced, trial.subject.size(trial.batch), {number: rows})[1]
    tokens = rows & ~trial.padding(rows.shape[1])
    own, other = 0, 0.0
    for x, y in zip(results, again, strict=True):
        if not is_float(x.array) or not np.size(x.array):
            continue
        before, after = (np.asarray(z.array, np.float64) for z in (x, y))
        change = np.abs(after - before) / (np.abs(before).max() + 1e-30)
        if change.shape[:2] == rows.shape and change.ndim > 1:
            change = change.reshape(*rows.shape, -1).max(-1)
            own = max(own, int((tokens & (change > _WITHIN)).sum()))
            change = np.where(rows, 0, change)
        other = max(other, float(change.max()))
    if other > _WITHIN:
        return f"with 0 for these queries, other results change by up to {other:.1e} (relative error)", ""
    if own and is_known:
        return f"with 0 for these queries, {own} rows of results change, and they are no padding", ""
    unproven = f"not confirmed: {own} rows of results depend on them, and they may be padding"
    return unproven if own else "", "note"


def nan_origin(broken: Value, where: str, evidence: str = "", severity: str = "") -> Finding:
    """Name the operator from which the NaN of a result comes, and the overflow before it."""
    first = broken.origin("nan")
    if first.name in ("argument", "constant"):
        name = f"The argument {first.label}" if first.label else "A constant of the step"
        return finding("nan.given", f"{name} contains NaN", (), evidence, severity=severity)
    what = f"The first NaN comes from {where}: operator {first.name}, result {np.shape(first.array)}"
    source = next((x.origin("inf") for x in first.parents if x.inf), None)
    if source is None or not source.parents or source.name in ("broadcast_in_dim", "select_n"):
        return finding("nan", what, first.places[:2], evidence, severity=severity)
    at = source.places[0] if source.places else source.name
    places = (*source.places[:1], *first.places[:2])
    more = {"values": {"at": at, "dtype": source.array.dtype}, "severity": severity}
    return finding("nan.overflow", what, places, evidence, **more)
