"""Block sizes of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile, warps of a program, and the number of tiles that are loaded ahead.

    ``descriptors`` and ``specialized`` are 0 or 1, for the forward kernel from Hopper on. With them, tiles
    without hidden pairs are loaded by tensor descriptors, and by separate warps.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: int = 0
    specialized: int = 0

    def launch(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


#: By kernel and by whether q is float32: tiles for head dims up to 64, 128 and 256 that spill no registers on
#: sm_80, sm_89, sm_90, sm_100 and sm_120, in less shared memory than each has. None was ever timed.
_CONFIGS: dict[tuple[str, bool], tuple[Config, Config, Config]] = {
    ("forward", False): (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 16, 8, 2)),
    ("forward", True): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(16, 16, 8, 1)),
    ("queries", False): (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 8, 1)),
    ("queries", True): (Config(32, 16, 4, 1), Config(32, 32, 8, 1), Config(16, 16, 8, 1)),
    ("keys", False): (Config(32, 64, 4, 2), Config(32, 64, 8, 1), Config(32, 32, 8, 1)),
    ("keys", True): (Config(32, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
}

#: For 16 bits with a bias or dropout, whose values need registers too.
_HEAVY: dict[str, tuple[Config, Config, Config]] = {
    "forward": (Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(64, 16, 8, 2)),
    "queries": (Config(32, 64, 8, 2), Config(32, 64, 8, 2), Config(16, 32, 8, 1)),
    "keys": (Config(32, 64, 4, 2), Config(32, 32, 8, 1), Config(16, 32, 8, 1)),
}

#: For 16 bits on Hopper, by kernel and size: the tiles without spills whose code has the fewest
#: cycles by counting (`benchmarks/gpu_code.py`). Its products want 64 rows for each four warps.
_HOPPER: dict[tuple[str, int], Config] = {
    ("forward", 0): Config(128, 128, 8, 2),
    ("queries", 0): Config(128, 64, 8, 1),
    ("queries", 1): Config(128, 64, 8, 2),
    ("keys", 1): Config(32, 64, 4, 2),
}


def config_of(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    rows: int,
    capability: int,
    heavy: bool = False,
) -> Config:
    """Look up the block sizes in the tables above.

    Args:
        kernel: "forward", "queries" or "keys".
        dtype: Dtype of q.
        dim: The larger head dim.
        rows: Rows of one key head: queries times heads of a group.
        capability: Compute capability of the GPU, for example 90.
        heavy: Whether the call has a bias or dropout.
    """
    size = (dim > 64) + (dim > 128)
    config = _CONFIGS[kernel, dtype == torch.float32][size]
    if kernel == "forward" and config.block_n == 64 and dim > 64 and capability not in (80, 90):
        config = replace(config, block_m=64)  # larger tiles spill
    if capability == 90 and dtype != torch.float32:
        config = _HOPPER.get((kernel, size), config)
    if heavy and dtype != torch.float32:
        config = _HEAVY[kernel][size]
    while config.block_m > 16 and config.block_m // 2 >= rows:
        config = replace(config, block_m=config.block_m // 2)
    return config
