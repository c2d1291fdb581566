"""The bridge: JAX functions on torch tensors. Nothing here imports JAX before the first call."""

from .call import call_jax as call_jax
from .notices import RetraceWarning as RetraceWarning
from .notices import SpecializedShapesWarning as SpecializedShapesWarning
