"""attnspan's Triton kernels for GPUs: any spans, every option, forward and backward, deterministic.

The ends of the spans give the keys of each block of rows (`_ranges`). Keys that no row of the block sees cost
nothing. Keys that all rows see are not masked. Triton is imported when a kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnspan.base.installed import FIRST_TRITON, lacking
from attnspan.call import Problem
from attnspan.errors import BackendError, expect

from ._interpret import interpret as interpret

#: Largest head dim of the kernels.
MAX_HEAD_DIM = 256
LEAST_CAPABILITY = 80


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernels on CPU tensors, one operation after the other, for tests.

    Raises:
        OptionError: If the process was started without ``TRITON_INTERPRET=1``, which Triton reads once.
    """
    from triton import knobs

    remedy = "Set it before the first import of torch or triton"
    expect(knobs.runtime.interpret, "interpreted", "the variable TRITON_INTERPRET=1", "none", remedy)
    token = interpret.set(True)
    try:
        yield
    finally:
        interpret.reset(token)


def supports(problem: Problem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    if problem.device != "cuda" and not interpret.get():
        return f"it runs on CUDA tensors, not on {problem.device}"
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {problem.dtype}"
    if max(problem.head_dim, problem.v_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if min(problem.head_dim, problem.v_dim) == 0:
        return "it takes head dims from 1 on, not 0"
    if problem.capability is not None and problem.capability < LEAST_CAPABILITY:
        return f"it takes GPUs of compute capability 8.0 or newer, not {problem.capability / 10}"
    return lacking("triton", FIRST_TRITON)


def forward(*args: Any, **options: Any) -> None:
    """Write ``out`` and ``lse``, with the arguments of `attnspan.kernels.cpu.forward`, on a GPU."""
    from attnspan.kernels._on_device import on_device_of

    from ._launch import forward as forward

    with on_device_of(args[0]), _fitting():
        forward(*args, **options)


def backward(*args: Any, **options: Any) -> None:
    """Write the gradients of `forward`, with the arguments of `attnspan.kernels.cpu.backward`, on a GPU."""
    from attnspan.kernels._on_device import on_device_of

    from ._launch import backward as backward

    with on_device_of(args[0]), _fitting():
        backward(*args, **options)


@contextmanager
def _fitting() -> Iterator[None]:
    """Add a remedy to errors of launches that need more resources than the GPU has."""
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        expected = "a GPU with the shared memory and registers that its blocks need"
        remedy = "Leave the name out: another backend runs the call"
        raise BackendError("backend='triton'", expected=expected, got=str(error), remedy=remedy) from error
