"""Other people's kernels and JAX functions as operators of torch.

Users import `wrap` and `call_jax` from `attnspan.torch`.
"""

__all__: list[str] = []
