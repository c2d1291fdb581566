"""State that a step leaves in a model, such as a cache. It is put back before the doctor repeats the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.places import is_users

__all__ = ["State"]

_OWN = frozenset(vars(nn.Module()))  # Attributes that torch manages.
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH = 5
_Back = Callable[[], Any]


class State:
    """Buffers and plain attributes of a model's modules at one moment. Parameters are not part of it.

    Attributes are numbers, texts, tensors, and lists, dicts and objects of these.
    """

    def __init__(self, model: nn.Module) -> None:
        seen: dict[int, _Back] = {}
        self._backs = [y for x in model.modules() for y in (_of_buffers(x, seen), _of_attributes(x, seen))]

    def restore(self) -> None:
        """Put the state back."""
        for back in self._backs:
            back()


def _of_buffers(module: nn.Module, seen: dict[int, _Back]) -> _Back:
    return _of_dict(module._buffers, {k: _kept(x, seen, 0) for k, x in module._buffers.items()})


def _of_attributes(module: nn.Module, seen: dict[int, _Back]) -> _Back:
    kept = {k: _kept(x, seen, 0) for k, x in vars(module).items() if k not in _OWN}

    def back() -> None:
        own = vars(module)
        for name in [k for k in own if k not in _OWN and k not in kept]:
            del own[name]
        own.update({k: x() for k, x in kept.items()})

    return back


def _kept(x: Any, seen: dict[int, _Back], depth: int) -> _Back:
    """Return a function that puts a value back, and returns it."""
    if id(x) in seen:
        return seen[id(x)]
    if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
        return seen.setdefault(id(x), _of_tensor(x))
    if isinstance(x, (*_PLAIN, nn.Module, type)) or callable(x) or depth > _DEPTH:
        return lambda: x
    if not isinstance(x, (list, dict)) and not _is_of_users(x):
        return lambda: x
    seen[id(x)] = lambda: x  # The value may contain itself.
    if isinstance(x, list):
        found = _of_list(x, [_kept(y, seen, depth + 1) for y in x])
    elif isinstance(x, dict):
        found = _of_dict(x, {k: _kept(y, seen, depth + 1) for k, y in x.items()})
    else:
        own = vars(x)
        inner = _of_dict(own, {k: _kept(y, seen, depth + 1) for k, y in own.items()})
        found = _returning(x, inner)
    seen[id(x)] = found
    return found


def _is_of_users(x: Any) -> bool:
    """Whether an object has a class of the user or of an installed library, and not of Python or torch."""
    file = getattr(sys.modules.get(type(x).__module__), "__file__", None)
    return hasattr(x, "__dict__") and file is not None and is_users(file)


def _returning(x: Any, inner: _Back) -> _Back:
    def back() -> Any:
        inner()
        return x

    return back


def _of_list(x: list[Any], kept: list[_Back]) -> _Back:
    def back() -> list[Any]:
        before = [y() for y in kept]
        if len(before) != len(x) or any(a is not b for a, b in zip(x, before, strict=True)):
            x[:] = before
        return x

    return back


def _of_dict(x: dict[Any, Any], kept: dict[Any, _Back]) -> _Back:
    def back() -> dict[Any, Any]:
        for name in [k for k in x if k not in kept]:
            del x[name]
        for k, y in kept.items():
            before = y()
            if k not in x or x[k] is not before:  # A frozen dict, such as a config, cannot be written.
                x[k] = before
        return x

    return back


def _of_tensor(x: Tensor) -> _Back:
    if x.is_inference() or x.layout != torch.strided or x.grad_fn is not None:
        return lambda: x
    before, version = x.detach().clone(), x._version

    def back() -> Tensor:
        nonlocal version
        if x._version != version and x.shape == before.shape:
            with torch.no_grad():
                x.copy_(before)
            version = x._version
        return x

    return back
