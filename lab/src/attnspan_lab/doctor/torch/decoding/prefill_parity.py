"""Decode steps that differ from one prefill, with the operand of attention that differs first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.cache_cat import cat_findings
from attnspan_lab.doctor.torch.decoding.decode_runs import Runs, runs_of, starts
from attnspan_lab.doctor.torch.decoding.own_key import SAME
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step
from attnspan_lab.doctor.torch.recording.lineage import Attend, Node, apart, backwards, cache_of, origin

__all__ = ["decode_findings"]

_TOPIC = "decoding"
_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Largest error of an entry of a quantized key, relative to the key's largest entry: 4 bits have 1 / 14.
_QUANTIZED = 0.1
_PROJECTIONS = ("linear", "matmul", "__matmul__", "bmm", "addmm", "einsum", "conv1d", "embedding")
_POSITIONS = (
    "The line counts positions from the first token of each call, so a decode step has other positions",
    "Count positions from the number of cached tokens: torch.arange(past, past + n) for n new tokens",
)
_OTHER_POSITIONS = (
    "The line gives the token another position than the prefill does",
    "Count all tokens so far for positions: torch.arange(past, past + n) for n new tokens",
)
_STATE = (
    "From equal inputs, the line gives another result for this token: it depends on other tokens, "
    "or on arguments that are no tensors",
    "Give the line the same arguments in both ways. If it needs earlier tokens, keep them next to the cache",
)
_TURNED = (
    "The cache holds keys with positions, and positions are applied to them again behind the cache",
    "Apply positions to the new keys only, before you write them to the cache",
)
_OTHERS = (
    "The cache holds keys of other sequences: the batch was reordered, and the cache was not",
    "Reorder the cache with the batch: cache.index_select(batch_dim, order)",
)
_LOST = (
    "The cache no longer has all keys of earlier tokens: a write hit the wrong slots, or dropped keys",
    "Write the keys of n new tokens to the slots torch.arange(past, past + n), past from the cache's length",
)
_VALUES = (
    "Keys of the cache are equal to a prefill's keys, and values are not",
    "Write values to the same slots as keys, torch.arange(past, past + n), without another change",
)
_ROUNDED = (
    "The cache stores rounded keys or values, and the doctor saw no other difference",
    "Store keys and values with more bits",
)
_MASK = (
    "The mask of the decode step differs from the mask's row for this token in the prefill",
    "Build the decode step's mask from the same window and padding, for all keys of the cache",
)
_CALL = (
    "q, keys, values and visible keys are equal, so other arguments of the call differ",
    "Pass the same arguments, such as scale and softcap, in prefill and decode steps",
)
_ELSEWHERE = "The first difference is behind attention: this line's result depends on the tokens of one call"


def decode_findings(step: Step, coverage: Coverage, *, explained: bool) -> Iterator[Finding]:
    """Yield a finding if decode steps give other results than one prefill, and for a cache that is copied.

    Args:
        step: The step.
        coverage: Collects the checks.
        explained: Another finding already says why decode steps are wrong.
    """
    try:
        runs = runs_of(step)
    except CannotRun as error:
        coverage.absent(_TOPIC, str(error))
        return
    if runs is None:
        return
    yield from cat_findings(runs)
    if explained:
        coverage.absent(_TOPIC, "another finding already says why decode steps are wrong")
        return
    try:
        yield from _compared(runs, coverage)
    except CannotRun as error:
        coverage.absent(_TOPIC, str(error))


def _compared(runs: Runs, coverage: Coverage) -> Iterator[Finding]:
    before, after, moved = _errors(runs)
    dtype = runs.groups[0][0].rows.dtype
    same = _ROUNDING.get(dtype, SAME)
    if before > same:
        raise CannotRun("results of the prefill depend on the number of its tokens")
    said = f"equal one prefill, {runs.how}{', with samples in another order' if moved else ''}"
    if after <= same:
        coverage.made(_TOPIC, said)
        return
    found = _first(runs, same)
    rounded = found is not None and found.error <= _QUANTIZED and _is_rounded(runs, found)
    if rounded:
        if after <= 2 * _QUANTIZED:
            coverage.made(_TOPIC, f"{said}, up to rounding of the cache ({after:.1e})")
            return
        found = _first(runs, _QUANTIZED)
    coverage.made(_TOPIC, f"compared with one prefill, {runs.how}")
    yield _finding(runs, found, after, rounded=rounded and found is None)


def _is_rounded(runs: Runs, found: _Difference) -> bool:
    """Whether the operand that differs was rounded, or stored in a narrower dtype, since its projection."""
    call = runs.groups[found.number][found.layer]
    made = runs.made.attends[call.number]
    if made is None or found.kind not in ("own", "older", "value"):
        return False
    todo, seen, width = (
        [made.value if found.kind == "value" else made.key],
        set[Node](),
        call.rows.dtype.itemsize,
    )
    while todo:
        node = todo.pop()
        if node is None or node in seen or node.name in _PROJECTIONS:
            continue
        seen.add(node)
        narrow = node.value.dtype.itemsize < width and node.value.dtype != torch.bool
        if narrow or "round" in node.name or "quant" in node.name:
            return True
        todo += node.inputs
    return False


def _errors(runs: Runs) -> tuple[float, float, bool]:
    """Return the largest error of prefilled and of decoded tokens, and whether samples changed places."""
    total = sum(runs.lengths)
    rows = len(runs.groups[0][0].rows) if runs.groups[0][0].rows.dim() > 3 else None
    errors: list[list[float]] = [[], []]
    moved = False
    for name, x in runs.steps.results.items():
        y = runs.whole.results.get(name)
        if y is None or x.dim() < 3 or x.shape[1] != total or y.dim() < 2 or y.shape[1] < total:
            continue
        order = _order(x[:, -1], y[:, total - 1]) if rows == len(x) else list(range(len(x)))
        moved = moved or order != list(range(len(x)))
        for i in range(total):
            decoded = i >= runs.lengths[0]
            errors[decoded].append(distance(x[:, i], y[order if decoded else slice(None), i]))
    if not errors[1]:
        raise CannotRun("the model has no result for each token")
    return max(errors[0], default=0.0), max(errors[1]), moved


def _order(x: Tensor, y: Tensor) -> list[int]:
    """Find the row of y for each row of x. A row without an equal one keeps its number."""
    apart = torch.cdist(x.flatten(1).float(), y.flatten(1).float(), p=torch.inf)
    near = apart.min(1)
    own = apart.diagonal() <= near.values + 1e-6
    close = near.values <= 1e-3 * y.abs().max()
    return [
        int(n) if c and not o else i for i, (n, c, o) in enumerate(zip(near.indices, close, own, strict=True))
    ]


@dataclass(frozen=True, eq=False)
class _Difference:
    """The first operand of a decode step that differs: "query", "own", "older", "mask", "value" or "call"."""

    kind: str
    layer: int
    number: int
    token: int
    key: int
    error: float
    other_rows: bool = False
    text: str = ""


def _first(runs: Runs, same: float) -> _Difference | None:
    """Find the first call of a decode step with other operands than the prefill."""
    for layer in range(len(runs.groups[0])):
        for number, start in starts(runs):
            call = runs.groups[number][layer]
            made = _attend(runs.made.attends, call, runs.steps.calls)
            wanted = _attend(runs.wanted.attends, runs.whole.calls[layer], runs.whole.calls)
            if made is None or wanted is None:
                return None
            last = runs.lengths[number] - 1
            if made.query.value.shape[-2] != last + 1:
                continue  # A library packs heads in another way for one query.
            args = call, runs.whole.calls[layer], made, wanted
            if (found := _differs(*args, (last, start + last), same, layer, number)) is not None:
                return found
    return None


def _attend(known: list[Attend | None], call: Call, calls: list[Call]) -> Attend | None:
    return known[call.number] if len(known) == len(calls) else None


def _differs(
    call: Call,
    other: Call,
    made: Attend,
    wanted: Attend,
    rows: tuple[int, int],
    same: float,
    layer: int,
    number: int,
) -> _Difference | None:
    (row, token), one, two = rows, _flat(made.query.value), _flat(wanted.query.value)
    seen, shown = visible_in(call), visible_in(other)
    keys, all_keys = _flat(made.key.value), _flat(wanted.key.value)
    if (
        one.shape[::2] != two.shape[::2]
        or keys.shape[::2] != all_keys.shape[::2]
        or seen is None
        or shown is None
    ):
        return None
    order = _order(one[:, row], two[:, token])

    def found(kind: str, error: float, key: int = 0, other_rows: bool = False, text: str = "") -> _Difference:
        return _Difference(kind, layer, number, token, key, error, other_rows, text)

    error = float((one[:, row] - two[order, token]).abs().max() / two.abs().max().clamp_min(1e-30))
    if error > same:
        return found("query", error)
    for b, of in enumerate(order):
        needed = shown[of % len(shown), token].nonzero().flatten()
        has = seen[b % len(seen), row].nonzero().flatten()
        gap = _gaps(all_keys[of, needed], keys[b])
        missing = needed[gap > same].tolist()
        if missing:
            key, error = max(missing), float(gap.max())
            if key == token:
                return found("own", error, key)
            elsewhere = [_gaps(all_keys[of, [key]], keys[i]) <= same for i in range(len(keys)) if i != b]
            return found("older", error, key, bool(any(elsewhere)))
        extra = int((_gaps(keys[b, has], all_keys[of, needed]) > same).sum())
        hidden = int((_gaps(all_keys[of, needed], keys[b, has]) > same).sum())
        if extra or hidden or len(has) != len(needed):
            text = f"it sees {len(has)} keys, and {len(needed)} in a prefill"
            return found("mask", 1.0, text=text)
        values = _value_gaps(made, wanted, b, of, has, needed)
        if values > same:
            return found("value", values)
    if call.is_torchs and call.result.shape[-1] == other.result.shape[-1]:
        error = distance(call.result[..., row, :], other.result[order][..., token, :])
        return found("call", error) if error > same else None
    return None


def _value_gaps(made: Attend, wanted: Attend, b: int, of: int, has: Tensor, needed: Tensor) -> float:
    """Compute the largest distance of a visible value to the nearest visible value of the other way."""
    if made.value is None or wanted.value is None:
        return 0.0
    one, two = _flat(made.value.value), _flat(wanted.value.value)
    return float(_gaps(two[of, needed], one[b, has]).max()) if one.shape[2] == two.shape[2] else 0.0


def _flat(x: Tensor) -> Tensor:
    """Bring an operand (B, H, S, D) to (B, S, H * D)."""
    x = x.float()
    return x.transpose(1, 2).flatten(2) if x.dim() == 4 else x


def _gaps(wanted: Tensor, found: Tensor) -> Tensor:
    """Compute the distance of each wanted key (N, D) to the nearest key (M, D), relative to its size."""
    if not len(found) or not len(wanted):
        return torch.full((len(wanted),), torch.inf)
    size = wanted.abs().amax(-1).clamp_min(1e-30)
    return torch.cdist(wanted, found, p=torch.inf).min(1).values / size


def _finding(runs: Runs, found: _Difference | None, error: float, *, rounded: bool) -> Finding:
    what = "A decode step gives other results than a prefill of the same tokens"
    decoded = sum(runs.lengths[1:])
    evidence = [
        f"results of the last {decoded} of {sum(runs.lengths)} tokens differ by up to {error:.1e} (relative)"
    ]
    if rounded:
        return Finding("decode", what, (), tuple(evidence), *_ROUNDED, severity="note")
    if found is None:
        cause = "Attention has the same operands in both ways, or the doctor cannot read them"
        return Finding("decode", what, (), tuple(evidence), cause, severity="note")
    call = runs.groups[found.number][found.layer]
    node, texts = _explained(runs, found)
    of = f"token {found.token}"
    evidence.append(
        {
            "query": f"q of {of} is the first operand that differs, by {found.error:.1e}",
            "own": f"q of {of} is equal, and its own key differs or is missing",
            "older": f"q and key of {of} are equal, and the key of token {found.key} differs or is missing",
            "mask": f"q and all keys of {of} are equal: {found.text}",
            "value": f"q, keys and mask of {of} are equal, and values differ by {found.error:.1e}",
            "call": f"q, keys, values and mask of {of} are equal, the result differs by {found.error:.1e}",
        }[found.kind]
    )
    if found.kind == "query" and found.layer:
        return Finding(
            "decode", what, at(node, call.place), tuple(evidence), _ELSEWHERE, _STATE[1], severity="note"
        )
    tried = _tried(runs, error)
    return Finding("decode", what, at(node, call.place), tuple(evidence), *texts, tried)


def _explained(runs: Runs, found: _Difference) -> tuple[Place | None, tuple[str, str]]:
    """Find the line of a difference, with its cause and remedy."""
    call = runs.groups[found.number][found.layer]
    made, wanted = runs.made.attends[call.number], runs.wanted.attends[found.layer]
    assert made is not None
    assert wanted is not None
    last = runs.lengths[found.number] - 1
    tokens, sizes = (last, found.token), (runs.lengths[found.number], runs.size)
    before = runs.made.attends[runs.groups[found.number - 1][-1].number]
    start = 0 if before is None else before.order
    cache = cache_of(made.key, start)
    if found.kind == "query":
        return _of_token(origin(made.query, wanted.query, tokens, sizes), tokens, sizes)
    if found.kind == "own":
        new = cache.inputs[-1] if cache is not None else made.key
        other = cache_of(wanted.key, 0)
        first, same = origin(new, other.inputs[-1] if other is not None else wanted.key, tokens, sizes)
        if cache is not None and first is new and first.name == "":
            return cache.place, _LOST
        return _of_token((first, same), tokens, sizes)
    if found.kind == "older":
        if found.other_rows:
            return (cache.place if cache else call.place), _OTHERS
        if cache is not None and cache is not made.key and _holds(cache, wanted, found.key):
            return _behind(made.key, cache, call), _TURNED
        return (cache.place if cache else call.place), _LOST
    if found.kind == "mask":
        return (made.mask.place if made.mask is not None else call.place), _MASK
    if found.kind == "value" and made.value is not None:
        stored = cache_of(made.value, start)
        return (stored or made.value).place, _VALUES
    return call.place, _CALL


def _of_token(
    nodes: tuple[Node, Node], tokens: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Place | None, tuple[str, str]]:
    """Explain the first function whose result for a token differs."""
    node, other = nodes
    if any(x.name and x.value.is_floating_point() for x in node.inputs) and node.name != "__getitem__":
        return node.place, _STATE
    again = apart(node.value, other.value, (tokens[0], tokens[0]), sizes) is False
    return node.place, _POSITIONS if again else _OTHER_POSITIONS


def _holds(cache: Node, wanted: Attend, key: int) -> bool:
    """Whether the cache has the key as the prefill's call has it."""
    one, two = _flat(cache.value), _flat(wanted.key.value)
    if one.shape[::2] != two.shape[::2]:
        return False
    return bool(_gaps(two[0, [key]], one[0]) <= SAME)


