"""Watch of a step: the tensors that it makes, operators that run, graphs that are compiled."""

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

# Of floating tensors, these return which entries are chosen: rounding may turn a tie the other way.
_CHOOSING = ("topk", "sort", "argmax", "argmin", "max", "min")


@dataclass
class Shapes:
    """Shapes of the tensors with memory of their own that a step makes."""

    seen: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, op: Any, out: Any) -> None:
        """Note the results of an operator, unless they are views."""
        schema = getattr(op, "_schema", None)
        returns = [] if schema is None else schema.returns
        if any(x.alias_info is not None for x in returns):
            return
        self.seen |= {tuple(_size(n) for n in x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}

    @property
    def largest(self) -> tuple[int, ...]:
        """The one of most elements."""
        return max(self.seen, key=_rank, default=())

    def of_pairs(self, others: Shapes, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Those with two dims or more that change with the number of tokens, largest first.

        Args:
            others: Of the same step with another number of tokens. Where all are the same, as of images of
                one size, nothing can be said: None.
            tokens: About so many, which a tensor of an image's rows and columns has, and no more.
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
    """By elements; of equals the one of more dims, which says more."""
    return math.prod(shape), len(shape), shape


def _size(n: Any) -> int:
    """A size, of a symbolic one the value that it was traced with."""
    return n if isinstance(n, int) else int(n.node.hint)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of new tensors, and which entries of floating tensors are chosen."""

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
        """Whether both chose the same; True where they cannot be compared."""
        same_shapes = [x.shape for x in self.choices] == [x.shape for x in other.choices]
        return not same_shapes or all(map(torch.equal, self.choices, other.choices))


def profiled(call: Callable[[], Any]) -> tuple[Any, dict[str, int], int]:
    """Call under the profiler, compiled code or not.

    Returns:
        The result; how often each operator of attnspan and torch's fused attention ran; and the most bytes
        that torch's allocator held at once above those before. A kernel's own scratch memory is not in it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = call()
    calls: dict[str, int] = {}
    held = peak = 0
    # Events of memory are in the order in which they happened.
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
    """A backend of torch.compile that counts what it compiles, and notes the tensors of its graphs.

    Args:
        name: "aot_eager", which runs the graphs of forward and backward as they are, or "inductor".
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
