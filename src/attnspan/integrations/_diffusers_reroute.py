"""Rerouting of the attention of single diffusers objects, without touching other objects.

A processor, or a module with its own attention, finds `F.scaled_dot_product_attention` or
`dispatch_attention_fn` in the globals of its Python module. The object gets a subclass of its class. The
subclass has the same code with other globals, a copy in which these names mean attnspan's attention. A
compiler sees ordinary functions, and one class for all layers.
"""

import dis
from collections.abc import Callable
from copy import copy
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from attnspan.base.forks import ForkSafeLock
from attnspan.errors import ShapeError, expect

from ._diffusers_attention import NAME, attend
from ._diffusers_names import supported_backends

_SDPA = F.scaled_dot_product_attention
_NAMES = {"scaled_dot_product_attention", "dispatch_attention_fn"}

_lock = ForkSafeLock()
_routes: WeakValueDictionary[int, "Reroute"] = WeakValueDictionary()


class Reroute:
    """Functions that replace the names of attention in the objects that it reroutes.

    Args:
        config: Passed on as ``_parallel_config`` if a processor does not pass its own.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config
        functional = ModuleType("attnspan.integrations.diffusers.F")
        functional.__dict__.update({k: v for k, v in vars(F).items() if k not in vars(functional)})
        sdpa, dispatch = _replacements(config)
        functional.scaled_dot_product_attention = sdpa  # type: ignore[attr-defined]
        self._replaced = {id(F): functional, id(_SDPA): sdpa, id(dispatch_attention_fn): dispatch}
        self._scopes: dict[int, dict[str, Any]] = {}
        self._classes: dict[type, type] = {}

    @classmethod
    def to(cls, config: Any = None) -> "Reroute":
        """Return the only route with this config. Layers that share a route share their classes."""
        with _lock.held():
            found = _routes.get(id(config))
            if found is None:
                found = _routes[id(config)] = cls(config)
            return found

    def give(self, x: Any) -> Any:
        """Reroute the attention of ``x``. Returns ``x`` itself if it is a module, else a copy."""
        return _as(self.class_of(type(x)), x)

    def class_of(self, base: type) -> type:
        """Return the subclass of ``base`` with rerouted attention."""
        base = vars(base).get("_attnspan_base", base)
        with _lock.held():
            if base not in self._classes:
                # A twin stands right before its ancestor, so super() finds the rerouted method.
                twins = tuple(self._twin(x) for x in base.__mro__ if x is base or _methods(x))
                members = {"_attnspan_base": base, "_attnspan_route": self, "__reduce_ex__": _reduce}
                members |= supported_backends(base, NAME)
                if not hasattr(base, "_parallel_config"):
                    members["_parallel_config"] = property(_config_of, _set_config)
                self._classes[base] = _named_as(base, twins, members)
            return self._classes[base]

    def _twin(self, base: type) -> type:
        methods = {name: self._rebuilt(x) for name, x in _methods(base).items()}
        return _named_as(base, (base,), methods) if methods else base

    def _rebuilt(self, fn: FunctionType) -> FunctionType:
        scope = self._scope(fn.__globals__)
        new = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
        new.__kwdefaults__, new.__annotations__ = fn.__kwdefaults__, fn.__annotations__
        new.__qualname__, new.__doc__, new.__module__ = fn.__qualname__, fn.__doc__, fn.__module__
        new.__dict__.update(vars(fn))
        return new

    def _scope(self, names: dict[str, Any]) -> dict[str, Any]:
        """Copy a module's globals with attention replaced, in its functions as well."""
        if id(names) not in self._scopes:
            # The copy has no __name__, because the compiler would use it to look up the module.
            scope = self._scopes[id(names)] = {k: v for k, v in names.items() if k != "__name__"}
            for name, x in names.items():
                if id(x) in self._replaced:
                    scope[name] = self._replaced[id(x)]
                elif isinstance(x, FunctionType) and _calls_attention(x):
                    scope[name] = self._rebuilt(x)
        return self._scopes[id(names)]


def _replacements(config: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that replace torch's and diffusers'. They have the same arguments as `attend`."""

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        remedy = "Add the batch or heads dim"
        expect(query.dim() == 4, "query", "four dims", query.shape, remedy, error=ShapeError)
        # It is a mask of pairs, but for `attend` (B, Sk) means padding.
        if isinstance(attn_mask, Tensor) and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        options["_parallel_config"] = config
        out: Tensor = attend(query, key, value, attn_mask, *rest, **options)
        return out.transpose(1, 2)

    def dispatch(
        *given: Any,
        attention_kwargs: dict[str, Any] | None = None,
        backend: Any = None,
        parallel_config: Any = None,
        **options: Any,
    ) -> Any:
        del backend  # It is attnspan's.
        options |= {**(attention_kwargs or {}), "_parallel_config": parallel_config}
        return attend(*given, **options)

    return scaled_dot_product_attention, dispatch


def _named_as(base: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    } | members
    return type(base)(base.__name__, bases, members)


def _config_of(x: Any) -> Any:
    return type(x)._attnspan_route.config


def _set_config(x: Any, config: Any) -> None:
    x.__class__ = Reroute.to(config).class_of(type(x))


def _reduce(self: Any, _: Any) -> Any:
    # Copies and pickles use the class that can be imported.
    return _remade, (type(self)._attnspan_base, _config_of(self)), self.__dict__


def _remade(base: type, config: Any) -> Any:
    found: Any = Reroute.to(config).class_of(base)
    return found.__new__(found)


def _calls_attention(fn: FunctionType) -> bool:
    """Return whether a function calls attention by a name of its module."""
    codes, names = [fn.__code__], fn.__globals__
    for code in codes:
        codes.extend(x for x in code.co_consts if isinstance(x, CodeType))
        before = None
        for step in dis.get_instructions(code) if _NAMES.intersection(code.co_names) else ():
            found = names.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
            if found is _SDPA or found is dispatch_attention_fn:
                return True
            if before is F and step.argval == _SDPA.__name__:
                return True
            before = found
    return False


def _methods(cls: type) -> dict[str, FunctionType]:
    """Return a class's own methods that call attention."""
    if cls.__module__.split(".")[0] in ("torch", "builtins"):
        return {}
    found = {name: x for name, x in vars(cls).items() if isinstance(x, FunctionType)}
    return {name: x for name, x in found.items() if name != "__init__" and _calls_attention(x)}


def uses_attention(x: Any) -> bool:
    """Return whether an object calls attention in a way that can be rerouted."""
    return any(_methods(cls) for cls in type(x).__mro__)


def is_rerouted(x: Any) -> bool:
    """Return whether an object's attention is attnspan's."""
    return "_attnspan_base" in vars(type(x))


def restored(x: Any) -> Any:
    """Give ``x`` its own class back. Returns ``x`` itself if it is a module, else a copy."""
    return _as(type(x)._attnspan_base, x)


def _as(kind: type, x: Any) -> Any:
    x = x if isinstance(x, nn.Module) else copy(x)
    x.__class__ = kind
    return x
