"""Custom attention kernels and JAX functions as PyTorch operators.

Import `wrap` and `call_jax` from `attnspan.torch`.
"""

__all__: list[str] = []
