"""Queries that see no key, and the first NaN that they do not cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.masks.forms import present
from attnspan_lab.doctor.torch.recording.attention_call import Attention, seen_as
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step
from attnspan_lab.doctor.torch.recording.trace import change_of
from attnspan_lab.doctor.torch.recording.watch import Watcher
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import capitalized, counted

__all__ = ["MEAN", "OTHER", "UNMASKED", "hidden_findings", "returned"]

NAN, ZERO, MEAN = "NaN", "0", "the mean of all values"
UNMASKED, OTHER, UNKNOWN = (
    "nearly the result without a mask",
    "other numbers",
    "a result that was not measured",
)
_ROUNDINGS = 64  # largest difference that counts as equal, in roundings of the largest value
_NEARLY = 1e-2  # A number such as -1e4 rounds the scores that it is added to.
_CAUSES = {
    NAN: "Softmax over only -inf is NaN (0 / 0)",
    ZERO: "This attention defines their result as 0",
    MEAN: "A large negative number is added to all of their scores. Rounding then makes these scores equal, "
    "so the softmax is uniform",
    UNMASKED: "The same finite number is added to all of their scores, and a softmax ignores it",
    OTHER: "The mask's numbers are finite, so their scores still have an effect",
    UNKNOWN: "",
}


def hidden_findings(
    watcher: Watcher, subject: Subject, batch: Any, step: Step | None, coverage: Coverage
) -> Iterator[Finding]:
    """Yield queries without a visible key, and the first NaN that they do not cause.

    Args:
        watcher, subject, batch: The watched step.
        step: The recorded step, or None if the model cannot be copied.
        coverage: Collects the checks.
    """
    nan, explained = watcher.first_nan, False
    for call in watcher.calls:
        rows = call.hidden
        is_first_nan = nan is not None and call.place is not None and nan.place == call.place
        # If an encoder and a decoder have one length, a mask may belong to either.
        for valid in subject.masks(batch) if call.visible is not None else ():
            if valid.shape[1] == call.visible.shape[1]:  # type: ignore[union-attr]
                rows = [(b, s) for b, s in rows if bool(valid[min(b, len(valid) - 1), s])]
        if not rows and call.hidden and (is_first_nan or NAN in returned(call, call.hidden)):
            rows = call.hidden  # NaN in padding spreads to other tokens, and to gradients.
        if rows and not call.recomputed:
            kinds = returned(call, rows)
            if NAN not in kinds and not is_first_nan and not _are_used(call, rows, watcher.calls, step):
                said = f"NaN as the result of such queries at {call.place} changes no result of the model"
                coverage.made("queries without a key", said)
                continue
            explained = explained or is_first_nan or NAN in kinds
            yield _of_hidden(call, rows, kinds, is_first_nan=is_first_nan)
    if nan is not None and not explained:
        where = "the backward pass of this line" if nan.backward else "this line"
        what, cause = f"The first NaN comes from {where}: operator {nan.name}, result {nan.shape}", ""
        if (overflow := nan.overflow) is not None:
            cause = capitalized(f"{overflow.text}. Then inf - inf, inf / inf or 0 * inf is NaN")
        yield Finding("nan", what, at(overflow.place if overflow else None, nan.place), (), cause)


def _are_used(
    call: Attention, rows: list[tuple[int, int]], calls: list[Attention], step: Step | None
) -> bool:
    """Whether NaN as the result of some queries changes results of the model, as far as this is known."""
    own = None if step is None else next((x for x in step.calls if seen_as(x, step, calls) is call), None)
    if step is None or own is None or (visible := call.visible) is None or not step.results:
        return True

    def filled(other: Call) -> Tensor | None:
        if other.number != own.number:
            return None
        out = other.result.contiguous().clone()
        by_sample = out.view(len(visible), -1, *out.shape[-2:])
        for b, s in rows:
            by_sample[b, :, s] = torch.nan
        return out

    try:
        other = step.again(replace=filled)
    except CannotRun:
        return True
    pairs = [(x, other.results.get(k)) for k, x in step.results.items()]
    return any(y is None or x.shape != y.shape or change_of(y, x) > 0 for x, y in pairs)


def _of_hidden(
    call: Attention, rows: list[tuple[int, int]], kinds: Counter[str], *, is_first_nan: bool
) -> Finding:
    many = counted(len(rows), "query", "queries")
    evidence = [f"{many}, (batch element, query): {', '.join(map(str, rows[:4]))}"]
    if is_first_nan:
        evidence.append("the first NaN of the step comes from this line")
    results = [x if len(kinds) == 1 else f"{counted(n, 'query', 'queries')}: {x}" for x, n in kinds.items()]
    what = f"Some queries of this attention call see no key. It returns for them: {'; '.join(results)}"
    overflow = call.overflow
    places = at(call.place, overflow.place if overflow else None, call.mask[1] if call.mask else None)
    why = ["The mask hides every key of these queries", *(_CAUSES[x] for x in kinds)]
    cause = ". ".join(filter(None, [*why, capitalized(overflow.text if overflow else "")]))
    # attnspan is no remedy for an attention that already returns 0.
    remedy = "Let each of these queries see its own key" if set(kinds) == {ZERO} else ""
    if call.padding is not None and call.padding.inverted:
        cause, remedy = f"{call.padding.cause}. {cause}", call.padding.remedy
    return Finding("hidden-rows", what, places, tuple(evidence), cause, remedy, count=len(rows))


def returned(call: Attention, rows: list[tuple[int, int]]) -> Counter[str]:
    """Count what the call returned for queries without a visible key.

    Args:
        call: A call whose result was kept.
        rows: (batch element, query) of these queries.
    """
    found = _by_head(call)
    if found is None:
        return Counter({UNKNOWN: len(rows)})
    out, means, unmasked = found
    size = float(call.value.abs().nan_to_num().max()) if call.value is not None else 1.0
    near = _ROUNDINGS * torch.finfo(out.dtype).eps * max(size, 1e-30)

    def kind(b: int, s: int) -> str:
        row = out[b, :, s]
        if bool(row.isnan().any()):
            return NAN
        if not bool(row.any()):
            return ZERO
        if bool(((row - means[b]).abs() <= near).all()):
            return MEAN
        same = unmasked is not None and bool(((row - unmasked[b, :, s]).abs() <= _NEARLY * size).all())
        return UNMASKED if same else OTHER

    return Counter(kind(b, s) for b, s in rows)


def _by_head(call: Attention) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Bring the result to (B, H, S, D), the means of values to (B, H, D), and compute the unmasked result."""
    out, value, visible = call.result, call.value, call.visible
    if out is None or value is None or visible is None:
        return None
    rows, q_len, k_len = visible.shape
    if out.shape[-2] != q_len or value.shape[-2] != k_len or out.shape[-1] != value.shape[-1]:
        return None
    by_head = out.reshape(rows, -1, *out.shape[-2:])
    means = value.reshape(rows, -1, *value.shape[-2:]).mean(-2)
    if by_head.shape[1] % means.shape[1]:
        return None
    means = means.repeat_interleave(by_head.shape[1] // means.shape[1], 1)
    unmasked = None
    if call.given:
        unmasked = present(call, attn_mask=None, is_causal=False).reshape(by_head.shape)
    return by_head, means, unmasked
