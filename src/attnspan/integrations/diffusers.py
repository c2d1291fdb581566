"""attnspan in Hugging Face diffusers: call ``enable(transformer_or_pipeline)``.

Importing this module also registers a backend, so you can call
``transformer.set_attention_backend("attnspan")``. Newer diffusers models look up their backend, older models
call torch's function. `enable` supports both, for one model at a time.
"""

import functools
from typing import Any

from attnspan.base.installed import require, require_names

require("diffusers", "attnspan.integrations.diffusers", "diffusers", ("0.40", "0.43"))

import diffusers  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402

_NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "dispatch_attention_fn")
require_names(attention_dispatch, _NEEDED, "attnspan.integrations.diffusers", "diffusers")

from ._diffusers_attention import attend  # noqa: E402
from ._diffusers_enable import NAME, Enabled, disable, enable  # noqa: E402
from ._diffusers_parallel import (  # noqa: E402
    Rows,
    TokenPlan,
    average_gradients,
    parallelize,
    parallelized,
    unparallelize,
)

__all__ = [
    "NAME",
    "Enabled",
    "Rows",
    "TokenPlan",
    "attend",
    "average_gradients",
    "disable",
    "enable",
    "parallelize",
    "parallelized",
    "unparallelize",
]


def _register() -> None:
    """Add the name to diffusers' closed enumeration of backends, and the function to its registry."""
    names = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(names)
        type.__setattr__(names, member._name_, member)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    attention_dispatch._AttentionBackendRegistry.register(names(NAME))(attend)


def _follow_set_attention_backend() -> None:
    """Let a model's own method also change older processors, which would silently keep torch's attention."""
    mixin = diffusers.ModelMixin
    if hasattr(mixin.set_attention_backend, "attnspan"):
        return
    set_backend, reset_backend = mixin.set_attention_backend, mixin.reset_attention_backend

    @functools.wraps(set_backend)
    def set_attention_backend(self: Any, backend: str) -> None:
        if backend.lower() == NAME:
            enable(self)
        else:
            disable(self)
        set_backend(self, backend)

    @functools.wraps(reset_backend)
    def reset_attention_backend(self: Any) -> None:
        disable(self)
        reset_backend(self)

    set_attention_backend.attnspan = True  # type: ignore[attr-defined]
    mixin.set_attention_backend = set_attention_backend
    mixin.reset_attention_backend = reset_attention_backend


_register()
_follow_set_attention_backend()
