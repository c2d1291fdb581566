"""Operators that the watcher sees, and tensors of their arguments."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from attnspan_lab.doctor.places import Place, lines_in, on_stack, place_here

__all__ = [
    "CHECKPOINT",
    "distinct",
    "in_backward",
    "is_plain",
    "is_unset",
    "named_arguments",
    "operator_name",
    "operator_place",
    "storage",
]

#: The file of torch that recomputes checkpoints.
CHECKPOINT = torch.utils.checkpoint.__file__


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
    node = torch._C._current_autograd_node()
    about: Any = {} if node is None else node.metadata
    forward = lines_in("".join(about.get("traceback_", ())))
    return forward[0] if forward else None


def in_backward() -> bool:
    """Whether a backward pass runs."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_unset(name: str) -> bool:
    """Whether an operator returns memory that nothing was written to."""
    return name.startswith(("empty", "_empty", "new_empty"))


def is_plain(x: Any) -> bool:
    """Whether an argument is a tensor whose elements can be read."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta and not x.is_nested


def storage(x: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(x.untyped_storage()._cdata)


def distinct(x: Tensor) -> int:
    """Count the elements that a tensor stores. Expanded dimensions count once."""
    return prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)
