"""Watch of a step: the tensors that it creates, the operators that run, and the compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Backend", "Shapes", "Watch", "profiled"]

# These operators return the chosen entries of floating-point tensors: rounding may decide a tie.
_CHOOSING = ("topk", "sort", "argmax", "argmin", "max", "min")


@dataclass
class Shapes:
    """Shapes of the tensors with their own memory that a step creates."""

    seen: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, op: Any, out: Any) -> None:
        """Record the results of an operator, unless they are views."""
        schema = getattr(op, "_schema", None)
        returns = [] if schema is None else schema.returns
        if any(x.alias_info is not None for x in returns):
            return
        self.seen |= {tuple(_size(n) for n in x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}

    @property
    def largest(self) -> tuple[int, ...]:
        """The shape with the most elements."""
        return max(self.seen, key=_rank, default=())

    def of_pairs(self, others: Shapes, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Find the shapes with two dims or more that change with the number of tokens, largest first.

        Args:
            others: Shapes of the same step with another number of tokens. If all are equal, as for images of
                one size, the result is None.
            tokens: Approximate number of tokens. A tensor of an image's rows and columns has no more entries.
        """
        if self.seen == others.seen:
            return None
        fixed = {n for shape in others.seen for n in shape}
        growing = {shape: [n for n in shape if n not in fixed] for shape in self.seen}
        pairs = [
            shape for shape, sizes in growing.items() if len(sizes) > 1 and math.prod(sizes) > 4 * tokens
        ]
        return tuple(sorted(pairs, key=_rank, reverse=True))


def _rank(shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Sort key: the number of elements, then the number of dims."""
    return math.prod(shape), len(shape), shape


def _size(n: Any) -> int:
    """Return a size, or the value that a symbolic size was traced with."""
    return n if isinstance(n, int) else int(n.node.hint)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shapes of new tensors, and the chosen entries of floating-point tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = Shapes()
        self.choices: list[Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.shapes.add(op, out)
        name = str(op).split(".")[1] if str(op).startswith("aten.") else ""
        if name in _CHOOSING and isinstance(args[0], Tensor) and args[0].is_floating_point():
            leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.choices += [x.clone() for x in leaves if not x.is_floating_point()]
        return out

    def chooses_as(self, other: Watch) -> bool:
        """Whether both made the same choices. True if they cannot be compared."""
        same_shapes = [x.shape for x in self.choices] == [x.shape for x in other.choices]
        return not same_shapes or all(map(torch.equal, self.choices, other.choices))


def profiled(call: Callable[[], Any]) -> tuple[Any, dict[str, int], int]:
    """Run a call under the profiler, compiled or not.

    Returns:
        Three values: the result, the number of runs of each attention operator of attnspan and torch, and the
        allocator's peak bytes above the bytes before. The peak excludes a kernel's own scratch memory.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = call()
    calls: dict[str, int] = {}
    held = peak = 0
    # Memory events are in chronological order.
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda x: x.start_ns()):
        name = event.name()
        if name == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
        elif name.startswith("attnspan::") or name == "aten::scaled_dot_product_attention":
            calls[name] = calls.get(name, 0) + 1
    return out, calls, peak


class Backend:
    """A torch.compile backend that counts its graphs and records their tensors.

    Args:
        name: "inductor", or "aot_eager", which runs the forward and backward graphs unchanged.
    """

    def __init__(self, name: str) -> None:
        self.name, self.graphs, self.shapes = name, 0, Shapes()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        if self.name == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
                self._look(graph)
                return compile_fx_inner(graph, inputs, **options)

            return compile_fx(graph, inputs, inner_compile=inner)
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def run(graph: torch.fx.GraphModule, _: Any) -> Any:
            self._look(graph)
            return make_boxed_func(graph.forward)  # type: ignore[no-untyped-call]

        return aot_autograd(fw_compiler=run, bw_compiler=run)(graph, inputs)

    def _look(self, graph: torch.fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                self.shapes.add(node.target, node.meta.get("val"))
