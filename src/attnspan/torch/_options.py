"""Dropout seeds in torch: their checks, and the seeds of every batch element and head."""

from typing import Any

import torch
from torch import Tensor

from attnspan.base.arrays import kind_of
from attnspan.base.plain import check_plain
from attnspan.call.dropout import split_seeds
from attnspan.errors import DtypeError, ShapeError, expect

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def dropout_seeds(seed: Tensor, batch: int, heads: int) -> Tensor:
    """Seeds for every batch element and head. `attention` makes the same seeds from a single seed.

    If you shard batch or heads over devices, make the seeds of the global batch and slice them for each
    device. The devices then drop the same weights as a single device.

    Args:
        seed: Integer tensor, shape ().
        batch: Global batch size.
        heads: Global number of query heads.

    Returns:
        int64, shape (batch, heads): a ``dropout_seed`` for `attention`.

    Raises:
        TypeError: The seed is not an integer tensor.
        ValueError: The seed does not have shape ().

    Example:
        >>> seeds = dropout_seeds(torch.tensor(5), 2, 4)
        >>> torch.equal(seeds[:, :2], dropout_seeds(torch.tensor(5), 2, 2))
        True
    """
    check_seed(seed)
    rows, heads_at = torch.arange(batch, device=seed.device), torch.arange(heads, device=seed.device)
    return split_seeds(seed.to(torch.int64), rows[:, None], heads_at[None])  # type: ignore[no-any-return]


def check_seed(seed: Any, batch: Any = None, heads: Any = None) -> None:
    """Raise unless a seed is an integer tensor of shape (), or (batch, heads) if these are given."""
    check_plain("dropout_seed", seed)
    fits, remedy = (
        isinstance(seed, Tensor) and seed.dtype in _INTEGERS,
        "Pass torch.tensor(seed): a compiler would treat a number as a constant",
    )
    expect(fits, "dropout_seed", "an integer tensor", kind_of(seed), remedy, error=DtypeError)
    fits = seed.dim() == 0 or (seed.dim() == 2 and seed.shape[0] == batch and seed.shape[1] == heads)
    wanted = "shape ()" if batch is None else "shape () or (B, H) = ({}, {})"
    remedy = "Pass one seed for all, or dropout_seeds(seed, batch, heads)"
    expect(fits, "dropout_seed", wanted, tuple(seed.shape), remedy, batch, heads, error=ShapeError)
