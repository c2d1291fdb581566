"""Samples of a batch that influence each other through attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.sample_order import placed_findings
from attnspan_lab.doctor.torch.isolation.axes import source_of
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, changed_tokens, noise, recorded
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.words import counted

__all__ = ["sample_findings"]


def sample_findings(step: Step, coverage: Coverage, done: set[Place]) -> Iterator[Finding]:
    """Yield calls through which a sample of the batch changes the results of other samples.

    Args:
        step: The step.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    found = _samples(step)
    if found is None:
        coverage.absent("samples", "no tensor of a batch has several samples along its first dim")
        return
    name, tokens, has_tokens = found
    if not _has_samples(step, len(tokens)):
        coverage.absent("samples", f"no result has a row for each of the {len(tokens)} samples")
        return
    changed = tokens.clone()
    changed[0] = changed_tokens(tokens)[0]
    other = step.again(step.subject.with_tokens(step.batch, name, changed))
    many = _others(step, other, len(tokens))
    if not many:
        coverage.made("samples", "a changed sample changes the results of no other sample")
        if has_tokens:
            yield from _independent(step, coverage, tokens, done)
        return
    for call in step.calls:
        if call.place is None or call.place in done:
            continue
        kind = _mixed(step, call)
        if kind == "axis" and not has_tokens:
            text = f"the call at {call.place} may attend over the samples: {name} has no known dim of tokens"
            coverage.missed("samples", text)
            return
        if kind == "axis":
            finding = _of_axis(step, call, name, tokens, many, coverage)
        elif kind == "joined":
            finding = _of_joined(call, many)
        else:
            continue
        if finding is not None:
            done.add(call.place)
            yield finding
        if kind:
            return
    if not done:
        said = f"a changed sample changes the results of {counted(many, 'other sample')}"
        said += ". No attention call is known to mix them"
        coverage.made("samples", said)


def _samples(step: Step) -> tuple[str, Tensor, bool] | None:
    """Find a tensor with several samples: the tokens, or else numbers. Say whether it has tokens."""
    found = step.subject.tokens(step.batch)
    if found is not None:
        return (*found, True) if len(found[1]) > 1 else None
    named = step.subject.named(step.batch)
    rows = next((len(x) for x in named.values() if x.dim() > 1), 0)
    fits = (k for k, x in named.items() if x.dim() > 1 and len(x) == rows > 1 and x.is_floating_point())
    name = next(fits, None)
    return None if name is None else (name, named[name], False)


def _has_samples(step: Step, rows: int) -> bool:
    return any(x.dim() > 1 and len(x) == rows for x in step.results.values())


def _independent(step: Step, coverage: Coverage, tokens: Tensor, done: set[Place]) -> Iterator[Finding]:
    """Yield a finding if the order of samples that do not influence each other changes results."""
    try:
        rows, length = tokens.shape[:2]
        yield from placed_findings(step, rows, length, done)
    except CannotRun as error:
        coverage.missed("order of samples", str(error))


def _others(step: Step, other: Step, rows: int) -> int:
    """Count the other samples whose results differ. Scores of all pairs of samples (B, B) do not count."""
    most = 0
    for name, x in step.results.items():
        y = other.results.get(name)
        pairs = x.dim() == 2 and x.shape[0] == x.shape[1]
        if y is None or x.shape != y.shape or x.dim() < 2 or len(x) != rows or pairs:
            continue
        error = (x[1:] - y[1:]).double().flatten(1).norm(dim=1)
        size = x[1:].double().flatten(1).norm(dim=1).clamp_min(1e-30)
        most = max(most, int((error / size > ROUNDING.get(x.dtype, 1e-4)).sum()))
    return most


def _mixed(step: Step, call: Call) -> str:
    """Say how the first sample reaches a call: as an index of the attended "axis", "joined" rows, or ""."""
    source = source_of(step, call)
    if source is None:
        return ""
    batch, length = step.inputs[source].shape[:2]

    def change(x: Tensor) -> Tensor:
        if x.shape[:2] != (batch, length):
            return x
        x, more = x.clone(), noise(x[:1])
        x[:1] += more
        return x

    again = step.again(inject=(source, change))
    if len(again.calls) <= call.number:
        return ""
    rows = [_changed_rows(call, again.calls[call.number], name) for name in _operands(call)]
    size = call.given["key"].shape[-2] if call.is_torchs else call.rows.shape[-1]
    if size == batch and all(x == [0] for x in rows):
        return "axis"
    if size == batch * length and all(x == list(range(length)) for x in rows):
        visible = visible_in(call)
        crossing = visible is not None and bool(visible[:, length:, :length].any())
        return "joined" if crossing else ""
    return ""


def _operands(call: Call) -> tuple[str, ...]:
    return ("query", "key", "value") if call.is_torchs else ("scores",)


