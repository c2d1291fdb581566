"""What is measured on a GPU: the blocks of Triton's kernels, then which backend is fastest for what."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import DeviceError, expect
from attnspan.kernels.measured import CHOICE, DECODING
from attnspan.kernels.triton._config import Config, config_of
from attnspan.kernels.tuned import Key
from attnspan.masks import Mask, causal, documents, full, global_keys, window
from attnspan.tools.bench.devices import CudaDevice, Device
from attnspan.tools.bench.timing import Budget, Meter, Subject, first_call, interleave
from attnspan.tools.tune.cases import Case

__all__ = ["BACKENDS", "KINDS", "TritonBackend", "blocks_grid", "gpu_name", "rank", "rankings"]

BACKENDS = ("vendor", "flex", "triton")
_HEADS = 32  # enough programs for every multiprocessor
_LENGTH = 4096


def gpu_name() -> tuple[str, str]:
    """Name of the GPU, and its architecture, such as "sm_90".

    Raises:
        DeviceError: torch sees none.
    """
    found, wanted = torch.cuda.is_available(), "a GPU that torch can use"
    expect(found, "attnspan tune --device cuda", wanted, "none", "Tune the CPU kernel", error=DeviceError)
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}", f"sm_{major}{minor}"


@dataclass(frozen=True)
class _BlocksCase(Case):
    """A causal call whose ``direction`` is one of Triton's kernels: "forward", "queries" or "keys"."""

    @property
    def heads(self) -> int:
        return _HEADS


def blocks_grid(dtypes: list[str], head_dims: list[int], length: int = _LENGTH) -> list[Case]:
    """One case for each kernel, dtype and head dim."""
    kernels = ("forward", "queries", "keys")
    return [_BlocksCase(length, d, "half", t, x) for t, d, x in product(dtypes, head_dims, kernels)]


class TritonBackend:
    """Triton's kernels, whose block sizes are searched."""

    name = "triton"

    def __init__(self, device: str = "cuda") -> None:
        self.device, self.isa = gpu_name() if device == "cuda" else ("interpreter", "none")
        self.where, self.clock = device, CudaDevice() if device == "cuda" else Device()

    def open(self, case: Case) -> dict[str, Any]:
        """The arguments of `attnspan.tools.tune.search.search`, with standard-normal inputs."""
        from attnspan.kernels.triton import _launch

        dtype, scale = getattr(torch, case.dtype), case.head_dim**-0.5
        sizes = (1, case.k_len, case.heads, case.head_dim)
        q, k, v, dout = (_normal(sizes, dtype, self.where, seed) for seed in range(4))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        bounds = case.mask.spans(case.q_len, case.k_len, like=q).lowered.bounds.contiguous()
        capability = int(self.isa[3:]) if self.isa.startswith("sm_") else 80
        rows = case.q_len
        default = config_of(case.direction, dtype, case.head_dim, rows, capability)

        def make_call(config: Config) -> Callable[[], tuple[Tensor, ...]]:
            def call() -> tuple[Tensor, ...]:
                if case.direction == "forward":
                    _launch.forward(q, k, v, bounds, out, lse, scale=scale, config=config, parts=1)
                    return (out,)
                configs = {case.direction: config}
                _launch.backward(dout, None, q, k, v, out, lse, bounds, *grads, scale=scale, configs=configs)
                return grads

            return call

        _launch.forward(q, k, v, bounds, out, lse, scale=scale)
        expected = [x.float().clone() for x in make_call(default)()]
        return {
            "make_call": make_call,
            "configs": _configs(case.direction, case.q_len, capability, time.time_ns()),
            "default": default,
            "check": partial(_check, expected, 8 * torch.finfo(dtype).eps),
            "device": self.clock,
        }


def _configs(kernel: str, rows: int, capability: int, seed: int) -> list[Config]:
    """Blocks, warps and stages that may be fastest; those that do not fit a GPU fail and drop out.

    In another order each time: each takes seconds to compile, so that a run tries some of them.
    """
    forward = kernel == "forward"
    bits = [(0, 0), *([(1, 0)] if forward and capability >= 90 else [])]
    bits += [(1, 1)] if forward and capability >= 100 else []
    tiles = (
        [(128, 64), (128, 128), (64, 64), (64, 128), (128, 32)]
        if forward
        else [*((64, 64), (32, 64), (64, 32), (32, 128), (32, 32))]
    )
    choices = product(tiles, (4, 8), (2, 3) if forward else (1, 2), bits)
    found = [Config(*tile, w, s, *bit) for tile, w, s, bit in choices if tile[0] <= max(rows, 16)]
    random.Random(seed).shuffle(found)
    return found


def _normal(sizes: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """(B, H, S, D), stored as (B, S, H, D), as models do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype).to(device).transpose(1, 2)


def _check(expected: list[Tensor], allowed: float, result: tuple[Tensor, ...]) -> None:
    for x, y in zip(result, expected, strict=True):
        difference = float((x.float() - y).norm() / y.norm().clamp(min=1e-30))
        if not difference <= allowed:  # also NaN
            raise ValueError(f"result differs from the default's by {difference:.1e} of its norm")


#: A mask for each kind of call, of so many keys.
KINDS: dict[str, Callable[[int], Mask]] = {
    "full": lambda _: full(),
    "causal": lambda _: causal(),
    "window": lambda n: window(n // 8),
    "documents": lambda n: causal() & documents(torch.linspace(0, n, 9).int().tolist()),
    "spans": lambda n: causal() & (window(n // 8) | global_keys(n // 32)),
    "decode": lambda _: causal(),
}


def rankings(
    device: str, isa: str, dtypes: list[str], head_dims: list[int], *, seconds: float, **more: Any
) -> Iterator[dict[str, Any]]:
    """The entry of each kind of call: nanoseconds of each backend that runs it, forward and backward."""
    for dtype, dim, kind in product(dtypes, head_dims, KINDS):
        times, reasons = rank(kind, dtype, dim, seconds=seconds, **more)
        key = Key(CHOICE, "both", isa, dtype, dim, 0, kind)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        reason = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "all ran"
        yield {"key": asdict(key), "config": times, "reason": reason, "device": device, "date": date}


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
        kind: A key of `KINDS`; decoding is a forward pass of `DECODING` queries, the others train.
        dtype: Of q, k and v.
        dim: Head dim.
        seconds: Time for each backend.
        length: Number of keys.
        heads: Number of query heads; there are a quarter as many key heads.
        where: Type of the device.
        backends: Names of those to time.

    Returns:
        Median nanoseconds by backend, and why others did not run.
    """
    from attnspan.torch import attention

    mask, decodes = KINDS[kind](length), kind == "decode"
    rows = (DECODING if decodes else length), length, length
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
        except Exception as error:  # It is left out, and the entry says why.
            reasons[name] = f"{type(error).__name__}: {error}"
    runs = interleave(subjects, Budget(seconds, 50), meter, basis="pipelined") if subjects else ()
    found = {}
    for subject, run in zip(subjects, runs, strict=True):
        timing = run.pipelined or run.execute
        assert timing is not None, "it ran"
        found[subject.name] = min(int(median(timing.samples) * 1e9), 2**31 - 1)
    return found, reasons
