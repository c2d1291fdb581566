"""Python state that guards name: counters and lists that change in each call, and changes of them to try."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import setitem
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
        tree = ast.parse(f"self{tail}" if "_modules['" in self.path else self.path, mode="eval").body
        for root in model.modules():
            names = {"self": root, "G": _Globals(type(root)), "__builtins__": {}}
            with suppress(Exception):  # Another kind of module, or a name that only the compiler knows.
                if isinstance(tree, (ast.Attribute, ast.Subscript)):
                    owner = eval(ast.unparse(tree.value), names)
                    if isinstance(tree, ast.Attribute):
                        yield getattr(owner, tree.attr), partial(setattr, owner, tree.attr)
                    else:
                        key = ast.literal_eval(tree.slice)
                        yield owner[key], partial(setitem, owner, key)
                    if self.is_global:
                        return


class _Globals:
    """Global names of a class's module, and imported modules, as guards name them."""

    def __init__(self, kind: type) -> None:
        self._module = kind.__module__

    def __getitem__(self, name: str) -> Any:
        if name.startswith(_IMPORT):
            return sys.modules[name.removeprefix(_IMPORT).replace("_dot_", ".")]
        return vars(sys.modules[self._module])[name]


def counters_in(guards: str, model: nn.Module) -> Iterator[Counter]:
    """Yield the numbers that guards name, without arguments and sizes.

    Args:
        guards: Evidence of a finding, a guard in each line.
        model: The model.
    """
    yield from _named(_NUMBER, (int, float), guards, model)


def lists_in(guards: str, model: nn.Module) -> Iterator[Counter]:
    """Yield the lists and dicts whose number of entries guards name."""
    yield from _named(_LENGTH, (MutableSequence, MutableMapping), guards, model)


def _named(
    pattern: re.Pattern[str], kinds: tuple[type, ...], guards: str, model: nn.Module
) -> Iterator[Counter]:
    for path in dict.fromkeys(next(filter(None, x.groups())) for x in pattern.finditer(guards)):
        with suppress(SyntaxError):
            value = Counter(path.strip()).value(model)
            if isinstance(value, kinds) and not isinstance(value, bool):
                yield Counter(path.strip())


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
