"""Samples of a batch that influence each other through attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.decoding.sample_order import placed_findings
from attnspan_lab.doctor.torch.isolation.axes import source_of
from attnspan_lab.doctor.torch.masks.cross_attention import visible_in
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, recorded
from attnspan_lab.doctor.torch.recording.changes import stirred, with_other_tokens
from attnspan_lab.doctor.torch.recording.trace import ROUNDING
from attnspan_lab.doctor.words import counted

__all__ = ["sample_findings"]

_TOPIC = "samples"
_FIRST = slice(1)


def sample_findings(step: Step, coverage: Coverage, done: set[Place]) -> Iterator[Finding]:
    """Yield calls through which a sample of the batch changes the results of other samples.

    Args:
        step: The step.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    found = _samples(step)
    if found is None:
        coverage.absent(_TOPIC, "no tensor of a batch has several samples along its first dim")
        return
    name, tokens, has_tokens = found
    rows = len(tokens)
    if not any(x.dim() > 1 and len(x) == rows for x in step.results.values()):
        coverage.absent(_TOPIC, f"no result has a row for each of the {rows} samples")
        return
    many = _others(step, _with_others(step, name, _FIRST), rows)
    if not many:
        coverage.made(_TOPIC, "a changed sample changes the results of no other sample")
        if has_tokens:
            try:
                yield from placed_findings(step, rows, tokens.shape[1], done)
            except CannotRun as error:
                coverage.missed("order of samples", str(error))
        return
    reached = f"the results of {counted(many, 'other sample')}"
    for call in step.calls:
        if call.place is None or call.place in done:
            continue
        kind = _mixed(step, call)
        if not kind:
            continue
        finding: Finding | None
        if kind == "joined":
            finding = _of_joined(call, reached)
        elif has_tokens:
            finding = _of_axis(step, call, name, tokens, reached, coverage)
        else:
            text = f"the call at {call.place} may attend over the samples: {name} has no known dim of tokens"
            coverage.missed(_TOPIC, text)
            return
        if finding is not None:
            done.add(call.place)
            yield finding
        return
    if not done:
        said = f"a changed sample changes {reached}. No attention call is known to mix them"
        coverage.made(_TOPIC, said)


def _samples(step: Step) -> tuple[str, Tensor, bool] | None:
    """Find a tensor with several samples: the tokens, or else numbers. Say whether it has tokens."""
    found = step.subject.tokens(step.batch)
    if found is not None:
        return (*found, True) if len(found[1]) > 1 else None
    named = {k: x for k, x in step.subject.named(step.batch).items() if x.dim() > 1}
    rows = next((len(x) for x in named.values()), 0)
    fits = ((k, x, False) for k, x in named.items() if len(x) == rows > 1 and x.is_floating_point())
    return next(fits, None)


def _with_others(step: Step, name: str, index: Any) -> Step:
    """Run a step with other tokens at an index."""
    return step.again(with_other_tokens(step.subject, step.batch, name, index))


def _others(step: Step, other: Step, rows: int) -> int:
    """Count the other samples whose results differ. Scores of all pairs of samples (B, B) do not count."""
    most = 0
    for name, x in step.results.items():
        y = other.results.get(name)
        pairs = x.dim() == 2 and x.shape[0] == x.shape[1]
        if y is None or x.shape != y.shape or x.dim() < 2 or len(x) != rows or pairs:
            continue
        error, size = (a[1:].double().flatten(1).norm(dim=1) for a in (x - y, x))
        most = max(most, int((error / size.clamp_min(1e-30) > ROUNDING.get(x.dtype, 1e-4)).sum()))
    return most


