"""Overhead of a call, compared with SDPA: python benchmarks/calls.py

16 causal queries of one head with head dim 64, on one thread: eager and compiled, forward and with backward,
with the operators' kernels in the compiled module and in Python. Medians in microseconds of alternating
samples.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal
from attnspan.torch import attention, ops
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import Budget, Subject, interleave

ROWS, BUDGET = 16, Budget(seconds=3.0, rounds=25)


@contextmanager
def python_kernels() -> Iterator[None]:
    """Run the CPU kernel of both operators from Python, as without torch's stable functions."""
    library = torch.library.Library("attnspan", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("attention", ops._forward_kernel, "CPU", allow_override=True)
        library.impl("attention_backward", ops._backward_kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def main() -> None:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 1, ROWS, 64, requires_grad=True) for _ in range(3))
    mask, gradient = causal().prepare(ROWS, ROWS, like=q), torch.ones(1, 1, ROWS, 64)

    def ours() -> Any:
        return attention(q, k, v, mask=mask) + 1

    def theirs() -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True) + 1

    def forward(call: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(call)

    def both(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            call().backward(gradient)
            q.grad = k.grad = v.grad = None

        return run

    print(f"{'':<32}{'attnspan':>10}{'kernels from Python':>22}{'SDPA':>8}")
    for name, way in (("forward", forward), ("forward and backward", both)):
        for compiled in (False, True):
            own, peer = (way(torch.compile(call) if compiled else call) for call in (ours, theirs))
            subjects = [
                Subject("attnspan", own, Device()),
                Subject("from Python", own, Device(), python_kernels),
                Subject("sdpa", peer, Device()),
            ]
            own(), peer()  # compiles
            found = [x.execute.median * 1e6 for x in interleave(subjects, BUDGET) if x.execute is not None]
            row = f"{name}, {'compiled' if compiled else 'eager'}"
            print(f"{row:<32}{found[0]:>10.1f}{found[1]:>22.1f}{found[2]:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
