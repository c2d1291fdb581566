"""State that a step leaves in a model, such as a cache. It is put back before the doctor repeats the step."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.places import is_users

__all__ = ["State"]

_OWN = frozenset(vars(nn.Module()))  # Attributes that torch manages.
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH = 5


class State:
    """Buffers and plain attributes of a model's modules at one moment. Parameters are not part of it.

    Attributes are numbers, texts, tensors, and lists, dicts and objects of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lists: list[tuple[list[Any], list[Any]]] = []
        #: Dicts with the names that torch manages in them.
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], frozenset[str]]] = []
        self._tensors: list[_Kept] = []
        self._seen: set[int] = set()
        for module in model.modules():
            self._keep_dict(module._buffers, 0)
            self._keep_dict(vars(module), 0, _OWN)

    def restore(self) -> None:
        """Put the state back."""
        for x, before in self._lists:
            if list(map(id, x)) != list(map(id, before)):
                x[:] = before
        for own, kept, left in self._dicts:
            for name in own.keys() - kept.keys() - left:
                del own[name]
            for name, value in kept.items():
                if name not in own or own[name] is not value:  # A frozen dict, such as a config, raises.
                    own[name] = value
        for tensor in self._tensors:
            tensor.restore()

    def _keep_dict(self, own: dict[Any, Any], depth: int, left: frozenset[str] = frozenset()) -> None:
        kept = {name: x for name, x in own.items() if name not in left}
        self._dicts.append((own, kept, left))
        for x in kept.values():
            self._keep(x, depth)

    def _keep(self, x: Any, depth: int) -> None:
        """Keep a value, if a step may change it in place."""
        is_tensor = isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
        is_fixed = isinstance(x, (*_PLAIN, nn.Module, type)) or callable(x) or depth > _DEPTH
        if id(x) in self._seen or (is_fixed and not is_tensor):
            return
        self._seen.add(id(x))  # The value may contain itself.
        if is_tensor:
            if not x.is_inference() and x.layout == torch.strided:
                self._tensors.append(_Kept(x))
        elif isinstance(x, list):
            self._lists.append((x, x.copy()))
            for y in x:
                self._keep(y, depth + 1)
        elif isinstance(x, dict):
            self._keep_dict(x, depth + 1)
        elif _is_of_users(x):
            self._keep_dict(vars(x), depth + 1)


class _Kept:
    """A tensor with its contents at one moment."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.contents, self.version = x, x.detach().clone(), x._version
        self.has_graph = x.grad_fn is not None

    def restore(self) -> None:
        x = self.tensor
        if x.grad_fn is not None and not self.has_graph and not x._is_view():
            x.detach_()  # A step wrote into it. The graph of this step is not part of the state before.
        if x._version != self.version and x.shape == self.contents.shape:
            with torch.no_grad():
                x.copy_(self.contents)
            self.version = x._version


def _is_of_users(x: Any) -> bool:
    """Whether an object has a class of the user or of an installed library, and not of Python or torch."""
    file = getattr(sys.modules.get(type(x).__module__), "__file__", None)
    return hasattr(x, "__dict__") and file is not None and is_users(file)
