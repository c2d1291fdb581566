"""attnspan for PyTorch."""

from . import _needs as _needs  # isort: skip  (first: without torch it says what to install)
from . import _encode as _encode  # registers the operator that masks from booleans need
from . import _pytrees as _pytrees  # registers the masks
from ._attention import SlowPathWarning as SlowPathWarning
from ._attention import attention as attention
from ._block_mask import to_block_mask as to_block_mask
from ._cache import StaticCache as StaticCache
from ._call_jax import RetraceWarning as RetraceWarning
from ._call_jax import SpecializedShapesWarning as SpecializedShapesWarning
from ._call_jax import call_jax as call_jax
from ._checkpoint import SAVE_OPS as SAVE_OPS
from ._checkpoint import checkpoint_policy as checkpoint_policy
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._flops import backward_flops as backward_flops
from ._flops import forward_flops as forward_flops
from ._module import Attention as Attention
from ._options import dropout_seeds as dropout_seeds
from ._rolling import RollingCache as RollingCache
from ._sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from ._wrap import DeclarationError as DeclarationError
from ._wrap import Wrapped as Wrapped
from ._wrap import wrap as wrap

__all__ = [
    "SAVE_OPS",
    "Attention",
    "DeclarationError",
    "Explanation",
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
    "scaled_dot_product_attention",
    "to_block_mask",
    "wrap",
]