def _changed_rows(call: Call, other: Call, name: str) -> list[int] | None:
    """List the rows of an operand that changed, if each changed in all heads. Scores change in both dims."""
    a, b = call.given[name], other.given[name]
    if a.shape != b.shape:
        return None
    differs = a != b
    if name == "scores":  # The rest is unchanged if no query and no key of another row changed.
        own = torch.eye(a.shape[-1], dtype=torch.bool)[0]
        square = a.shape[-1] == a.shape[-2] and bool((differs == (own[:, None] | own)).all())
        return [0] if square else None
    rows = differs.any(-1).flatten(0, -2)
    return rows.any(0).nonzero().flatten().tolist() if bool(rows.any(-1).all()) else None


def _of_axis(
    step: Step, call: Call, name: str, tokens: Tensor, many: int, coverage: Coverage
) -> Finding | None:
    """Write the finding for a call that attends over the batch, if positions show which dim that is."""
    source = source_of(step, call) or ""
    shape = tuple(step.inputs[source].shape)
    along = _positions(step, call, name, tokens)
    where = f"the call at {call.place} attends over dim 0 of its inputs {shape}"
    if along != 1 or _tokens_mix(step, name, tokens):
        why = "the model has positions along dim 0" if along == 0 else "the model may have no positions"
        why = "tokens along dim 1 also reach each other" if along == 1 else why
        coverage.missed("samples", f"{where}, which may be the sequence: {why}")
        return None
    what = "Samples of the batch attend to each other here, and tokens of a sample do not"
    evidence = (
        f"changing sample 0 changes the results of {counted(many, 'other sample')}",
        "changing a token changes no other token of its sample",
        f"with equal tokens, inputs {shape} of this call differ along dim 1 (positions), not along dim 0",
    )
    tried = _with_batch_first(step, name, tokens)
    cause = "nn.MultiheadAttention without batch_first=True reads (S, B, C)" if tried else ""
    remedy = "Make the module with batch_first=True" if tried else ""
    return Finding("sample-axis", what, at(call.place), evidence, cause, remedy, tried)


def _of_joined(call: Call, many: int) -> Finding:
    what = "The samples of the batch see each other in this call"
    evidence = (
        f"q has shape {tuple(call.rows.shape)}, with the tokens of all samples in one sequence",
        f"changing sample 0 changes the results of {counted(many, 'other sample')}",
    )
    return Finding("samples", what, at(call.place), evidence)


def _positions(step: Step, call: Call, name: str, tokens: Tensor) -> int | None:
    """Find the dim along which a model with equal tokens has different inputs (X, Y, C) of a call."""
    equal = tokens[:1, :1].expand_as(tokens).clone()
    same = step.again(step.subject.with_tokens(step.batch, name, equal))
    source = source_of(same, call)
    if source is None:
        return None
    x = same.inputs[source]
    first = bool((x != x[:1]).any())
    second = bool((x != x[:, :1]).any())
    return None if first == second else 0 if first else 1


def _tokens_mix(step: Step, name: str, tokens: Tensor) -> bool:
    """Whether a changed token changes other tokens of its sample, or this is unknown.

    Results may have no row for each token. A token is therefore also changed in front of the first call, and
    followed into the inputs (B, S, C) of later modules.
    """
    changed = tokens.clone()
    changed[:, 0] = changed_tokens(tokens)[:, 0]
    other = step.again(step.subject.with_tokens(step.batch, name, changed))
    found = [(x, other.results[k]) for k, x in step.results.items() if x.shape[:2] == tokens.shape[:2]]
    if any(bool((x[:, 1:] != y[:, 1:]).any()) for x, y in found):
        return True
    source = source_of(step, step.calls[0]) or ""
    if source not in step.inputs:
        return True
    shape = step.inputs[source].shape[:2]

    def change(x: Tensor) -> Tensor:
        if x.shape[:2] != shape:
            return x
        x = x.clone()
        x[:, :1] += noise(x[:, :1])
        return x

    again = step.again(inject=(source, change))
    pairs = [(x, again.results.get(k)) for k, x in step.results.items()]
    pairs += [
        (x, again.inputs.get(k)) for k, x in step.inputs.items() if not f"{k}.".startswith(f"{source}.")
    ]
    differs = [x != y for x, y in pairs if y is not None and x.shape == y.shape and x.shape[:2] == shape]
    return not any(bool(x.any()) for x in differs) or any(bool(x[:, 1:].any()) for x in differs)


def _with_batch_first(step: Step, name: str, tokens: Tensor) -> str:
    """Make all modules of torch read the batch first, and describe the outcome if it helps."""

    def changed(tokens: Tensor) -> Step:
        own = step.subject.copy()
        for x in own.model.modules():
            if isinstance(x, nn.MultiheadAttention):
                x.batch_first = True
        return recorded(own, own.with_tokens(step.batch, name, tokens), step.lines)

    attentions = [x for x in step.subject.model.modules() if isinstance(x, nn.MultiheadAttention)]
    if all(x.batch_first for x in attentions):
        return ""
    other = tokens.clone()
    other[0] = changed_tokens(tokens)[0]
    try:
        before = changed(tokens)
        if (
            _others(before, changed(other), len(tokens))
            or not before.calls
            or not _tokens_mix(before, name, tokens)
        ):
            return ""
    except CannotRun:  # A mask does not fit, for example.
        return ""
    return "with batch_first=True, a changed sample changes no other sample, and tokens reach each other"
