"""Between frameworks: other people's kernels in torch, JAX functions in torch, torch functions in JAX.

Users import `wrap` and `call_jax` from `attnspan.torch`, `from_torch` from `attnspan.jax`.
"""

__all__: list[str] = []
