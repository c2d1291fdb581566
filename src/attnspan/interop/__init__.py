"""Custom attention kernels and JAX functions as PyTorch operators.

Import `wrap` and `call_jax` from `attnspan.torch`.
"""

from .call_jax import RetraceWarning as RetraceWarning
from .call_jax import SpecializedShapesWarning as SpecializedShapesWarning
from .call_jax import call_jax as call_jax
from .wrap import DeclarationError as DeclarationError
from .wrap import Wrapped as Wrapped
from .wrap import wrap as wrap

__all__ = [
    "DeclarationError",
    "RetraceWarning",
    "SpecializedShapesWarning",
    "Wrapped",
    "call_jax",
    "wrap",
]
