"""Registers the experimental backends of torch."""

from attnspan.backends import register
from attnspan.torch.backends import of_kernel

from . import triton

register(of_kernel("triton", triton, opt_in="it was never measured on a GPU, so it is opt-in"), last=True)
