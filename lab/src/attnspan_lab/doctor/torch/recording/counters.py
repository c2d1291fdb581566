"""Python state that guards name: counters and lists that change in each call, and changes of them to try."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Counter", "as_tensor", "counters_in", "emptied", "filled", "is_set_anew", "lists_in"]

_NUMBER = re.compile(
    r"guard that failed: (?P<path>[^=!<>]+?) *(?:[=!<>]=?) *-?\d+(?:\.\d*)?\s*$", re.MULTILINE
)
_LENGTH = re.compile(
    r"guard that failed: len\((?P<path>.+?)\) *[=!<>]=? *\d+|guard that failed: not (?P<own>\S+)"
)
_IMPORT = "__import_"


@dataclass(frozen=True)
class Counter:
    """A Python number or container that a guard names.

    Args:
        path: Expression of the guard, such as ``self._modules['0'].step``.
    """

    path: str

    @property
    def name(self) -> str:
        """Short name for texts: ``step`` or ``flags['n']``."""
        short = re.sub(r"^(.*\b_modules\['[^']*'\]|self|G\['__import_\w+'\]|G)\.?", "", self.path)
        return short.strip(".").removeprefix("['").removesuffix("']") if short.startswith("['") else short

    @property
    def is_global(self) -> bool:
        """Whether it belongs to a Python module, which copies of the model share."""
        return self.path.startswith("G[")

    def value(self, model: nn.Module) -> Any:
        """Read it. None if it cannot be found."""
        return next((value for value, _ in self._found(model)), None)

    def replace(self, model: nn.Module, change: Callable[[Any], Any]) -> None:
        """Replace it, in all modules that have it: blocks of one class count alike."""
        for value, put in list(self._found(model)):
            put(change(value))

    def _found(self, model: nn.Module) -> Iterator[tuple[Any, Callable[[Any], None]]]:
        """Yield the value in each module, and a function that replaces it."""
        tail = self.path.rpartition("_modules['")[2].partition("']")[2]
        path = f"self{tail}" if "_modules['" in self.path else self.path
        tree = ast.parse(path, mode="eval").body
        for root in model.modules():
            try:
                if isinstance(tree, ast.Attribute):
                    yield _attribute(_evaluated(tree.value, root), tree.attr)
                elif isinstance(tree, ast.Subscript):
                    yield _item(_evaluated(tree.value, root), _key(tree))
            except (KeyError, AttributeError, IndexError, TypeError, ValueError):
                continue
            if self.is_global:
                return


def _attribute(owner: Any, name: str) -> tuple[Any, Callable[[Any], None]]:
    return getattr(owner, name), lambda value: setattr(owner, name, value)


def _item(owner: Any, key: Any) -> tuple[Any, Callable[[Any], None]]:
    return owner[key], lambda value: owner.__setitem__(key, value)


def _evaluated(node: ast.expr, root: nn.Module) -> Any:
    """Evaluate a path of attributes and items. G is the dict of the globals, or of imported modules."""
    if isinstance(node, ast.Name) and node.id == "self":
        return root
    if isinstance(node, ast.Attribute):
        return getattr(_evaluated(node.value, root), node.attr)
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Name) and node.value.id == "G":
            return _global(_key(node), root)
        return _evaluated(node.value, root)[_key(node)]
    raise ValueError(ast.unparse(node))


def _key(node: ast.Subscript) -> Any:
    return ast.literal_eval(node.slice)


def _global(name: str, root: nn.Module) -> Any:
    if name.startswith(_IMPORT):
        return sys.modules[name.removeprefix(_IMPORT).replace("_dot_", ".")]
    return vars(sys.modules[type(root).__module__])[name]


def counters_in(guards: str, model: nn.Module) -> Iterator[Counter]:
    """Yield the numbers that guards name, without arguments and sizes.

    Args:
        guards: Evidence of a finding, a guard in each line.
        model: The model.
    """
    for path in dict.fromkeys(x["path"] for x in _NUMBER.finditer(guards)):
        counter = _read(path)
        value = None if counter is None else counter.value(model)
        if counter is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield counter


def lists_in(guards: str, model: nn.Module) -> Iterator[Counter]:
    """Yield the lists and dicts whose number of entries guards name."""
    for path in dict.fromkeys(x["path"] or x["own"] for x in _LENGTH.finditer(guards)):
        counter = _read(path)
        value = None if counter is None else counter.value(model)
        if counter is not None and isinstance(value, (MutableSequence, MutableMapping)):
            yield counter


def _read(path: str) -> Counter | None:
    try:
        tree = ast.parse(path.strip(), mode="eval").body
    except SyntaxError:
        return None
    return Counter(path.strip()) if isinstance(tree, (ast.Attribute, ast.Subscript)) else None


class _Emptied(Subject):
    """A subject whose list is emptied before each call, outside of compiled code."""

    counter: Counter

    def call(self, model: Callable[..., Any], batch: Any) -> Any:
        """Empty the list, and call the model."""
        self.counter.replace(self.model, lambda x: x.clear() or x)
        return super().call(model, batch)


def as_tensor(counter: Counter, subject: Subject) -> Subject:
    """Make a number a tensor."""
    counter.replace(subject.model, lambda x: torch.tensor(x) if isinstance(x, (int, float)) else x)
    return subject


def is_set_anew(counter: Counter, subject: Subject) -> bool:
    """Whether the model replaces the tensor of `as_tensor` by a number again.

    Args:
        counter: A number.
        subject: The model, which may be changed.
    """
    as_tensor(counter, subject)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        subject.step(subject.model, subject.batches[0], backward=False)
    return not isinstance(counter.value(subject.model), torch.Tensor)


def filled(counter: Counter, subject: Subject) -> Subject:
    """Make a number a tensor that keeps its place: setting the attribute fills the tensor."""
    for module in subject.model.modules():
        value = vars(module).get(counter.name)
        if isinstance(value, (int, float)):
            setattr(module, counter.name, torch.tensor(value))
            module.__class__ = _filling(type(module), counter.name)
    return subject


def _filling(kind: type[nn.Module], attribute: str) -> type[nn.Module]:
    def put(self: nn.Module, name: str, value: Any) -> None:
        if name == attribute and isinstance(value, (int, float)):
            getattr(self, name).fill_(value)
        else:
            kind.__setattr__(self, name, value)

    return type(kind.__name__, (kind,), {"__setattr__": put})


def emptied(counter: Counter, subject: Subject) -> Subject:
    """Make a subject whose list is emptied before each call."""
    made = _Emptied(subject.model, subject.batches, subject.expected, first=subject.first)
    made.counter = counter
    return made
