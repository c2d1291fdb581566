"""attnspan for PyTorch/XLA: exact attention on XLA tensors, lazy, compiled, and sharded by SPMD."""

from importlib.util import find_spec

for _name in ("torch", "torch_xla", "jax", "flax"):
    if find_spec(_name) is None:
        raise ImportError(
            f"attnspan.xla: expected PyTorch/XLA, JAX and flax, got no {_name}. Install them in a "
            "separate environment: pip install torch==2.9.0 torch_xla==2.9.0 jax==0.7.1 jaxlib==0.7.1 "
            "flax. In a checkout, make test-xla creates one.",
            name=_name,
        )

from .attention import attention as attention  # noqa: E402

__all__ = ["attention"]
