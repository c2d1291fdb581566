"""What the tests on a GPU share: whether there is one that runs compiled kernels, and moving calls to it."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

MISSING = "" if torch.cuda.is_available() else "torch sees no GPU"
needs_gpu = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def move(tree: Any) -> Any:
    """The same with its tensors on the GPU; masks and biases are trees."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().cuda(), tree)
