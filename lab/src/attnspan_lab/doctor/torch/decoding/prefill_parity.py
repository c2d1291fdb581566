"""Decode steps that differ from one prefill, with the operand of attention that differs first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding, texts_of
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.cache_cat import cat_findings
from attnspan_lab.doctor.torch.decoding.decode_runs import Pair, Runs, runs_of
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step
from attnspan_lab.doctor.torch.recording.differences import SAME, rounding
from attnspan_lab.doctor.torch.recording.lineage import Attend, Node, apart, backwards, cache_of, origin
from attnspan_lab.doctor.torch.recording.trace import forward_line

__all__ = ["decode_findings"]

_TOPIC = "decoding"
#: Largest error of an entry of a quantized key, relative to the key's largest entry: 4 bits have 1 / 14.
_QUANTIZED = 0.1
_SLICES = ("__getitem__", "narrow")
_PROJECTIONS = ("linear", "matmul", "__matmul__", "bmm", "addmm", "einsum", "conv1d", "embedding")


def decode_findings(step: Step, coverage: Coverage, *, explained: bool) -> Iterator[Finding]:
    """Yield a finding if decode steps give other results than one prefill, and for a cache that is copied.

    Args:
        step: The step.
        coverage: Collects the checks.
        explained: Another finding already says why decode steps are wrong.
    """
    try:
        if found := runs_of(step):
            runs = min(found, key=lambda x: _errors(x)[1]) if len(found) > 1 else found[0]
            yield from cat_findings(runs)
            if explained:
                raise CannotRun("another finding already says why decode steps are wrong")
            yield from _compared(runs, coverage)
    except CannotRun as error:
        coverage.absent(_TOPIC, str(error))


def _compared(runs: Runs, coverage: Coverage) -> Iterator[Finding]:
    before, after, moved = _errors(runs)
    same = rounding(runs.groups[0][0].rows)
    if before > same:
        raise CannotRun("results of the prefill depend on the number of its tokens")
    said = f"equal one prefill, {runs.how}{', with samples in another order' if moved else ''}"
    if after <= same:
        coverage.made(_TOPIC, said)
        return
    found = _first(runs, same)
    rounded = found is not None and found.error <= _QUANTIZED and _is_rounded(found)
    if rounded:
        if after <= 2 * _QUANTIZED:
            coverage.made(_TOPIC, f"{said}, up to rounding of the cache ({after:.1e})")
            return
        found = _first(runs, _QUANTIZED)
    coverage.made(_TOPIC, f"compared with one prefill, {runs.how}")
    yield _finding(runs, found, after, rounded=rounded)


def _is_rounded(found: _Difference) -> bool:
    """Whether the operand that differs was rounded, or stored in a narrower dtype, since its projection."""
    made, width = found.pair.made, found.pair.call.rows.dtype.itemsize
    operand = made.value if found.kind == "value" else made.key
    if operand is None or found.kind not in ("own", "older", "value"):
        return False

    def rounds(x: Node) -> bool:
        dtype = x.value.dtype
        return "round" in x.name or "quant" in x.name or (dtype.itemsize < width and dtype != torch.bool)

    return any(map(rounds, backwards(operand, -2, until=_PROJECTIONS)))


def _errors(runs: Runs) -> tuple[float, float, bool]:
    """Return the largest error of prefilled and of decoded tokens, and whether samples changed places."""
    first, total, rows = runs.lengths[0], sum(runs.lengths), runs.groups[0][0].rows
    prefilled, decoded, moved = list[float](), list[float](), False
    for name, x in runs.steps.results.items():
        y = runs.whole.results.get(name)
        if y is None or x.dim() < 3 or x.shape[1] != total or y.dim() < 2 or y.shape[1] < total:
            continue
        own = list(range(len(x)))
        order = _order(x[:, -1], y[:, total - 1]) if rows.dim() > 3 and len(rows) == len(x) else own
        moved |= order != own
        prefilled += [distance(x[:, i], y[:, i]) for i in range(first)]
        decoded += [distance(x[:, i], y[order, i]) for i in range(first, total)]
    if not decoded:
        raise CannotRun("the model has no result for each token")
    return max(prefilled), max(decoded), moved


def _order(x: Tensor, y: Tensor) -> list[int]:
    """Find the row of y for each row of x. A row without an equal one keeps its number."""
    apart = torch.cdist(x.flatten(1).float(), y.flatten(1).float(), p=torch.inf)
    near = apart.min(1)
    moved = (near.values <= 1e-3 * y.abs().max()) & (apart.diagonal() > near.values + 1e-6)
    return torch.where(moved, near.indices, torch.arange(len(x))).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Difference:
    """The first operand of a decode step that differs.

    Attributes:
        kind: "query", "own" (key of the token), "older" (key of an earlier one), "mask", "value" or "call".
        pair: The calls.
        error: The relative difference.
        key: Number of the key that differs.
        moved: Another sample has the key.
        seen: Number of visible keys in the step and in the prefill.
    """

    kind: str
    pair: Pair
    error: float
    key: int = 0
    moved: bool = False
    seen: tuple[int, int] = (0, 0)


def _first(runs: Runs, same: float) -> _Difference | None:
    """Find the first call of a decode step with other operands than the prefill."""
    return next((x for pair in runs.pairs() if (x := _differs(pair, same)) is not None), None)


def _differs(pair: Pair, same: float) -> _Difference | None:
    (row, token), made, wanted = pair.tokens, pair.made, pair.wanted
    q, other_q, k, other_k = (_flat(x.value) for x in (made.query, wanted.query, made.key, wanted.key))
    seen, shown = visible_in(pair.call), visible_in(pair.other)
    fits = q.shape[::2] == other_q.shape[::2] and k.shape[::2] == other_k.shape[::2]
    if not fits or seen is None or shown is None:
        return None
    order = _order(q[:, row], other_q[:, token])
    error = float((q[:, row] - other_q[order, token]).abs().max() / other_q.abs().max().clamp_min(1e-30))
    if error > same:
        return _Difference("query", pair, error)
    for b, of in enumerate(order):
        has = seen[b % len(seen), row].nonzero().flatten()
        needed = shown[of % len(shown), token].nonzero().flatten()
        keys, visible = other_k[of, needed], k[b, has]
        gaps = _gaps(keys, k[b])
        missing = needed[gaps > same].tolist()
        if missing:
            key, lost = max(missing), other_k[of, [max(missing)]]
            moved = any(bool(_gaps(lost, x) <= same) for i, x in enumerate(k) if i != b)
            return _Difference("own" if key == token else "older", pair, float(gaps.max()), key, moved)
        if len(has) != len(needed) or bool((_gaps(keys, visible) > same).any()):
            return _Difference("mask", pair, 1.0, seen=(len(has), len(needed)))
        if made.value is not None and wanted.value is not None:
            v, other_v = _flat(made.value.value)[b], _flat(wanted.value.value)[of]
            error = float(_gaps(other_v[needed], v[has]).max()) if v.shape[1] == other_v.shape[1] else 0.0
            if error > same:
                return _Difference("value", pair, error)
    result, other = _result(pair.call, made), _result(pair.other, wanted)
    if result is None or other is None or result.shape[-1] != other.shape[-1]:
        return None
    error = distance(result[..., row, :], other[order][..., token, :])
    return _Difference("call", pair, error) if error > same else None


def _result(call: Call, made: Attend) -> Tensor | None:
    if call.is_torchs:
        return call.result
    return None if made.result is None else made.result.value


def _flat(x: Tensor) -> Tensor:
    """Bring an operand (B, H, S, D) or (B, H, G, S, D) to (B, S, H * D)."""
    x = x.float()
    return x.movedim(-2, 1).flatten(2) if x.dim() > 3 else x


def _gaps(wanted: Tensor, found: Tensor) -> Tensor:
    """Compute the distance of each wanted key (N, D) to the nearest key (M, D), relative to its size."""
    if not len(found) or not len(wanted):
        return torch.full((len(wanted),), torch.inf)
    size = wanted.abs().amax(-1).clamp_min(1e-30)
    return torch.cdist(wanted, found, p=torch.inf).min(1).values / size


def _finding(runs: Runs, found: _Difference | None, error: float, *, rounded: bool) -> Finding:
    what = "A decode step gives other results than a prefill of the same tokens"
    decoded, total = sum(runs.lengths[1:]), sum(runs.lengths)
    evidence = f"results of the last {decoded} of {total} tokens differ by up to {error:.1e} (relative)"
    if found is None:
        texts = texts_of("decode", "rounded" if rounded else "unseen")
        line = at(forward_line(runs.steps.subject.model))
        return Finding("decode", what, line, (evidence,), *texts, severity="note" if rounded else "")
    place, case = _explained(found)
    of, by = f"token {found.pair.tokens[1]}", f"{found.error:.1e}"
    seen, needed = found.seen
    first = {
        "query": f"q of {of} is the first operand that differs, by {by}",
        "own": f"q of {of} is equal, and its own key differs or is missing",
        "older": f"q and key of {of} are equal, and the key of token {found.key} differs or is missing",
        "mask": f"q and all keys of {of} are equal: it sees {seen} keys, and {needed} in a prefill",
        "value": f"q, keys and mask of {of} are equal, and values differ by {by}",
        "call": f"q, keys, values and mask of {of} are equal, the result differs by {by}",
    }[found.kind]
    places, severity = at(place, found.pair.call.place), ""
    if found.kind == "query" and found.pair.layer and _result(found.pair.call, found.pair.made) is not None:
        case, severity = "behind", "note" if rounded else ""
    tried = "" if case == "behind" else _tried(runs, error)
    texts = texts_of("decode", case)
    return Finding("decode", what, places, (evidence, first), *texts, tried, severity=severity)


def _explained(found: _Difference) -> tuple[Place | None, str]:
    """Find the line of a difference, and its case."""
    pair, made, wanted = found.pair, found.pair.made, found.pair.wanted
    cache, call = cache_of(made.key, pair.start), pair.call.place
    if found.kind == "query":
        return _of_token(pair, made.query, wanted.query)
    if found.kind == "own":
        new = made.key if cache is None else cache.inputs[-1]
        if cache is not None and not new.name:
            return cache.place, "lost"
        other = cache_of(wanted.key, 0)
        return _of_token(pair, new, wanted.key if other is None else other.inputs[-1])
    if found.kind == "older":
        behind = None if cache is made.key or found.moved else cache
        if behind is not None and _holds(behind, wanted, found.key):
            return _behind(made.key, behind, call), "turned-twice"
        return (cache.place if cache else call), "reordered" if found.moved else "lost"
    if found.kind == "mask":
        return (made.mask.place if made.mask else call), "mask"
    if found.kind == "value" and made.value is not None:
        return (cache_of(made.value, pair.start) or made.value).place, "values"
    return call, "call"


def _of_token(pair: Pair, made: Node, wanted: Node) -> tuple[Place | None, str]:
    """Explain the first function whose result for a token differs."""
    node, other = origin(made, wanted, pair.tokens, pair.sizes)
    if any(x.name and x.value.is_floating_point() for x in node.inputs) and node.name not in _SLICES:
        if node.name != other.name:
            return node.place, "other-function"
        inputs = zip(node.inputs, other.inputs, strict=False)
        differ = [apart(x.value, y.value, pair.tokens, pair.sizes) for x, y in inputs]
        return node.place, "unread" if None in differ else "other-arguments"
    row = pair.tokens[0]
    restarts = apart(node.value, other.value, (row, row), pair.sizes) is False
    return node.place, "restarted" if restarts else "moved"


def _holds(cache: Node, wanted: Attend, key: int) -> bool:
    """Whether the cache has the key as the prefill's call has it."""
    one, two = _flat(cache.value), _flat(wanted.key.value)
    return one.shape[::2] == two.shape[::2] and bool(_gaps(two[0, [key]], one[0]) <= SAME)


