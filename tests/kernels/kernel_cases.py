"""Runs of the compiled kernel on random problems, beside the float64 oracle."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attnspan import reference
from attnspan.kernels import cpu


@dataclass(frozen=True)
class Case:
    """A problem; ``mask`` is "full", "causal", "documents" or "random"."""

    batch: int = 1
    kv_heads: int = 2
    group: int = 1
    q_len: int = 64
    k_len: int = 64
    head_dim: int = 64
    v_dim: int = 64
    runs: int = 1
    mask: str = "random"
    dtype: torch.dtype = torch.float32
    scale: float = 0.125
    threads: int = 2
    seed: int = 0

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in shown.items()) or "default"


@dataclass
class Arrays:
    """The arguments of one forward and backward; outputs are NaN before the kernel writes them."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    dout: Tensor
    dlse: Tensor

    def run(self) -> dict[str, Tensor]:
        case = self.case
        heads = case.kv_heads * case.group
        out = _stored_bshd(case, heads, case.q_len, case.v_dim).fill_(torch.nan)
        lse = torch.full((case.batch, heads, case.q_len), torch.nan)
        inputs = {"dq": self.q, "dk": self.k, "dv": self.v}
        grads = {name: torch.full_like(x, torch.nan) for name, x in inputs.items()}
        options = {"scale": case.scale, "num_threads": case.threads}
        cpu.forward(self.q, self.k, self.v, self.bounds, out, lse, **options)
        given = (self.dout, self.dlse, self.q, self.k, self.v, out, lse, self.bounds)
        cpu.backward(*given, *grads.values(), **options)
        return {"out": out, "lse": lse, **grads}

    def oracle(self) -> dict[str, Tensor]:
        q, k, v, dout, dlse = (x.double().numpy() for x in (self.q, self.k, self.v, self.dout, self.dlse))
        bounds, scale = self.bounds.numpy(), self.case.scale
        out, lse = reference.forward(q, k, v, bounds, scale)
        # What comes into the lse of a row that sees nothing must not matter.
        grads = reference.backward(dout, np.where(np.isfinite(lse), dlse, 0), q, k, v, bounds, scale)
        results = (out, lse, *grads)
        names = ("out", "lse", "dq", "dk", "dv")
        return {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in zip(names, results, strict=True)}


def _stored_bshd(case: Case, heads: int, length: int, dim: int) -> Tensor:
    return torch.empty(case.batch, length, heads, dim, dtype=case.dtype).transpose(1, 2)


def make(case: Case) -> Arrays:
    """Standard-normal inputs: q stored (B, S, H, D), k and v stored (B, H, S, D)."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.kv_heads * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    return Arrays(
        case,
        normal(case.batch, case.q_len, heads, case.head_dim).transpose(1, 2),
        normal(case.batch, case.kv_heads, case.k_len, case.head_dim),
        normal(case.batch, case.kv_heads, case.k_len, case.v_dim),
        _bounds(case, generator),
        normal(case.batch, heads, case.q_len, case.v_dim),
        torch.randn(case.batch, heads, case.q_len, generator=generator),
    )


def _bounds(case: Case, generator: torch.Generator) -> Tensor:
    rows = torch.arange(case.q_len) + case.k_len - case.q_len
    if case.mask == "random":
        shape = (case.batch, case.kv_heads * case.group, case.q_len, 2 * case.runs)
        cuts = torch.randint(0, case.k_len + 1, shape, generator=generator).sort(-1).values
        cuts[:, :, ::5] = 0  # some rows see nothing
        return cuts.view(*shape[:3], case.runs, 2).int()
    lo = torch.zeros_like(rows) if case.mask != "documents" else rows // 50 * 50
    hi = torch.full_like(rows, case.k_len) if case.mask == "full" else rows + 1
    lo, hi = lo.clamp(0, case.k_len), hi.clamp(0, case.k_len)
    return torch.stack([lo, hi], -1).view(1, 1, case.q_len, 1, 2).int().contiguous()


def error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of the exact result; infinite where only one of them is finite."""
    finite = exact.isfinite()
    if not torch.equal(got.double()[~finite], exact[~finite]) or not got[finite].isfinite().all():
        return float("inf")
    difference = float((got.double() - exact)[finite].norm())
    return difference / max(float(exact[finite].norm()), 1e-30) if difference else 0.0


def budget(case: Case) -> dict[str, float]:
    """How far the exact results move when every input moves by up to half a unit of the dtype.

    No kernel that rounds its intermediate values to the dtype can be asked for less.
    """
    arrays = make(case)
    generator = torch.Generator().manual_seed(case.seed + 1)

    def moved(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
        return x.double() * (1 + noise * torch.finfo(case.dtype).eps)

    near = replace(arrays, **{n: moved(getattr(arrays, n)) for n in ("q", "k", "v", "dout")}).oracle()
    return {name: error(near[name], exact) for name, exact in arrays.oracle().items()}