def _behind(key: Node, cache: Node, call: Call) -> Place | None:
    """Find the line that changes keys behind the cache. A helper of such lines is left for its caller."""
    changes = [
        x
        for x in backwards(key, cache.order)
        if len(x.inputs) > 1 and not x.is_join and cache in set(backwards(x, cache.order - 1))
    ]
    lines = min(changes, key=lambda x: x.order, default=key).lines
    own = call.place
    common = (i for i, x in enumerate(lines) if own and (x.file, x.function) == (own.file, own.function))
    number = next(common, 0)
    return lines[number - (number > 1)] if lines else own


def _tried(runs: Runs, error: float) -> str:
    """Give decode steps the prefill's results of attention, and compare the model's results."""
    calls = {x.number: (g, i) for g, group in enumerate(runs.groups) for i, x in enumerate(group) if g}

    def replaced(call: Call) -> Tensor | None:
        if call.number not in calls or not call.is_torchs:
            return None
        number, layer = calls[call.number]
        start = sum(runs.lengths[:number])
        other = runs.whole.calls[layer].result[..., start : start + runs.lengths[number], :]
        return other if other.shape == call.result.shape else None

    again = runs.repeat(replaced)
    _, after, _ = _errors(again)
    if after > _ROUNDING.get(runs.groups[0][0].rows.dtype, SAME):
        return ""
    return f"with the prefill's results in these calls, results differ by {after:.1e} instead of {error:.1e}"
