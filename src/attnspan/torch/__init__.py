"""attnspan for PyTorch."""

from typing import TYPE_CHECKING

from . import compat as _compat  # noqa: F401  # isort: skip  (first: without torch it says what to install)
from attnspan.base.lazy import lazy as _lazy
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
    from attnspan.interop import DeclarationError as DeclarationError
    from attnspan.interop import RetraceWarning as RetraceWarning
    from attnspan.interop import SpecializedShapesWarning as SpecializedShapesWarning
    from attnspan.interop import Wrapped as Wrapped
    from attnspan.interop import call_jax as call_jax
    from attnspan.interop import wrap as wrap

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

# Wrappers of other code are in a package above this one.
_INTEROP = ("DeclarationError", "RetraceWarning", "SpecializedShapesWarning", "Wrapped", "call_jax", "wrap")
__getattr__ = _lazy(__name__, dict.fromkeys(_INTEROP, "attnspan.interop"))

from . import _load as _load  # noqa: E402  # isort: skip  (last: backends of others may import this package)