def _mixed(step: Step, call: Call) -> str:
    """Say how the first sample reaches a call: as an index of the attended "axis", "joined" rows, or ""."""
    source = source_of(step, call)
    if source is None:
        return ""
    batch, length = step.inputs[source].shape[:2]
    again = step.again(inject=(source, stirred((batch, length), _FIRST)))
    if len(again.calls) <= call.number:
        return ""
    rows = [_changed_rows(call, again.calls[call.number], name) for name in call.operands]
    if call.k_len == batch and all(x == [0] for x in rows):
        return "axis"
    if call.k_len == batch * length and all(x == list(range(length)) for x in rows):
        visible = visible_in(call)
        crossing = visible is not None and bool(visible[:, length:, :length].any())
        return "joined" if crossing else ""
    return ""


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
    step: Step, call: Call, name: str, tokens: Tensor, reached: str, coverage: Coverage
) -> Finding | None:
    """Write the finding for a call that attends over the batch, if positions show which dim that is."""
    shape = tuple(step.inputs[source_of(step, call) or ""].shape)
    along = _positions(step, call, name, tokens)
    if along != 1 or _tokens_mix(step, name):
        why = {0: "the model has positions along dim 0", 1: "tokens along dim 1 also reach each other"}
        where = f"the call at {call.place} attends over dim 0 of its inputs {shape}"
        because = why.get(along, "the model may have no positions")
        coverage.missed(_TOPIC, f"{where}, which may be the sequence: {because}")
        return None
    what = "Samples of the batch attend to each other here, and tokens of a sample do not"
    evidence = (
        f"changing sample 0 changes {reached}",
        "changing a token changes no other token of its sample",
        f"with equal tokens, inputs {shape} of this call differ along dim 1 (positions), not along dim 0",
    )
    cause = remedy = tried = ""
    if _is_mended(step, name, len(tokens)):
        cause = "nn.MultiheadAttention without batch_first=True reads (S, B, C)"
        remedy = "Make the module with batch_first=True"
        tried = "with batch_first=True, a changed sample changes no other sample, and tokens reach each other"
    return Finding("sample-axis", what, at(call.place), evidence, cause, remedy, tried)


def _of_joined(call: Call, reached: str) -> Finding:
    what = "The samples of the batch see each other in this call"
    evidence = (
        f"q has shape {tuple(call.rows.shape)}, with the tokens of all samples in one sequence",
        f"changing sample 0 changes {reached}",
    )
    return Finding("samples", what, at(call.place), evidence)


def _positions(step: Step, call: Call, name: str, tokens: Tensor) -> int:
    """Find the dim along which a model with equal tokens has different inputs (X, Y, C) of a call, or -1."""
    equal = tokens[:1, :1].expand_as(tokens).clone()
    same = step.again(step.subject.with_tokens(step.batch, name, equal))
    source = source_of(same, call)
    if source is None:
        return -1
    x = same.inputs[source]
    first, second = bool((x != x[:1]).any()), bool((x != x[:, :1]).any())
    return -1 if first == second else int(second)


def _tokens_mix(step: Step, name: str) -> bool:
    """Whether a changed token changes other tokens of its sample, or this is unknown.

    Results may have no row for each token. A token is therefore also changed in front of the first call, and
    followed into the inputs (B, S, C) of later modules.
    """
    first, shape = (slice(None), _FIRST), step.subject.named(step.batch)[name].shape[:2]
    other = _with_others(step, name, first)
    if any(bool(x[:, 1:].any()) for x in _differing(step.results, other.results, shape)):
        return True
    source = source_of(step, step.calls[0])
    if source is None:
        return True
    shape = step.inputs[source].shape[:2]
    again = step.again(inject=(source, stirred(shape, first)))
    later = {k: x for k, x in step.inputs.items() if not f"{k}.".startswith(f"{source}.")}
    differs = [*_differing(step.results, again.results, shape), *_differing(later, again.inputs, shape)]
    return not any(bool(x.any()) for x in differs) or any(bool(x[:, 1:].any()) for x in differs)


def _differing(one: dict[str, Tensor], other: dict[str, Tensor], shape: torch.Size) -> list[Tensor]:
    """Compare the tensors of two runs that have a row for each token."""
    pairs = [(x, other[k]) for k, x in one.items() if k in other and x.shape[:2] == shape]
    return [x != y for x, y in pairs if x.shape == y.shape]


def _is_mended(step: Step, name: str, rows: int) -> bool:
    """Whether samples do not mix, and tokens do, if all modules of torch read the batch first."""

    def attentions(model: nn.Module) -> list[nn.MultiheadAttention]:
        return [x for x in model.modules() if isinstance(x, nn.MultiheadAttention) and not x.batch_first]

    if not attentions(step.subject.model):
        return False
    own = step.subject.copy()
    for x in attentions(own.model):
        x.batch_first = True
    try:
        mended = recorded(own, step.batch, step.lines)
        mixes = _others(mended, _with_others(mended, name, _FIRST), rows) > 0
        return not mixes and bool(mended.calls) and _tokens_mix(mended, name)
    except CannotRun:  # A mask does not fit, for example.
        return False
