"""Triton kernels for GPUs. They have the functions of each kernel in `attnspan.kernels`."""

from ._config import config_of as config_of
from .kernel import MAX_HEAD_DIM as MAX_HEAD_DIM
from .kernel import backward as backward
from .kernel import forward as forward
from .kernel import interpret as interpret
from .kernel import interpreted as interpreted
from .kernel import supports as supports
