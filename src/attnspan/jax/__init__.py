"""attnspan's attention and its drop-in replacements for JAX."""

from typing import TYPE_CHECKING

from . import _needs as _needs  # isort: skip  (first: without JAX it says what to install)
from attnspan.base.lazy import lazy as _lazy
from attnspan.kernels import Explanation as Explanation
from attnspan.kernels import SlowPathWarning as SlowPathWarning

from .attention import attention as attention
from .attention import explain as explain
from .drop_in import dot_product_attention as dot_product_attention
from .dropout import dropout_seeds as dropout_seeds
from .flax import attention_fn as attention_fn
from .rules import SAVE_NAMES as SAVE_NAMES

if TYPE_CHECKING:
    from attnspan.parallel.jax import shard as shard

__all__ = [
    "SAVE_NAMES",
    "Explanation",
    "SlowPathWarning",
    "attention",
    "attention_fn",
    "dot_product_attention",
    "dropout_seeds",
    "explain",
    "shard",
]

# `attnspan.parallel.jax` imports this package, so `shard` can only be imported on first use.
__getattr__ = _lazy(__name__, {"shard": "attnspan.parallel.jax"})

from . import _load as _load  # isort: skip  (last: backends of others may import this package)
