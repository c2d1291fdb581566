"""Padding of other sequences, such as an encoder's states: padded entries change, and results must not."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.changes import Trial, relative_change
from attnspan_lab.doctor.jax.float64_reference import difference
from attnspan_lab.doctor.jax.mask_forms import only
from attnspan_lab.doctor.jax.subject import wide
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.names import shown_code, valid_entries
from attnspan_lab.doctor.pairs import SAME, PaddingOf

__all__ = ["padding_of_others", "padding_of_tokens"]

_WITHIN = 1e-4  # relative change of results that counts


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
            yield _finding(trial, site, said, change)


def padding_of_tokens(trial: Trial, coverage: Coverage) -> Generator[Finding, None, bool]:
    """Yield findings on results without a row for each token, if padding of the tokens changes them.

    Returns:
        Whether the step has results that padding must not change.
    """
    subject, batch = trial.subject, trial.batch
    name, mask = next(iter(subject.tokens(batch))), subject.padding_names(batch)[0]
    valid = np.asarray(subject.valid(batch))
    hidden = ~valid & valid.any(1, keepdims=True)
    leaves = trial.leaves(hidden)
    found = [wide(trial.results(x)) for x in (trial.traced.leaves, leaves)]
    moved = [
        (_moved(trial, x, y, ~hidden), difference([y], [x]), x.shape) for x, y in zip(*found, strict=True)
    ]
    changed = [x for x in moved if x[0] is not False]
    if not changed:
        return bool(moved)
    is_wrong, change, shape = max(changed, key=lambda x: (x[0] is True, x[1]))
    said = PaddingOf(name, mask, int(hidden.sum()))
    showing = [x for x, y in trial.beside(leaves) if _same_operands(x, y)[0] and _shows(x, y, hidden)]
    if not showing and not is_wrong:
        said_so = f"{said.changed(change)} of shape {shape}"
        coverage.missed("padding", f"{said_so}, and the doctor does not know if they belong to padding")
        return False
    coverage.made("padding", f"read from {mask}: {said.changed(change)}")
    why = trial.decides(hidden.astype(int), 1)
    for site in grouped(showing, lambda x: x.places[:1]).values():
        yield _finding(trial, site, said, change, why)
    if not showing:
        what = f"Padding of {name} changes results that belong to no padding, outside of attention"
        more = {"values": {"shown": _code(trial, mask)}, "severity": "note" if why else ""}
        yield finding("mask-lost.pooled", what, (), said.evidence(change)[0], why, **more)
    return True


def _code(trial: Trial, mask: str) -> str:
    """Write the code that marks valid entries, from a mask or from lengths."""
    is_mask = np.ndim(trial.subject.named(trial.batch)[mask]) > 1
    return shown_code(mask) if is_mask else f"(jnp.arange({trial.size[1]}) < {mask}[:, None])"


def _kept(trial: Trial, x: np.ndarray, valid: np.ndarray) -> np.ndarray | None:
    """Mark the rows (B, n) of a result that are not known to be padding, or return None if there are none."""
    rows, length = valid.shape
    if x.ndim < 2 or len(x) != rows:
        return None
    size = x.shape[1]
    if size in (length, length - 1):
        # A loss of each token also depends on the next token.
        later = np.pad(valid[:, 1:], ((0, 0), (0, 1))) if x.ndim == 2 else valid
        return np.asarray((valid & later)[:, :size])
    stated = trial.subject.stated(trial.batch, size)
    return np.asarray(~trial.padding(size) & (True if stated is None else stated))


def _moved(trial: Trial, x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> bool | None:
    """Whether padding changes a result and must not. None: it changes the result, and may do so.

    Behind a stride, some rows of a result are padding. If all rows of a sample change, valid ones do too.
    """
    # A training step returns parameters, whose axes are no samples.
    parameters = trial.traced.leaves[: trial.traced.variables]
    if x.ndim == 0 or len(x) != len(valid) or x.shape in map(np.shape, parameters):
        return None if difference([y], [x]) > _WITHIN else False
    kept = _kept(trial, x, valid)
    before, after = (z.reshape(len(z), 1 if kept is None else z.shape[1], -1) for z in (x, y))
    kept = np.ones(before.shape[:2], bool) if kept is None else kept
    change = (relative_change(before, after) > _WITHIN) & kept
    if not change.any():
        return False
    half = ~valid.all(1) & (valid.mean(1) >= 0.5)  # samples with padding, and more tokens than padding
    nothing = ~kept | ((before == 0) & (after == 0)).all(-1)
    is_known = before.shape[1] - valid.shape[1] in (0, -1)
    whole = (change | nothing).all(1) & change.any(1)
    return True if is_known or whole[half].any() else None


def _finding(trial: Trial, site: list[Attention], said: PaddingOf, change: float, why: str = "") -> Finding:
    call, shown = site[0], _code(trial, said.mask)
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
    more = {
        "values": {"name": said.mask, "shown": shown},
        "remedy": only(trial.calls, site) + remedy,
        "count": len(site),
    }
    more |= {"severity": "note" if why else ""}
    return finding(case, said.seen, places, *said.evidence(change), why, call=call, **more)


def _results(trial: Trial, leaves: list[Any], valid: np.ndarray) -> list[np.ndarray]:
    """Run the step. Rows of padding do not count."""
    found = [(x, _kept(trial, x, valid)) for x in wide(trial.results(leaves))]
    return [x if kept is None else x[kept] for x, kept in found]


def _same_operands(call: Attention, other: Attention) -> list[bool]:
    """Whether q, and k, are the same in two steps."""
    pairs = zip(call.operands[:2], other.operands[:2], strict=True)
    return [np.array_equal(np.asarray(x.array), np.asarray(y.array)) for x, y in pairs]


def _shows(call: Attention, other: Attention, hidden: np.ndarray) -> bool:
    """Whether queries see keys that are made from padded entries."""
    if call.visible is None or call.visible.shape[2] != hidden.shape[1]:
        return False
    q, k = _same_operands(call, other)
    if k or len(call.visible) not in (1, len(hidden)):
        return False
    shown = call.visible & hidden[:, None, :]
    if not q and call.visible.shape[1] == hidden.shape[1]:
        shown = shown & ~hidden[:, :, None]  # Queries of the same sequence may be padding too.
    return bool(shown.any())
