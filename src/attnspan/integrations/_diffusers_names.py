"""Private names of diffusers, seen in 0.42. No other module uses private names of its functions."""

from collections.abc import Callable
from typing import Any

from diffusers.models import attention_dispatch

from attnspan.base.installed import require_names

_NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "dispatch_attention_fn")
require_names(attention_dispatch, _NEEDED, "attnspan.integrations.diffusers", "diffusers")


def register(name: str, attend: Callable[..., Any]) -> Callable[[], None]:
    """Add a name to the closed enumeration of backends, and a function to their registry.

    Returns:
        A function that removes both.
    """
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    before = registry._active_backend
    member = str.__new__(names, name)
    member._name_, member._value_, member._sort_order_ = name.upper(), name, len(names)
    type.__setattr__(names, member._name_, member)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    registry.register(member)(attend)

    def unregister() -> None:
        if registry._active_backend is member:
            registry._active_backend = before
        for known in (registry._backends, registry._constraints, registry._supported_arg_names):
            del known[member]
        del names._member_map_[member._name_], names._value2member_map_[name]
        names._member_names_.remove(member._name_)
        type.__delattr__(names, member._name_)

    return unregister


def forget_backend(x: Any, name: str) -> None:
    """Let a processor use the backend of its class, if its own is ``name``."""
    if getattr(x, "_attention_backend", None) == name:
        del x._attention_backend


def supported_backends(kind: type, name: str) -> dict[str, Any]:
    """Return the attributes of a subclass of ``kind`` that supports one more backend."""
    # AnyFlow needs a backend with BlockMask.
    known = getattr(kind, "_SUPPORTED_BACKENDS", None)
    return {} if known is None else {"_SUPPORTED_BACKENDS": (*known, name)}
