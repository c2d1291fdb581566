"""attnspan for PyTorch/XLA: the same attention on XLA tensors, lazily, compiled, and sharded by SPMD."""

from importlib.util import find_spec

for _name in ("torch", "torch_xla", "jax", "flax"):
    if find_spec(_name) is None:
        raise ImportError(
            f"attnspan.xla: expected PyTorch/XLA with what its call_jax needs, got no {_name}. Give it an "
            "environment of its own: pip install torch==2.9.0 torch_xla==2.9.0 jax==0.7.1 jaxlib==0.7.1 "
            "flax; in a checkout, make test-xla makes one.",
            name=_name,
        )

from .attention import attention as attention  # noqa: E402

__all__ = ["attention"]
