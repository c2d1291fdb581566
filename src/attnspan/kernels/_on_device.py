"""The device that Triton launches on. It is the current device, which may differ from a tensor's device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of a CUDA tensor the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
