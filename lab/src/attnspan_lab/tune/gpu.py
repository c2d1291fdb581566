"""Measurements on a GPU: block sizes of the Triton kernels, and times of all backends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import DeviceError, expect
from attnspan.experimental import triton
from attnspan.masks import Mask, causal, documents, full, global_keys, window
from attnspan_lab.bench.devices import CudaDevice, Device
from attnspan_lab.bench.timing import Budget, Meter, Subject, first_call, interleave

__all__ = ["BACKENDS", "KERNELS", "KINDS", "blocks", "capability_of_gpu", "rank"]

BACKENDS = ("vendor", "flex", "triton")
KERNELS = ("forward", "queries", "keys")
_HEADS = 32  # enough programs for every multiprocessor
_LENGTH = 4096
_DECODING = 16  # queries


def capability_of_gpu() -> int:
    """Return the compute capability of the GPU, such as 90.

    Raises:
        DeviceError: torch sees no GPU.
    """
    found, wanted = torch.cuda.is_available(), "a GPU that torch can use"
    expect(found, "attnspan tune", wanted, "none", "Pass a factory, module:function", error=DeviceError)
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def blocks(
    kernel: str,
    dtype_name: str,
    head_dim: int,
    *,
    length: int = _LENGTH,
    heads: int = _HEADS,
    where: str = "cuda",
    capability: int = 80,
) -> dict[str, Any]:
    """Make the arguments of a search for block sizes of one Triton kernel, for causal calls.

    Args:
        kernel: One of `KERNELS`.
        dtype_name, head_dim, length, heads: Dtype and sizes of q, k and v, which are standard-normal.
        where: Type of the device.
        capability: Compute capability of the GPU.
    """
    dtype, scale = getattr(torch, dtype_name), head_dim**-0.5
    q, k, v, dout = (_normal((1, length, heads, head_dim), dtype, where, seed) for seed in range(4))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    bounds = causal().spans(length, length, like=q).lowered.bounds.contiguous()
    default = triton.config_of(kernel, dtype, head_dim, length, capability)

    def make_call(config: Any) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            if kernel == "forward":
                triton.forward(q, k, v, bounds, out, lse, scale=scale, config=config, parts=1)
                return (out,)
            configs = {kernel: config}
            triton.backward(dout, None, q, k, v, out, lse, bounds, *grads, scale=scale, configs=configs)
            return grads

        return call

    triton.forward(q, k, v, bounds, out, lse, scale=scale)
    expected = [x.float().clone() for x in make_call(default)()]
    return {
        "make_call": make_call,
        "configs": _candidates(default, kernel, length, capability),
        "default": default,
        "check": partial(_check, expected, 8 * torch.finfo(dtype).eps),
        "device": CudaDevice() if where == "cuda" else Device(),
    }


def _candidates(default: Any, kernel: str, rows: int, capability: int) -> list[Any]:
    """List block sizes, warps and stages that may be fastest. Configurations that do not fit the GPU fail.

    The order is random, because each one takes seconds to compile and a run tries only some of them.
    """
    forward = kernel == "forward"
    loads = [(0, 0), *([(1, 0)] if forward and capability >= 90 else [])]
    loads += [(1, 1)] if forward and capability >= 100 else []
    tiles = ((64, 64), (32, 64), (64, 32), (32, 128), (32, 32))
    if forward:
        tiles = ((128, 64), (128, 128), (64, 64), (64, 128), (128, 32))
    choices = product(tiles, (4, 8), (2, 3) if forward else (1, 2), loads)
    names = ("block_m", "block_n", "warps", "stages", "descriptors", "specialized")
    found = [
        replace(default, **dict(zip(names, (*tile, warps, stages, *load), strict=True)))
        for tile, warps, stages, load in choices
        if tile[0] <= max(rows, 16)
    ]
    random.shuffle(found)
    return found


def _normal(sizes: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Draw a tensor (B, H, S, D) that is stored as (B, S, H, D), as in models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype).to(device).transpose(1, 2)


def _check(expected: list[Tensor], allowed: float, result: tuple[Tensor, ...]) -> None:
    for x, y in zip(result, expected, strict=True):
        difference = float((x.float() - y).norm() / y.norm().clamp(min=1e-30))
        if not difference <= allowed:  # true for NaN as well
            raise ValueError(f"the result differs from the default's result by {difference:.1e} of its norm")


#: Kind of call -> its mask, from the number of keys.
KINDS: dict[str, Callable[[int], Mask]] = {
    "full": lambda _: full(),
    "causal": lambda _: causal(),
    "window": lambda n: window(n // 8),
    "documents": lambda n: causal() & documents(torch.linspace(0, n, 9).int().tolist()),
    "spans": lambda n: causal() & (window(n // 8) | global_keys(n // 32)),
    "decode": lambda _: causal(),
}


def rank(
    kind: str,
    dtype: str,
    dim: int,
    *,
    seconds: float,
    length: int = _LENGTH,
    heads: int = _HEADS,
    where: str = "cuda",
    backends: tuple[str, ...] = BACKENDS,
) -> tuple[dict[str, int], dict[str, str]]:
    """Time the backends in turn.

    Args:
        kind: A key of `KINDS`. Decoding is a forward pass of 16 queries. The other kinds include backward.
        dtype: Dtype of q, k and v.
        dim: Head dim.
        seconds: Time for each backend.
        length: Number of keys.
        heads: Number of query heads. There are a quarter as many key heads.
        where: Type of the device.
        backends: Names of the backends to time.

    Returns:
        Median nanoseconds by backend, and the reasons of backends that did not run.
    """
    from attnspan.torch import attention

    mask, decodes = KINDS[kind](length), kind == "decode"
    rows = (_DECODING if decodes else length), length, length
    counts = heads, max(heads // 4, 1), max(heads // 4, 1)
    q, k, v = (
        _normal((1, n, h, dim), getattr(torch, dtype), where, i).requires_grad_(not decodes)
        for i, (n, h) in enumerate(zip(rows, counts, strict=True))
    )
    dout, clock, meter = torch.ones_like(q), CudaDevice() if where == "cuda" else Device(), Meter()
    subjects, reasons = [], {}
    for name in backends:

        def call(name: str = name) -> Any:
            out = attention(q, k, v, mask=mask, backend=name)
            return out if decodes else torch.autograd.grad(out, (q, k, v), dout)

        subject = Subject(name, call, clock)
        try:
            first_call(subject, meter)
            subjects.append(subject)
        except Exception as error:  # The backend is left out, and the entry has the reason.
            reasons[name] = f"{type(error).__name__}: {error}"
    runs = interleave(subjects, Budget(seconds, 50), meter, basis="pipelined") if subjects else ()
    found = {}
    for subject, run in zip(subjects, runs, strict=True):
        timing = run.pipelined or run.execute
        assert timing is not None, "it ran"
        found[subject.name] = min(int(median(timing.samples) * 1e9), 2**31 - 1)
    return found, reasons
