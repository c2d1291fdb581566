"""Operators that the watcher sees, and tensors of their arguments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.patched import patched
from attnspan_lab.doctor.places import Place, lines_in, on_stack, place_here

__all__ = [
    "CHECKPOINT",
    "Operation",
    "Operations",
    "distinct",
    "in_backward",
    "is_plain",
    "is_unset",
    "named_arguments",
    "node_place",
    "operator_name",
    "operator_place",
    "plain_in",
    "storage",
    "with_node_places",
]

#: The file of torch that recomputes checkpoints.
CHECKPOINT = torch.utils.checkpoint.__file__


@dataclass(eq=False)
class Operation:
    """An operator that ran, with its arguments, its result and the seconds that it took."""

    op: Any
    args: Any
    kwargs: Any
    out: Any
    seconds: float

    @cached_property
    def name(self) -> str:
        """Name of the operator without its overload."""
        return operator_name(self.op)

    @cached_property
    def place(self) -> Place | None:
        """The user's line."""
        return operator_place()

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Tensors of the arguments."""
        return plain_in((self.args, self.kwargs))

    @cached_property
    def outs(self) -> list[Tensor]:
        """Tensors of the result."""
        return plain_in(self.out)

    @property
    def named(self) -> dict[str, Any]:
        """Names and values of the arguments."""
        return named_arguments(self.op, self.args, self.kwargs)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `note` behind each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def note(self, operation: Operation) -> None:
        """Look at an operator that ran."""
        raise NotImplementedError

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and isinstance(op, torch._ops.OpOverload):
            with self:  # In inference mode, operators that are made of others arrive whole.
                out = op.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        start = time.perf_counter()
        out = op(*args, **kwargs)
        self.note(Operation(op, args, kwargs, out, time.perf_counter() - start))
        return out


def operator_name(op: Any) -> str:
    """Return an operator's name without its overload."""
    packet = getattr(op, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(op, "__name__", None) or op)


def named_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of an operator's call."""
    names = [str(x.name) for x in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def operator_place() -> Place | None:
    """Find the user's line: on the stack, or in a backward pass the line of the forward operator."""
    if not in_backward() or on_stack(CHECKPOINT):
        return place_here()
    return node_place(torch._C._current_autograd_node())


@contextmanager
def with_node_places() -> Iterator[None]:
    """Run eager steps whose autograd nodes record their forward lines, for `node_place`."""
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
    # Autograd calls this function of torch for each node, for the whole stack. The user's line is enough.
    users_line = patched(torch.fx.traceback, format_stack=_users_line)
    with torch.compiler.set_stance("force_eager"), anomaly, users_line:
        yield


def _users_line() -> list[str]:
    """Write the user's line as an entry of a traceback."""
    x = place_here()
    return [f'  File "{x.file}", line {x.line}, in {x.function}\n'] if x is not None else []


def node_place(node: Any) -> Place | None:
    """Find the user's forward line of an autograd node, in a step in `with_node_places`."""
    about: Any = {} if node is None else node.metadata
    return next(iter(lines_in("".join(about.get("traceback_", ())))), None)


def in_backward() -> bool:
    """Whether a backward pass runs."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_unset(name: str) -> bool:
    """Whether an operator returns memory that nothing was written to."""
    return name.startswith(("empty", "_empty", "new_empty"))


def is_plain(x: Any) -> bool:
    """Whether an argument is a tensor whose elements can be read."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta and not x.is_nested


def plain_in(x: Any) -> list[Tensor]:
    """List the tensors in nested arguments whose elements can be read."""
    return [y for y in tree_leaves(x) if is_plain(y)]


def storage(x: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(x.untyped_storage()._cdata)


def distinct(x: Tensor) -> int:
    """Count the elements that a tensor stores. Expanded dimensions count once."""
    return prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)
