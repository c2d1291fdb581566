"""Hand-written attention, found by its data flow: a product, a softmax, and a product with a third tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnspan_lab.doctor.places import Place, lines_here, on_stack
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding
from attnspan_lab.doctor.torch.masks.written_remedy import first_scores, scale_of
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.operators import Operation, in_backward, storage
from attnspan_lab.doctor.torch.recording.step_record import Record

__all__ = ["on_scores", "product"]

_MASKING = ("masked_fill", "masked_fill_", "where", "add", "add_", "mul", "mul_")
_SOFTMAX = ("_softmax", "_safe_softmax", "exp", "softmax")
_MULTIHEAD = torch.nn.functional.__file__


def product(record: Record, operation: Operation, scores: Attention | None) -> None:
    """Follow a product of two tensors: it makes scores, or ends an attention call."""
    (q, k), out, place = operation.inputs[-2:], operation.outs[0], operation.place
    if scores is not None:
        if scores.softmax:
            _finish(record, scores, [q, k], out, place)
        return
    if q.dim() > 2 and out.shape[-1] > 1:
        call = Attention("written out", "", place, tuple(q.shape), tuple(k.shape), q.dtype)
        if record.function.given:
            call.kind, call.given = "sdpa", record.function.given
        call.in_multihead = on_stack(_MULTIHEAD)
        call.score_count, call.products = out.numel(), first_scores(out)
        call.key = k.mT if record.keeps_keys or q.shape[-2] != k.shape[-1] else None
        record.operands(call, [q, k], q)
        record.tags[storage(out)].scores = call


def _finish(record: Record, call: Attention, inputs: list[Tensor], out: Tensor, place: Place | None) -> None:
    """Record the second product of hand-written attention. One of its operands is the values."""
    if call in record.calls:
        if not (in_backward() or call.in_multihead):
            call.weights_used = call.weights_used or place
        return
    values = [x for x in inputs if record.tag_of(x).scores is not call]
    record.operands(call, values)
    record.keep(call, out, values[0])
    call.recomputed = in_backward()
    record.calls.append(call)


def on_scores(record: Record, operation: Operation, call: Attention) -> None:
    """Follow an operator on scores or on their softmax."""
    name, inputs, outs, place = operation.name, operation.inputs, operation.outs, operation.place
    own = [x for x in inputs if record.tag_of(x).scores is call]
    scores = own[0]
    if not call.softmax:
        call.steps.add(name.rstrip("_"))
        for x in (y for y in inputs if not any(y is z for z in own)):
            if name in _MASKING and x.dim() > 0 and x.shape[-1:] == scores.shape[-1:]:
                call.applied.append((name, place, x.detach()))
                call.filled = max(call.filled, _filled(name, x, scores, outs))
                call.mask_sources |= record.tag_of(x).sources
            if x.dim() > 1 and min(x.shape[-2:]) > 1 and x.shape[-2:] == scores.shape[-2:]:
                record.mask(call, x)
    if name in _SOFTMAX and not call.softmax:
        call.softmax = True
        call.overflow = record.tag_of(scores).overflow
        seen = scores.detach()
        seen = seen if call.keys is None else seen[..., call.keys]
        limit = highest_hiding(seen) if call.applied else HIDDEN
        call.mask_biases = call.mask_biases or _shows_masked(call, limit)
        record.see(call, ~(seen <= limit) if name != "exp" else None)
        call.scale, call.products = scale_of(call.products, seen, limit), None
        call.hidden = call.hidden if call.keys is None else []  # These queries see their sink.
        if call.kind == "written out" and place is not None:
            call.place, call.lines = place, lines_here()
    _note_use(call, outs, scores, place)
    for x in outs:
        sinks = name == "cat" and x.dim() > 1 and x.shape[:-1] == scores.shape[:-1] and not call.softmax
        if sinks:
            before = next(i for i, y in enumerate(inputs) if y is scores)
            start = sum(y.shape[-1] for y in inputs[:before])
            call.keys = slice(start, start + scores.shape[-1])
        stored = x.numel() >= scores.numel() and not any(storage(x) == storage(y) for y in inputs)
        if stored and x.is_floating_point() and x.itemsize > call.dtype.itemsize:
            first, _, size = call.wide or (place, x.dtype, 0)
            call.wide = first, x.dtype, size + x.nbytes
        if x.numel() == scores.numel() or sinks:
            record.tags[storage(x)].scores = call


def _filled(name: str, mask: Tensor, scores: Tensor, outs: list[Tensor]) -> float:
    """Return the highest number that replaced a score under a boolean mask, or -inf."""
    if mask.dtype != torch.bool or not outs or outs[0].numel() != scores.numel():
        return -math.inf
    # The scores may be the second or the third argument of torch.where.
    replaced = mask.expand_as(outs[0]) if "fill" in name else outs[0] != scores
    found = outs[0].detach()[replaced]
    return float(found.max()) if found.numel() else -math.inf


def _shows_masked(call: Attention, limit: float) -> bool:
    """Whether a mask changes scores that it does not hide, as a small negative number does."""
    adds = (highest_hiding(x) for _, _, x in call.applied if x.is_floating_point())
    return call.filled > limit or (limit == HIDDEN and any(x > HIDDEN for x in adds))


def _note_use(call: Attention, outs: list[Tensor], weights: Tensor, place: Place | None) -> None:
    """Note a line that computes something else than the result from the weights."""
    if not call.softmax or in_backward() or call.in_multihead:
        return
    held = storage(weights)  # A view of the weights is no use yet.
    if outs and all(x.numel() != weights.numel() and storage(x) != held for x in outs):
        call.weights_used = call.weights_used or place
