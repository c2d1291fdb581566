"""Tensors that a model keeps from step to step, with the graphs of gradients behind them."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at, is_users
from attnspan_lab.doctor.torch.recording.operators import node_place, with_node_places
from attnspan_lab.doctor.words import counted

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["detached", "kept_findings"]

_STEPS = 3


def kept_findings(subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield the lists and other attributes whose tensors with a graph become more in each of three steps.

    Args:
        subject: The model.
        batch: A batch whose step runs in eager mode.
    """
    counts, found = list[dict[str, int]](), dict[str, list[Tensor]]()
    growing = replace(subject, start=None)  # Each step starts with the state that the step before left.
    with with_node_places():
        for _ in range(_STEPS):
            growing.step(subject.model, batch)
            found = _graphs_in(subject.model)
            if not found:
                return
            counts.append({name: len(x) for name, x in found.items()})
    for name, tensors in found.items():
        numbers = [x.get(name, 0) for x in counts]
        if not all(a < b for a, b in pairwise(numbers)):
            continue
        new = tensors[numbers[-2] :]
        places = at(*(node_place(x.grad_fn) for x in new))
        size = sum(x.numel() * x.itemsize for x in new)
        evidence = (
            f"tensors with a graph in {name} after steps 1, 2, 3: {', '.join(map(str, numbers))}",
            f"{bytes_text(size)} more in each step, and the tensors that their graphs save",
        )
        what = f"{name} keeps {counted(len(new), 'tensor')} with a graph from each step"
        short = f"{name.rpartition('.')[2]}.clear()"
        remedy = f"Empty it in each forward pass: {short}. If you need only numbers, keep x.detach()"
        yield Finding("kept", what, places, evidence, remedy=remedy)


def _graphs_in(model: nn.Module) -> dict[str, list[Tensor]]:
    """List the tensors with a graph that a model keeps, by the name of the container.

    The containers are attributes of modules, variables of their forward hooks, and global variables of the
    files of their classes. A container that several modules share counts once.
    """
    found, seen = dict[str, list[Tensor]](), set[int]()
    for name, x in _containers(model):
        if id(x) not in seen and (own := list(_in(x, seen))):
            found[name] = own
    return found


def detached(model: nn.Module) -> dict[int, Any]:
    """Replace kept tensors with a graph in a deep copy: torch cannot copy a graph."""
    return {id(x): x.detach().clone() for own in _graphs_in(model).values() for x in own}


def _containers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    skipped = set(vars(nn.Module())) - {"_buffers"}
    for prefix, module in model.named_modules():
        for name, x in vars(module).items():
            if name not in skipped:
                yield f"{prefix}.{name}".lstrip("."), x
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if inspect.isfunction(hook):
                yield from inspect.getclosurevars(hook).nonlocals.items()
            elif inspect.ismethod(hook):
                yield from vars(hook.__self__).items()
    for file in {type(x).__module__ for x in model.modules()}:
        space = vars(sys.modules[file]) if file in sys.modules else {}
        if is_users(space.get("__file__") or "<none>"):
            yield from (
                (k, x) for k, x in space.items() if isinstance(x, (list, dict, deque)) and k[:2] != "__"
            )


def _in(x: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors with a graph in lists, tuples and dicts."""
    if isinstance(x, Tensor):
        if x.grad_fn is not None:
            yield x
    elif isinstance(x, (list, tuple, dict, deque)) and id(x) not in seen:
        seen.add(id(x))
        for y in list(x.values() if isinstance(x, dict) else x):
            yield from _in(y, seen)
