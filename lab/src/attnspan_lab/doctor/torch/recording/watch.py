"""Watcher of eager steps: records every attention call, its inputs, and copies on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.numbers.overflow import Overflow, has_inf, overflow_of
from attnspan_lab.doctor.torch.recording.functions import is_own
from attnspan_lab.doctor.torch.recording.handwritten import on_scores, product
from attnspan_lab.doctor.torch.recording.kernels import fused, fused_kind
from attnspan_lab.doctor.torch.recording.operators import (
    in_backward,
    is_plain,
    is_unset,
    operator_name,
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


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects attention calls, the first NaN and overflow, reads of values, and custom operators."""

    supports_higher_order_operators = True

    def __init__(self, batch: int = 1, named: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record(batch, named)
        self.calls, self.function = self.record.calls, self.record.function
        self.first_nan: tuple[str, tuple[int, ...], Place | None, bool] | None = None
        self.overflow: Overflow | None = None  # The overflow that the first NaN comes from.
        self.seconds = 0.0  # Time of all operators.
        self.reads = self.function.reads
        self.custom: dict[str, tuple[Any, Any, Any, Any, Place | None]] = {}
        self.largest = 0
        self.unread = ""  # Why an operator could not be read.

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, start = kwargs or {}, time.perf_counter()
        out = op(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if is_plain(x)]
        name, outs = operator_name(op), [x for x in tree_leaves(out) if is_plain(x)]
        try:
            self._note(op, name, args, kwargs, inputs, outs, time.perf_counter() - start)
        except Exception as error:  # An operator that the doctor cannot read must not end the step.
            self.unread = (
                self.unread or f"the doctor cannot read {name} at {operator_place()}: {error_text(error)}"
            )
        return out

    def _note(
        self,
        op: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        outs: list[Tensor],
        spent: float,
    ) -> None:
        place = operator_place()
        held = {storage(x) for x in inputs}
        self.seconds += spent
        self.record.repeats.note(op, args, kwargs, inputs, outs, place)
        for x, found in self.function.overflows:
            self.record.tags.setdefault(storage(x), Tag(found.place, 0.0)).overflow = found
        self.function.overflows.clear()
        known = [tag for x in inputs if (tag := self.record.tags.get(storage(x))) is not None]
        overflow = self._overflow(op, name, args, kwargs, outs, known, place)
        self._look_for_nan(name, inputs, outs, overflow, place)
        is_read = name in _READS or (name == "index" and any(x.dtype == torch.bool for x in inputs[1:]))
        is_read = is_read and not self.function.converts
        if is_read and not is_own(place):
            self.reads[place] = self.reads.get(place, 0) + 1
        kind = fused_kind(op, name)
        if kind:
            fused(self.record, kind, op, args, kwargs, outs, place)
        scores = next((tag.scores for tag in known if tag.scores is not None), None)
        for x in outs:
            self.largest = max(self.largest, x.numel() * x.element_size())
            if storage(x) not in held:
                self.record.tags[storage(x)] = self.record.tag(name, x, inputs, known, place, spent)
            elif (tag := self.record.tags.get(storage(x))) is not None:
                tag.sources = tag.sources.union(*(t.sources for t in known))
                if "_" in name[-1:]:
                    tag.seconds += spent
                    tag.parts += tuple(t for t in known if t is not tag)
            if overflow is not None and has_inf(x) and storage(x) in self.record.tags:
                self.record.tags[storage(x)].overflow = overflow
        if name == "copy_" and len(inputs) > 1:
            self.record.copied_into(inputs[0], inputs[1], place)
        if name in _PRODUCTS and len(inputs) > 1 and outs:
            product(self.record, inputs[-2:], outs[0], scores, place)
        elif scores is not None and not kind:
            on_scores(self.record, name, inputs, outs, scores, place)
        if _is_custom(op) and str(op) not in self.custom:
            self.custom[str(op)] = (op, args, kwargs, outs, place)

    def _overflow(
        self,
        op: Any,
        name: str,
        args: Any,
        kwargs: Any,
        outs: list[Tensor],
        known: list[Tag],
        place: Place | None,
    ) -> Overflow | None:
        """Find the overflow that infinite results come from."""
        bad = None if is_unset(name) else next((x for x in outs if has_inf(x)), None)
        before = next((t.overflow for t in known if t.overflow is not None), None)
        return before or (None if bad is None else overflow_of(op, args, kwargs, bad, place))

    def _look_for_nan(
        self,
        name: str,
        inputs: list[Tensor],
        outs: list[Tensor],
        overflow: Overflow | None,
        place: Place | None,
    ) -> None:
        if self.first_nan is not None or is_unset(name):
            return
        floats = [x.detach() for x in outs if x.is_floating_point() and x.numel()]
        given = [x.detach() for x in inputs if x.is_floating_point()]
        bad = [x for x in floats if bool(x.isnan().any())]
        if bad and not any(bool(x.isnan().any()) for x in given):
            self.first_nan = name, tuple(bad[0].shape), place, in_backward()
            self.overflow = overflow


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
