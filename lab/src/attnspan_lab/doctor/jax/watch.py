"""Watcher of a step: evaluates its jaxpr, and records every attention call and its inputs.

Hand-written attention is found by its data flow: a product of two arrays, a softmax, and a product with a
third array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

import attnspan
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.call import Attention, Returned
from attnspan_lab.doctor.jax.clamped_slices import Clamped
from attnspan_lab.doctor.jax.interpret import (
    COMPARISONS,
    OPAQUE,
    Interpreter,
    equations,
    evaluated,
    folder_of,
    inner,
)
from attnspan_lab.doctor.jax.position_digits import Counting
from attnspan_lab.doctor.jax.quick import free_axes
from attnspan_lab.doctor.jax.random_keys import Drawn
from attnspan_lab.doctor.jax.subject import Traced
from attnspan_lab.doctor.jax.unused_calls import Selected
from attnspan_lab.doctor.jax.values import RESHAPES, Axes, Value, is_float, is_integer, moved, order_of
from attnspan_lab.doctor.jax.weight_sums import Sums
from attnspan_lab.doctor.places import Place

__all__ = ["HIDDEN", "Attention", "Watcher", "watched"]

HIDDEN = -9e3  # Scores at or below this value are hidden.


class Watcher(Interpreter):
    """Collects attention calls.

    Args:
        size: Batch size and number of tokens, if they are known.
        emptied: Queries (B, Sq) whose results become 0, by the number of the call.
        changed: Lines whose clamped slices get other numbers.

    Attributes:
        calls: The attention calls.
        again: Attention calls that the backward pass computes again. They are no part of ``calls``.
        largest: Bytes of the largest array.
        decisions: Comparisons of integers of the batch.
    """

    def __init__(
        self,
        size: tuple[int, int] | None = None,
        emptied: Mapping[int, np.ndarray] | None = None,
        changed: set[Any] | None = None,
    ) -> None:
        super().__init__()
        self.rows, self.length = size or (1, 0)
        self.emptied = emptied or {}
        self.calls: list[Attention] = []
        self.decisions: list[np.ndarray] = []
        self.again: list[Attention] = []
        self.largest = 0
        self.sums, self.counting, self.drawn = Sums(), Counting(), Drawn()
        self.clamped, self.selected = Clamped(changed), Selected()

    def findings(self) -> Iterator[Finding]:
        """Yield findings on operators."""
        yield from self.sums.found.values()
        yield from self.counting.found.values()
        yield from self.drawn.findings()
        yield from self.selected.findings()

    def array(self, value: Value) -> Any:
        """Return the array of a value."""
        return value.array

    def value(self, array: Any, sources: Sequence[Value] = ()) -> Value:
        """Make a constant, or a value of a loop: a step's part of an array, or all steps' results."""
        if not sources:
            return Value(array)
        first, more = sources[0], np.ndim(array) - np.ndim(sources[0].array)
        is_step = len(sources) == 1 and more < 0
        # Parameters of a layer, in a loop over layers, are no part of a sequence.
        part = is_step and first.data and np.shape(first.array)[0] > 1
        made = Value(array, "loop", first.places, tuple(sources), part=part)
        if is_step:
            made.loop = self.depth
        if more > 0 and all(x.ones is not None for x in sources):
            made.ones = np.stack([np.asarray(x.ones) for x in sources])
        return made

    def carried(self, value: Value) -> Value:
        """Mark a counter: it differs in each step."""
        is_counter = value.size == 1 and is_integer(value.array)
        return Value(value.array, "loop", parents=(value,), loop=self.depth) if is_counter else value

    def left(self, values: list[Value]) -> list[Value]:
        """Forget the loop that ends."""
        for x in values:
            x.loop = min(x.loop, self.depth)
        return values

    def call(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Enter a function, except if it is an attention kernel with its own derivative."""
        inside = equations(inner(eqn)[0]) if eqn.primitive.name == "custom_vjp_call" else ()
        is_kernel = any(x.primitive.name in OPAQUE for x in inside)
        return self.apply(eqn, values) if is_kernel else super().call(eqn, values)

    def apply(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Run an operator, and note what it does."""
        arrays = [x.array for x in values]
        made = evaluated(eqn, arrays)
        places, name = self.at(eqn), eqn.primitive.name
        # vmap turns a dynamic_slice into a gather.
        cuts = name == "dynamic_slice" or (name == "gather" and self.depth > 0)
        part = cuts and values[0].data and np.size(made[0]) < values[0].size
        part = part or (name != "dot_general" and any(x.part for x in values))
        out = [
            Value(x, name, places, tuple(values), distinct=_distinct(name, x, values), part=part)
            for x in made
            if hasattr(x, "dtype")
        ]
        if len(out) < len(made):
            return [*map(Value, made)]
        for x in out if name == "sharding_constraint" else ():
            x.sharding = eqn.params["sharding"]
        self.largest = max([self.largest, *(x.bytes for x in out)])
        if name in COMPARISONS and arrays[0].dtype.kind in "iu" and out[0].data:
            self.decisions.append(np.asarray(out[0].array))
        if name == "dot_general":
            self._product(eqn, values, out[0])
        elif name == "custom_vjp_call" or "attention" in name:
            self._fused(eqn, values, out)
        else:
            self._follow(eqn, values, out)
        self.sums.see(eqn, values, out)
        self.counting.see(eqn, values, out)
        self.clamped.see(eqn, values, out)
        if not self.backward:
            self.drawn.see(eqn, values, out)
            self.selected.see(eqn, values, out)
        return out

    def _fused(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Record a kernel of attention. attnspan's kernel gets the visible pairs as spans."""
        operands = [x for x in values if np.ndim(x.array) >= 3 and is_float(x.array)][:3]
        if len(operands) < 3:
            return
        file = str(inner(eqn)[0].jaxpr.debug_info.func_src_info) if inner(eqn) else ""
        call = Attention("attnspan" if folder_of(attnspan) in file else "fused", out[0].places, operands)
        call.size, call.factor = np.shape(operands[0].array)[-1], _factor(eqn)
        bounds = next((x.array for x in values if np.ndim(x.array) == 5 and np.shape(x.array)[-1] == 2), None)
        if bounds is not None:
            (q, k), bounds = (np.shape(x.array) for x in operands[:2]), np.asarray(bounds)
            axis = 2 if q[2] == bounds.shape[2] else 1
            keys, (lo, hi) = np.arange(k[axis]), (bounds[..., i, None] for i in (0, 1))
            call.visible = np.asarray(((lo <= keys) & (keys < hi)).any((1, 3)))
        if np.shape(out[0].array) == np.shape(operands[0].array):
            rows = next((i for i in (1, 2) if np.shape(out[0].array)[i] == self.length), None)
            call.out = None if rows is None else self._returned(out[0].array, rows)
        self.calls.append(call)

    def _product(self, eqn: Any, values: list[Value], out: Value) -> None:
        numbers = eqn.params["dimension_numbers"]
        contract, batch = numbers
        for i, x in enumerate(values[:2]):
            side = x.axes and next((s for s in (0, 1) if set(x.axes[s]) & set(contract[i])), None)
            if x.call is not None and x.axes and x.call.softmax and side is not None:
                v = values[1 - i]
                x.call.layouts.add(order_of(v.array, numbers, 1 - i, is_v=True, rows=self.rows))
                self._finish(x, side, v, out, self._free(eqn, values, i))
                if not self.backward and x.call.keys is None:
                    self.sums.start(eqn, values, i, out)
                return
        free = self._free(eqn, values, 0), self._free(eqn, values, 1)
        axes = tuple(free[0].values()), tuple(free[1].values())
        shape = np.shape(out.array)
        weights = not batch[0] and not all(x.data for x in values)
        if not weights and all(axes) and any(prod(shape[a] for a in side) > 1 for side in axes):
            size = prod(np.shape(values[0].array)[a] for a in contract[0])
            scores, kind = (shape, out.bytes), self._kind(values)
            call = Attention(kind, out.places, values[:2], scores=scores, size=size, depth=self.depth)
            for i, x in enumerate(call.operands):
                call.layouts.add(order_of(x.array, numbers, i, is_v=False, rows=self.rows))
            out.call, out.axes = call, axes

    def _kind(self, values: list[Value]) -> str:
        """Tell a loop over parts of the keys or queries from a loop over layers, in which both differ."""
        q, k = values[:2]
        is_layer = self.depth > 0 and q.loop == k.loop and not (q.part and k.part)
        return "in blocks" if (q.part or k.part) and not is_layer else "written out"

    def _free(self, eqn: Any, values: list[Value], operand: int) -> dict[int, int]:
        """Map the free axes of a product's operand to axes of the result."""
        numbers = eqn.params["dimension_numbers"]
        free = [free_axes(np.ndim(x.array), numbers, i) for i, x in enumerate(values[:2])]
        start = len(numbers[1][0]) + (len(free[0]) if operand else 0)
        return {a: start + i for i, a in enumerate(free[operand])}

    def _follow(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Follow an operator on scores, and carry marks of values on."""
        name, first = eqn.primitive.name, next((x for x in values if x.axes and x.call), None)
        for x in out:
            x.upcast = _upcast(name, values, x)
            x.call = next((y.call for y in values if y.call is not None), None)
        if first is None or first.call is None or first.axes is None or not out:
            return
        call, shape, (result, *_) = first.call, np.shape(first.array), out
        if name in ("exp", "exp2", "logistic"):
            call.seen, call.softmaxed = call.seen or (first.array, first.axes), call.softmaxed or first
            call.softmax = True
        if name == "reduce_max" and not call.softmax:
            call.seen, call.softmaxed = (first.array, first.axes), first
        if np.shape(result.array) == shape and name not in RESHAPES and not call.softmax:
            fits = [x for x in values if x.call is None and np.ndim(x.array) == len(shape)]
            call.masks += [(x, first.axes) for x in fits]
        if call.softmax and name in ("mul", "select_n"):
            call.dropout = call.dropout or any(x.call is None and x.is_random() for x in values)
        if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
            return
        if name == "concatenate" and not call.softmax:
            before = values[: values.index(first)]
            axis = eqn.params["dimension"]
            start = sum(np.shape(x.array)[axis] for x in before)
            call.keys = slice(start, start + shape[axis])
        sides = [[moved(eqn, shape, np.shape(result.array), a) for a in side] for side in first.axes]
        left, right = (tuple(a for a in side if a is not None) for side in sides)
        if left and right:
            result.axes = left, right

    def _finish(self, weights: Value, side: int, v: Value, out: Value, free: dict[int, int]) -> None:
        """Record the second product of hand-written attention."""
        call, axes = weights.call, weights.axes
        if call is None or axes is None or call in self.calls:
            return
        if self.backward:
            self.again += [] if call in self.again else [call]
            return
        self.calls.append(call)
        call.operands = [*(call.operands if side else call.operands[::-1]), v]
        call.lines = {*call.places[:1], *out.places[:1]}
        call.places = out.places or call.places
        if call.kind == "in blocks" or call.seen is None:
            return
        seen = self._pairs(*call.seen, side)
        shown = ~(seen <= HIDDEN)
        keep = slice(None) if call.keys is None else call.keys
        shown = shown[..., keep]
        shares = self._pairs(weights.array, axes, side)
        used, even = shares != 0, shares.max(-1) == shares.min(-1)
        same = used.shape[-2:] == shown.shape[-2:]
        # Dropout hides no pair.
        same = same and used.shape == shown.shape and not call.dropout
        shown_used = shown & used if same else shown
        call.visible = self._any(shown_used)
        flat = shown_used.reshape(len(shown), -1, *shown.shape[-2:])
        call.by_head = bool((flat != flat[:, :1]).any())
        if call.keys is None:
            call.hidden = np.asarray(~self._any(shown).any(-1))
        if (row := free.get(self._axis(axes[1 - side], weights.array))) is not None:
            if (rows := self.emptied.get(len(self.calls) - 1)) is not None:
                out.array = self._emptied(np.asarray(out.array), row, rows)
            call.out = self._returned(out.array, row)
            call.out.even = np.asarray(even.all(tuple(range(1, even.ndim - 1))))
        for mask, at in call.masks:
            rows = self._pairs(mask.array, at, side)
            varies = bool((rows != rows[..., :1, :]).any()), bool((rows != rows[..., :1]).any())
            call.varies.append((mask, *varies))
            if all(varies):
                call.pairs.append(_maker(mask, rows.shape[-1] * rows.shape[-2]))

    def _returned(self, array: Any, row: int) -> Returned:
        """Describe results whose axis of queries is ``row``."""
        result = self._lead(np.moveaxis(np.asarray(array), row, -1))  # (B, ..., Sq)
        flat = result.reshape(len(result), -1, result.shape[-1])
        zero = (flat == 0).all(1)
        return Returned(flat, np.isnan(flat).any(1), zero, np.zeros_like(zero))

    def _emptied(self, array: np.ndarray, row: int, rows: np.ndarray) -> np.ndarray:
        """Set the results of some queries (B, Sq) to 0."""
        made = np.moveaxis(array, row, -1).copy()
        lead = self._lead(made)  # A view.
        lead[np.broadcast_to(rows.reshape(len(rows), *[1] * (lead.ndim - 2), -1), lead.shape)] = 0
        return np.moveaxis(made, -1, row)

    def _axis(self, axes: tuple[int, ...], array: Any) -> int:
        """Choose the axis of tokens: as long as the batch's tokens, or else the longest."""
        return max(axes, key=lambda a: (np.shape(array)[a] == self.length, np.shape(array)[a]))

    def _pairs(self, array: Any, axes: Axes, side: int) -> np.ndarray:
        """Move the axes of queries and keys to the end, and the axis of the batch to the front."""
        q, k = (self._axis(axes[x], array) for x in (1 - side, side))
        return self._lead(np.moveaxis(np.asarray(array), (q, k), (-2, -1)), 2)

    def _lead(self, array: np.ndarray, last: int = 1) -> np.ndarray:
        """Move the axis of batch elements to the front. Without such an axis, add one."""
        found = next((i for i, n in enumerate(array.shape[:-last]) if n == self.rows), None)
        return array[None] if found is None else np.moveaxis(array, found, 0)

    def _any(self, pairs: np.ndarray) -> np.ndarray:
        """Reduce all axes between the batch element and the last two."""
        return np.asarray(pairs.any(tuple(range(1, pairs.ndim - 2))))


def _maker(mask: Value, pairs: int) -> Value:
    """Find the operator that made a mask, before it was only broadcast."""
    return next((x for x in mask.chain() if x.name not in RESHAPES or not _is_wide(x, pairs)), mask)


def _is_wide(value: Value, pairs: int) -> bool:
    return bool(value.parents) and value.parents[0].size >= pairs


def _distinct(name: str, out: Any, values: list[Value]) -> int:
    """Bound the number of distinct elements of a result."""
    size = max(np.size(out), 1)
    if name in RESHAPES and values:
        return min(values[0].distinct, size)
    if name == "gather" and not values[1].data:
        return min(values[0].distinct, size)
    if name == "concatenate":
        return min(sum({id(x): x.distinct for x in values}.values()), size)
    return size


def _factor(eqn: Any) -> float | None:
    """Read the scale of a kernel, if it is one of the kernel's attributes."""
    within = equations(inner(eqn)[0]) if inner(eqn) else ()
    for params in (eqn.params, *(x.params for x in within)):
        attributes = params.get("attributes")
        found = dict(attributes if isinstance(attributes, tuple) else ()) | params
        if isinstance(scale := found.get("scale"), (int, float, np.floating)):
            return float(scale)
    return None


def _upcast(name: str, values: list[Value], out: Value) -> Place | None:
    """Find the line that converted a value of a result to a wider dtype."""
    floats = [x for x in values if is_float(x.array) and np.ndim(x.array) > 1]
    if np.ndim(out.array) < 2 or not is_float(out.array) or not floats:
        return None
    wide = out.array.dtype.itemsize
    if name == "convert_element_type" and floats[0].array.dtype.itemsize < wide and out.places:
        return out.places[0]
    narrowed = max(x.array.dtype.itemsize for x in floats) > wide
    return None if narrowed else next((x.upcast for x in floats if x.upcast is not None), None)


def watched(
    traced: Traced,
    size: tuple[int, int] | None,
    emptied: Mapping[int, np.ndarray] | None = None,
    changed: set[Any] | None = None,
) -> tuple[Watcher, list[Value]]:
    """Run a traced step. Return the watcher and the step's results."""
    watcher = Watcher(size, emptied, changed)
    labels = ["variables"] * traced.variables + traced.names
    given = [
        Value(x, "argument", data=i >= traced.variables, label=label)
        for i, (x, label) in enumerate(zip(traced.typed, labels, strict=True))
    ]
    return watcher, watcher.run(traced.closed.jaxpr, list(map(Value, traced.closed.consts)), given)
