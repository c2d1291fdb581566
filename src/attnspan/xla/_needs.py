"""Check for PyTorch/XLA, imported first. Without it, the error tells you what to install."""

from importlib.util import find_spec

for _name in ("torch", "torch_xla", "jax", "flax"):
    if find_spec(_name) is None:
        raise ImportError(
            f"attnspan.xla: expected PyTorch/XLA, JAX and flax, got no {_name}. Install them in a "
            "separate environment: pip install torch==2.9.0 torch_xla==2.9.0 jax==0.7.1 jaxlib==0.7.1 "
            "flax. In a checkout, make test-xla creates one.",
            name=_name,
        )