def _behind(key: Node, cache: Node, call: Place | None) -> Place | None:
    """Find the line that changes keys behind the cache. A helper of such lines is left for its caller."""
    changes = [
        x
        for x in backwards(key, cache.order)
        if len(x.inputs) > 1 and not x.is_join and cache in set(backwards(x, cache.order - 1))
    ]
    lines = min(changes, key=lambda x: x.order, default=key).lines
    common = (i for i, x in enumerate(lines) if call and (x.file, x.function) == (call.file, call.function))
    number = next(common, 0)
    return lines[number - (number > 1)] if lines else call


def _tried(runs: Runs, error: float) -> str:
    """Give decode steps the prefill's results of attention, and compare the model's results."""
    pairs = {x.call.number: x for x in runs.pairs() if x.call.is_torchs}

    def replaced(call: Call) -> Tensor | None:
        if (pair := pairs.get(call.number)) is None:
            return None
        stop = pair.tokens[1] + 1
        other = pair.other.result[..., stop - pair.sizes[0] : stop, :]
        return other if other.shape == call.result.shape else None

    again = replace(runs, steps=runs.steps.again(run=runs.run, replace=replaced))
    _, after, _ = _errors(again)
    if after > rounding(runs.groups[0][0].rows):
        return ""
    return f"with the prefill's results in these calls, results differ by {after:.1e} instead of {error:.1e}"
