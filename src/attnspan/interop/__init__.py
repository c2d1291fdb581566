"""Custom attention kernels and JAX functions as PyTorch operators.

Import `wrap` and `call_jax` from `attnspan.torch`.
"""

from ._call_jax import RetraceWarning as RetraceWarning
from ._call_jax import SpecializedShapesWarning as SpecializedShapesWarning
from ._call_jax import call_jax as call_jax
from ._wrap import DeclarationError as DeclarationError
from ._wrap import Wrapped as Wrapped
from ._wrap import wrap as wrap
