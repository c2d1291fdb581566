"""Watcher of eager steps: records every attention call, its inputs, and copies on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.numbers.overflow import Overflow, has_inf, overflow_of
from attnspan_lab.doctor.torch.recording.handwritten import on_scores, product
from attnspan_lab.doctor.torch.recording.kernels import fused, fused_kind
from attnspan_lab.doctor.torch.recording.operators import (
    Operation,
    Operations,
    in_backward,
    is_unset,
    operator_place,
    storage,
    with_node_places,
)
from attnspan_lab.doctor.torch.recording.step_record import Record, Tag
from attnspan_lab.doctor.words import error_text

__all__ = ["Watcher", "watching"]

_PRODUCTS = ("bmm", "matmul", "baddbmm")
# Operators whose result has a size that the host must read.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


class NaN(NamedTuple):
    """The operator that returned the first NaN, and the overflow that the NaN comes from."""

    name: str
    shape: tuple[int, ...]
    place: Place | None
    backward: bool
    overflow: Overflow | None


class Watcher(Operations):  # type: ignore[no-untyped-call]
    """Collects attention calls, the first NaN and overflow, reads of values, and custom operators."""

    supports_higher_order_operators = True

    def __init__(self, batch: int = 1, named: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.record = Record(batch, named)
        self.calls, self.function = self.record.calls, self.record.function
        self.first_nan: NaN | None = None
        self.seconds = 0.0  # Time of all operators.
        self.reads = self.function.reads
        self.custom: dict[str, Operation] = {}
        self.largest = 0
        self.unread = ""  # Why an operator could not be read.

    def note(self, operation: Operation) -> None:
        """Record an operator. An operator that the doctor cannot read must not end the step."""
        try:
            self._note(operation)
        except Exception as error:
            where = f"{operation.name} at {operator_place()}"
            self.unread = self.unread or f"the doctor cannot read {where}: {error_text(error)}"

    def _note(self, x: Operation) -> None:
        record, tags = self.record, self.record.tags
        self.seconds += x.seconds
        record.repeats.note(x.op, x.args, x.kwargs, x.inputs, x.outs, x.place)
        for made, found in self.function.overflows:
            tags.setdefault(storage(made), Tag(found.place, 0.0)).overflow = found
        self.function.overflows.clear()
        known = [tag for y in x.inputs if (tag := tags.get(storage(y))) is not None]
        overflow = self._overflow(x, known)
        self._look_for_nan(x, overflow)
        is_read = x.name in _READS or (x.name == "index" and any(y.dtype == torch.bool for y in x.inputs[1:]))
        if is_read and not self.function.converts:
            self.function.read(x.place)
        if kind := fused_kind(x.op, x.name):
            fused(record, kind, x)
        scores = next((tag.scores for tag in known if tag.scores is not None), None)
        held = {storage(y) for y in x.inputs}
        for out in x.outs:
            self.largest = max(self.largest, out.nbytes)
            if storage(out) not in held:
                tags[storage(out)] = record.tag(x, out, known)
            elif (tag := tags.get(storage(out))) is not None:
                tag.sources = tag.sources.union(*(t.sources for t in known))
                if x.name.endswith("_"):
                    tag.seconds += x.seconds
                    tag.parts += tuple(t for t in known if t is not tag)
            if overflow is not None and has_inf(out) and storage(out) in tags:
                tags[storage(out)].overflow = overflow
        if x.name == "copy_" and len(x.inputs) > 1:
            record.copied_into(x)
        if x.name in _PRODUCTS and len(x.inputs) > 1 and x.outs:
            product(record, x, scores)
        elif scores is not None and not kind:
            on_scores(record, x, scores)
        if _is_custom(x.op):
            self.custom.setdefault(str(x.op), x)

    @staticmethod
    def _overflow(x: Operation, known: list[Tag]) -> Overflow | None:
        """Find the overflow that infinite results come from."""
        bad = None if is_unset(x.name) else next((y for y in x.outs if has_inf(y)), None)
        before = next((t.overflow for t in known if t.overflow is not None), None)
        return before or (None if bad is None else overflow_of(x.op, x.args, x.kwargs, bad, x.place))

    def _look_for_nan(self, x: Operation, overflow: Overflow | None) -> None:
        def bad(tensors: list[Tensor]) -> list[Tensor]:
            return [y for y in tensors if y.is_floating_point() and bool(y.detach().isnan().any())]

        if self.first_nan is None and not is_unset(x.name) and (found := bad(x.outs)) and not bad(x.inputs):
            self.first_nan = NaN(x.name, tuple(found[0].shape), x.place, in_backward(), overflow)


@contextmanager
def watching(batch: int = 1, named: Mapping[str, Tensor] | None = None) -> Iterator[Watcher]:
    """Watch the steps in the block. They run uncompiled, even if the model compiles parts of itself.

    Args:
        batch: Batch size.
        named: Tensors of the batch with their names. Masks that are made from them depend on data.
    """
    watcher = Watcher(batch, named)
    with with_node_places(), watcher.function.in_backward(), watcher.function, watcher:
        yield watcher


def _is_custom(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in (
        "aten",
        "prim",
        "prims",
        "profiler",
        "inductor",
    )
