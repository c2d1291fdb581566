"""Arrays of another framework among the arguments of a call."""

from __future__ import annotations

import sys
from typing import Any

import jax

from ..errors import DtypeError
from ..options import Given


def check_framework(mask: Any, given: Given) -> None:
    """Raise where the mask or an option holds a torch tensor: JAX or NumPy would copy it without a word.

    Example:
        >>> import attnspan
        >>> check_framework(attnspan.causal(), Given())
    """
    torch = sys.modules.get("torch")
    if torch is None:  # Then there is no tensor.
        return
    for name, x in (("mask", mask), *vars(given).items()):
        if x is not None and any(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(x)):
            raise DtypeError(
                name,
                expected="arrays of JAX or NumPy, as q, k and v",
                got="a torch.Tensor",
                remedy="Convert it by jax.dlpack.from_dlpack, or call attnspan.torch.attention",
            )
