"""Runs of the compiled kernel on random problems, beside the float64 oracle."""

from dataclasses import dataclass, replace

import closeness
import numpy as np
import torch
from torch import Tensor

from attnspan import reference
from attnspan.kernels import cpu
from attnspan.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options


@dataclass(frozen=True)
class Case:
    """A problem; ``mask`` is "full", "causal", "documents" or "random", ``options`` names of `_options`."""

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
    options: tuple[str, ...] = ()

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
    options: Options | None = None

    def run(
        self, config: dict[str, int] | None = None, backward: dict[str, int] | None = None
    ) -> dict[str, Tensor]:
        """Both directions; without one of its own, backward has the configuration with square blocks."""
        case = self.case
        heads = case.kv_heads * case.group
        out = _stored_bshd(case, heads, case.q_len, case.v_dim).fill_(torch.nan)
        lse = torch.full((case.batch, heads, case.q_len), torch.nan)
        inputs = {"dq": self.q, "dk": self.k, "dv": self.v}
        grads = {name: torch.full_like(x, torch.nan) for name, x in inputs.items()}
        call = {"scale": case.scale, "num_threads": case.threads, "options": self.options, "config": config}
        cpu.forward(self.q, self.k, self.v, self.bounds, out, lse, **call)
        given = (self.dout, self.dlse, self.q, self.k, self.v, out, lse, self.bounds)
        if config and backward is None:
            backward = {**config, "block_q": config["block_k"]}
        extra = self._option_gradients()
        cpu.backward(*given, *grads.values(), **{**call, "config": backward}, **extra)
        return {"out": out, "lse": lse, **grads, **extra}

    def _option_gradients(self) -> dict[str, Tensor]:
        extra, options = {}, self.options or Options()
        if options.bias_kind:
            extra["dbias"] = torch.full(options.bias.shape, torch.nan)
        if options.sinks is not None:
            extra["dsinks"] = torch.full(options.sinks.shape, torch.nan)
        return extra

    def oracle(self) -> dict[str, Tensor]:
        q, k, v, dout, dlse = (x.double().numpy() for x in (self.q, self.k, self.v, self.dout, self.dlse))
        bounds, scale = self.bounds.numpy(), self.case.scale
        options = Options() if self.options is None else _as_numpy(self.options)
        out, lse = reference.forward(q, k, v, bounds, scale, options)
        # What comes into the lse of a row that sees nothing must not matter.
        dlse = np.where(np.isfinite(lse), dlse, 0)
        grads = reference.backward(dout, dlse, q, k, v, bounds, scale, options)
        results = dict(
            zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), (out, lse, *grads), strict=True)
        )
        absent = {n for n, x in (("dbias", options.bias), ("dsinks", options.sinks)) if x is None}
        return {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in results.items() if n not in absent}


def _as_numpy(options: Options) -> Options:
    def array(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        return x.double().numpy() if x.is_floating_point() else x.numpy()

    return Options(*map(array, options))


def _options(case: Case, generator: torch.Generator) -> Options | None:
    """The named options, with standard-normal parameters (slopes are smaller, as distances are large)."""
    heads = case.kv_heads * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def dense(batch: int, heads: int, rows: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        return {"bias": normal(batch, heads, rows, case.k_len).to(dtype), "bias_kind": DENSE}

    def with_holes() -> dict[str, object]:
        given = dense(1, heads, case.q_len)
        given["bias"][..., ::3] = -torch.inf
        given["bias"][:, :, 2] = -torch.inf  # a row that sees nothing, however many spans it has
        return given

    def with_deep_rows() -> dict[str, object]:
        given = dense(1, heads, case.q_len)
        for row, depth in (
            (1, 1e4),
            (2, 1e7),
            (3, 1e9),
        ):  # as masks are filled: such rows are padding, or all alike
            given["bias"][:, :, row] -= depth
        given["bias"][:, :, 4] = torch.finfo(torch.float32).min
        return given

    makers = {
        "softcap": lambda: {"softcap": 2.0},
        "wide softcap": lambda: {"softcap": 0.2},
        "sinks": lambda: {"sinks": normal(heads)},
        "alibi": lambda: {"bias": normal(1, heads).abs() / 16, "bias_kind": ALIBI},
        "any alibi": lambda: {"bias": normal(case.batch, heads) / 64, "bias_kind": ALIBI},
        "signed alibi": lambda: {"bias": normal(1, heads) / 64, "bias_kind": SIGNED_ALIBI},
        "table": lambda: {"bias": normal(heads, 2 * 40 + 1), "bias_kind": DISTANCE},
        "long table": lambda: {"bias": normal(heads, 2 * 800 + 1), "bias_kind": DISTANCE},
        "one distance": lambda: {"bias": normal(heads, 1), "bias_kind": DISTANCE},
        "dense": lambda: dense(case.batch, heads, case.q_len),
        "dense of heads": lambda: dense(1, heads, case.q_len, case.dtype),
        "dense of batch": lambda: dense(case.batch, 1, case.q_len, case.dtype),
        "dense of rows": lambda: dense(1, 1, case.q_len),
        "dense of keys": lambda: dense(1, heads, 1),
        "dense with holes": with_holes,
        "dense with deep rows": with_deep_rows,
        "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": torch.tensor(case.seed + 11)},
        "dropout by head": lambda: {
            "dropout_p": 0.5,
            "dropout_seed": torch.randint(2**62, (case.batch, heads), generator=generator),
        },
        "rows elsewhere": lambda: {
            "q_index": torch.randperm(900, generator=generator)[None, : case.q_len].int()
        },
        "keys elsewhere": lambda: {
            "k_index": torch.stack(
                [torch.randperm(900, generator=generator)[: case.k_len] for _ in range(case.batch)]
            ).int()
        },
        "rows shifted": lambda: {"q_index": (torch.arange(case.q_len) + 13)[None].int()},
    }
    if not case.options:
        return None
    given: dict[str, object] = {}
    for name in case.options:
        given |= makers[name]()
    return Options(**given)


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
        _options(case, generator),
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
    return closeness.error(got.double().numpy(), exact.numpy())


def budget(case: Case, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far the exact results of the case move when every input moves by up to half a unit of the dtype.

    No kernel that rounds its intermediate values to the dtype can be asked for less. The output is one of
    them: the backward pass takes the mean of each row's gradients from it, and an error there is one of dlse.
    """
    arrays = make(case)
    generator = torch.Generator().manual_seed(case.seed + 1)

    def noise(x: Tensor) -> Tensor:
        half_units = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
        return x.double() * half_units * torch.finfo(case.dtype).eps

    moved = {n: getattr(arrays, n).double() + noise(getattr(arrays, n)) for n in ("q", "k", "v", "dout")}
    dlse = arrays.dlse + noise(arrays.dout.double() * exact["out"]).sum(-1)
    near = replace(arrays, **moved, dlse=dlse).oracle()
    return {name: error(near[name], x) for name, x in exact.items()}


def exponential(dtype: torch.dtype, half: float = 6.5e-8) -> float:
    """The error of the polynomial, see csrc/softmax.h."""
    return {torch.bfloat16: 3.3e-6, torch.float16: half}.get(dtype, 6.5e-8)


def walk(case: Case) -> float:
    """Sums are in float32, whose roundings walk at random over as many terms as there are rows."""
    return 2**-24 * max(case.k_len, case.q_len * case.group) ** 0.5


def check(got: dict[str, Tensor], exact: dict[str, Tensor], bounds: dict[str, float]) -> None:
    for name, x in got.items():
        found = error(x, exact[name])
        assert found <= bounds[name], (name, found, bounds[name])
