"""Imported first: without PyTorch/XLA, the error says what to install."""

from importlib.util import find_spec

from .._installed import require

require("torch", "attnspan.xla", "torch")
if find_spec("torch_xla") is None:
    raise ImportError(
        "attnspan.xla: expected PyTorch/XLA beside torch, found none. It has an environment of its own: "
        "pip install torch==2.9.0 torch_xla==2.9.0 jax==0.7.1 jaxlib==0.7.1 flax, or `make test-xla` in a "
        "checkout."
    )
