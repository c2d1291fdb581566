"""attnspan for PyTorch/XLA: exact attention on XLA tensors, lazy, compiled, and sharded by SPMD."""

from . import _needs as _needs  # isort: skip  (first: without PyTorch/XLA it says what to install)
from .attention import attention as attention

__all__ = ["attention"]
