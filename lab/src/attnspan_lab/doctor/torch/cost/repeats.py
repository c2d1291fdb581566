"""Matrix products that a step computes again from the same values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.recording.operators import (
    in_backward,
    is_plain,
    named_arguments,
    operator_name,
    storage,
)
from attnspan_lab.doctor.words import counted

__all__ = ["Repeats"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_SHARE = 0.05  # A smaller share of the step's products is not worth a change.
_WHAT = "A product is computed again here from the same input and the same weight"


@dataclass
class _Line:
    again: int = 0
    behind: int = 0
    flops: int = 0


@dataclass
class Repeats:
    """Numbers the values of a step: equal numbers mean the same operators on the same values.

    Attributes:
        values: Number of the value of each storage.
        seen: Number of the result of each operator with its arguments.
        alive: Tensors that no operator made. Other tensors must not get their storage.
        done: Products of the forward pass.
        roots: Values made from a repeated product, with its line.
        lines: Repeated products by line.
        flops: Floating-point operations of all products of the forward pass.
    """

    values: dict[int, int] = field(default_factory=dict)
    seen: dict[Any, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    done: set[Any] = field(default_factory=set)
    roots: dict[int, Place] = field(default_factory=dict)
    lines: dict[Place, _Line] = field(default_factory=dict)
    flops: int = 0
    fresh: Iterator[int] = field(default_factory=count)

    def note(
        self, op: Any, args: Any, kwargs: Any, inputs: list[Tensor], outs: list[Tensor], place: Place | None
    ) -> None:
        """Number the results of an operator, and count it if it is a product of the forward pass."""
        name = operator_name(op)
        if name.startswith("lift_fresh"):  # Python made this tensor, maybe in memory of an earlier one.
            self.values.pop(storage(inputs[0]), None)
        key = self._key(op, args, kwargs)
        known = (self.roots.get(self.values[storage(y)]) for y in inputs)
        root = next((line for line in known if line is not None), None)
        if name in _PRODUCTS and place is not None and not in_backward():
            flops = 2 * outs[0].numel() * next(x for x in reversed(args[:-1]) if is_plain(x)).shape[-1]
            self.flops += flops
            if key in self.done:
                root = self._again(place, root, flops)
            self.done.add(key)
        held = {storage(x) for x in inputs} - {storage(x) for x in _written(op, args, kwargs)}
        for i, x in enumerate([*outs, *_written(op, args, kwargs)]):
            if storage(x) not in held:
                number = self.seen.setdefault((key, i), next(self.fresh))
                self.values[storage(x)] = number
                if root is not None:
                    self.roots[number] = root

    def _again(self, place: Place, root: Place | None, flops: int) -> Place:
        """Count a repeated product at its line, or at the line of the repeated product behind it."""
        line = self.lines.setdefault(root or place, _Line())
        line.again, line.behind = line.again + (root is None), line.behind + (root is not None)
        line.flops += flops
        return root or place

    def _key(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Name an operator with its arguments. A random or unknown operator has another name each time."""
        known = isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
        known = known and torch.Tag.nondeterministic_seeded not in op.tags
        leaves = tuple(self._named(x) for x in tree_leaves((args, kwargs)))
        return str(op), leaves, None if known else next(self.fresh)

    def _named(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return repr(x)
        if not is_plain(x):
            return next(self.fresh)
        if storage(x) not in self.values:
            self.alive.append(x.detach())
            self.values[storage(x)] = next(self.fresh)
        return self.values[storage(x)], x.storage_offset(), tuple(x.shape), x.stride(), x.dtype

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line whose repeated products are a share of the step's products."""
        for place, line in self.lines.items():
            share = line.flops / self.flops
            if share < _SHARE:
                continue
            more = f", and {line.behind} products behind them" if line.behind else ""
            cost = f"{line.flops / 1e6:.3g} of {self.flops / 1e6:.3g} MFLOP"
            evidence = (
                f"{counted(line.again, 'product')} with values that a product of this step had before{more}",
                f"{cost} of all forward products: {share:.0%}",
            )
            yield Finding("repeat", _WHAT, at(place), evidence, count=line.again)


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the arguments that an operator writes to."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    given = named_arguments(op, args, kwargs)
    names = [x.name for x in op._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    return [x for name in names for x in tree_leaves(given.get(name)) if is_plain(x)]
