"""Findings on queries without a visible key, and on NaN in a step's results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.subject import Traced, floats
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, bad, is_float
from attnspan_lab.doctor.jax.watch import Attention, watched
from attnspan_lab.doctor.places import Place

__all__ = ["hidden", "nan_origin"]

_WITHIN = 1e-4  # relative change that counts
_ONE_BY_ONE = "not confirmed: the compiled step returns no NaN, only its operators one by one"


def hidden(
    calls: list[Attention],
    results: list[Value],
    valid: np.ndarray | None,
    traced: Traced,
    size: tuple[int, int] | None,
) -> Iterator[Finding]:
    """Yield queries without a visible key that the results depend on, and the first NaN of the results.

    Args:
        calls, results: Attention calls and results of the watched step.
        valid: Tokens that are not padding, (B, S), if they are known.
        traced, size: The step, and its number of batch elements and tokens.
    """
    broken = next((x for x in results if x.nan), None)
    confirmed = broken is None or any(bad(x)[0] for x in floats(traced.run(*traced.leaves)))
    more = {} if confirmed else {"severity": "note"}
    found = False
    for number, call in enumerate(calls):
        out = call.out
        if call.hidden is None or out is None or not call.hidden.shape == out.nan.shape == out.even.shape:
            continue
        rows = call.hidden & ~out.zero
        real = rows & valid if valid is not None and valid.shape == rows.shape else rows
        real = real & ~out.nan if broken is None else real if real.any() else rows
        if not real.any():
            continue
        is_nan, evidence, severity = bool(out.nan[real].any()), [], more
        if not is_nan:
            said, severe = _with_zero(traced, size, number, real, results, call)
            if not said:
                continue
            evidence, severity = [said], {} if severe else {"severity": "note"}
        found = found or is_nan
        even = "they return the mean of all values" if out.even[real].all() else "they return a mix of values"
        what = (
            f"Some queries of this attention call see no key: {'their results are NaN' if is_nan else even}"
        )
        numbers = ", ".join(f"({b}, {s})" for b, s in np.argwhere(real)[:4])
        evidence = [f"{real.sum()} queries, (batch element, query): {numbers}", *evidence]
        evidence += [_ONE_BY_ONE] if is_nan and not confirmed else []
        places = (*call.places[:2], *(x for y in call.pairs for x in y.places[:1]))
        told = {"evidence": tuple(evidence), "count": int(real.sum()), "call": call, **severity}
        yield finding("hidden-rows", what, places, **told)
    if broken is not None and not found:
        yield nan_origin(broken, "this line", () if confirmed else (_ONE_BY_ONE,), **more)


def _with_zero(
    traced: Traced,
    size: tuple[int, int] | None,
    number: int,
    rows: np.ndarray,
    results: list[Value],
    call: Attention,
) -> tuple[str, bool]:
    """Let queries return 0, and describe the results that change.

    Queries that see no key and are seen by no query are padding. A result of padding may be anything.

    Returns:
        A sentence, "" if no result of other tokens changes, and whether the change is certainly wrong.
    """
    again = watched(traced, size, {number: rows})[1]
    tokens = rows if call.padding is None else rows & ~call.padding
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
        return f"with 0 for these queries, other results change by up to {other:.1e} (relative error)", True
    if own and call.padding is not None:
        return f"with 0 for these queries, {own} rows of results change. Other queries see these tokens", True
    return (
        (f"not confirmed: {own} rows of results depend on them, and they may be padding", False)
        if own
        else ("", False)
    )


def nan_origin(broken: Value, where: str, evidence: tuple[str, ...] = (), **more: Any) -> Finding:
    """Name the operator from which the NaN of a result comes, and the overflow before it."""
    first = broken.origin("nan")
    shape = np.shape(first.array)
    if first.name in ("argument", "constant"):
        name = f"The argument {first.label}" if first.label else "A constant of the step"
        cause, remedy = "No operator makes the first NaN", "Look at the data before the step"
        return finding(
            "nan", f"{name} contains NaN", (), evidence=evidence, cause=cause, remedy=remedy, **more
        )
    what, cause = f"The first NaN comes from {where}: operator {first.name}, result {shape}", ""
    places: tuple[Place, ...] = ()
    large = next((x for x in first.parents if x.inf), None)
    if large is not None:
        source = large.origin("inf")
        if source.parents and source.name not in ("broadcast_in_dim", "select_n"):
            at, places = source.places[0] if source.places else source.name, source.places[:1]
            cause = f"{at} overflows to inf in {source.array.dtype}, and inf - inf or 0 * inf is NaN"
    return finding("nan", what, (*places, *first.places[:2]), cause=cause, evidence=evidence, **more)
