"""The mesh of the tests: 2 x 2 devices of the CPU."""

import functools

import numpy as np
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

#: Ways to split a batch of 4 and 4 heads over 2 x 2 devices.
SPLITS = {
    "batch": ("data", None, None, None),
    "heads": (None, "model", None, None),
    "batch and heads": ("data", "model", None, None),
    "batch over both": (("data", "model"), None, None, None),
    "heads over both, by number": (None, (1, 0), None, None),
}


@functools.cache
def mesh() -> xs.Mesh:
    """Axes "data" and "model", two devices each; this process is in SPMD mode from here on."""
    xr.use_spmd()
    assert xr.global_runtime_device_count() == 4, "run by `make test-xla`"
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


mesh()
