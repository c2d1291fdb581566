"""attnspan for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _needs as _needs  # isort: skip  (first: without torch it says what to install)
from attnspan.kernels import Explanation as Explanation
from attnspan.kernels import SlowPathWarning as SlowPathWarning

from ._attention import attention as attention
from ._explain import explain as explain
from ._module import Attention as Attention
from ._options import dropout_seeds as dropout_seeds
from ._paged_cache import PagedCache as PagedCache
from ._rolling import RollingCache as RollingCache
from ._sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from ._unplanned import MissingPlanWarning as MissingPlanWarning
from .block_mask import to_block_mask as to_block_mask
from .caches import StaticCache as StaticCache
from .compile import SAVE_OPS as SAVE_OPS
from .compile import checkpoint_policy as checkpoint_policy
from .compile import keep_backend as keep_backend
from .ops import backward_flops as backward_flops
from .ops import forward_flops as forward_flops

if TYPE_CHECKING:
    from attnspan.interop.call_jax import RetraceWarning as RetraceWarning
    from attnspan.interop.call_jax import SpecializedShapesWarning as SpecializedShapesWarning
    from attnspan.interop.call_jax import call_jax as call_jax
    from attnspan.interop.wrap import DeclarationError as DeclarationError
    from attnspan.interop.wrap import Wrapped as Wrapped
    from attnspan.interop.wrap import wrap as wrap

__all__ = [
    "SAVE_OPS",
    "Attention",
    "DeclarationError",
    "Explanation",
    "MissingPlanWarning",
    "PagedCache",
    "RetraceWarning",
    "RollingCache",
    "SlowPathWarning",
    "SpecializedShapesWarning",
    "StaticCache",
    "Wrapped",
    "attention",
    "backward_flops",
    "call_jax",
    "checkpoint_policy",
    "dropout_seeds",
    "explain",
    "forward_flops",
    "keep_backend",
    "scaled_dot_product_attention",
    "to_block_mask",
    "wrap",
]

_ABOVE = {
    **dict.fromkeys(("RetraceWarning", "SpecializedShapesWarning", "call_jax"), "attnspan.interop.call_jax"),
    **dict.fromkeys(("DeclarationError", "Wrapped", "wrap"), "attnspan.interop.wrap"),
}


def __getattr__(name: str) -> Any:
    # Wrappers of other code are in a package above this one, so they are looked up on access.
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ABOVE[name]), name)
