"""Random problems of attention, and what the oracle says of them: results, gradients, errors by norm.

Inputs are standard-normal. `attention` takes a problem as it is; kernels and the oracle take it lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from closeness import FACTOR, FACTOR_OF_FEW, FEW, error, sensitivity
from torch import Tensor

from attnspan import Prepared, Spans, reference
from attnspan.call.options import Given, Options
from attnspan.torch._front import PLAIN
from samples.parts import LONG_MASKS, MASKS, Case, Draw, Setting, random_bounds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Problem:
    """The arguments of a call, as `attention` takes them, and lowered as kernels do."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    setting: Setting
    mask: Any
    bounds: Tensor
    options: Options | None

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of the operator."""
        return self.q, self.k, self.v, self.bounds, self.case.factor, *(self.options or ())

    def keywords(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.setting.build(parameters), "mask": self.mask, "scale": self.case.factor}

    def requires_grad(self) -> Problem:
        """The same with leaves for inputs and lowered parameters."""
        new = {name: x.detach().requires_grad_() for name, x in self.inputs.items()}
        floats = {n: x for n, x in (self.options or Options())._asdict().items() if _is_floating(x)}
        options = self.options and self.options._replace(
            **{n: x.detach().requires_grad_() for n, x in floats.items()}
        )
        return replace(self, **new, options=options)

    def oracle(self) -> dict[str, np.ndarray]:
        """Results, and gradients of inputs, of parameters, and of lowered bias and sinks, in float64."""
        arrays = {name: getattr(self, name).detach().double().numpy() for name in MOVED}
        return self.solve(arrays | {"dlse": self.dlse.double().numpy()})

    def solve(
        self,
        arrays: dict[str, np.ndarray],
        misread: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """The same for other q, k, v, dout and dlse.

        `misread(out)` is added to dlse: what a backward pass makes of an `out` that is not the exact one.
        """
        options = Options(*map(as_numpy, self.options or Options()))
        call = (*(arrays[n] for n in "qkv"), self.bounds.detach().numpy(), self.case.factor, options)
        out, lse = reference.forward(*call)
        # What comes into the lse of a row that sees nothing must not matter.
        dlse = np.where(np.isfinite(lse), arrays["dlse"], 0)
        dlse = dlse if misread is None else dlse + misread(out)
        dq, dk, dv, dbias, dsinks = reference.backward(arrays["dout"], dlse, *call)
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        results |= {n: x for n, x in (("dbias", dbias), ("dsinks", dsinks)) if x is not None and x.size}
        return {n: np.ascontiguousarray(x) for n, x in (results | self._of_parameters(dbias)).items()}

    def _of_parameters(self, dbias: np.ndarray | None) -> dict[str, np.ndarray]:
        """Gradients of what the lowered bias was made of."""
        (name, given), *_ = [
            *((n, x) for n, x in self.setting.parameters.items() if n != "sinks"),
            ("", None),
        ]
        if dbias is None or given is None:
            return {}
        if dbias.size == given.numel():
            return {f"d{name}": dbias.reshape(given.shape)}
        gathered = np.zeros(given.shape)
        buckets = self.setting.build(self.setting.parameters)["bias"].buckets
        np.add.at(gathered, (slice(None), buckets), dbias)
        return {f"d{name}": gathered}


#: What has the dtype of a case whatever its options are.
MOVED = ("q", "k", "v", "dout")


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def as_numpy(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.detach().double() if x.is_floating_point() else x).numpy()


def make(case: Case) -> Problem:
    draw = Draw(case, torch.Generator().manual_seed(case.seed))

    def stored(order: str, heads: int, length: int, dim: int) -> Tensor:
        if case.stored in (order, "bshd"):
            return draw.normal(case.batch, length, heads, dim, dtype=case.dtype).transpose(1, 2)
        return draw.normal(case.batch, heads, length, dim, dtype=case.dtype)

    q = stored("mixed", case.heads, case.q_len, case.head_dim)
    k, v = (stored("bshd", case.kv_heads, case.k_len, dim) for dim in (case.head_dim, case.v_dim))
    mask, q_index = _mask(case, draw.generator)
    dout = draw.normal(case.batch, case.heads, case.q_len, case.v_dim, dtype=case.dtype)
    dlse = draw.normal(case.batch, case.heads, case.q_len)
    setting = draw.setting(case.options)
    given = setting.build(setting.parameters)
    spans = mask if isinstance(mask, Spans) else mask.spans(**case.sizes, like=q).lowered
    # Bare spans do not say where their rows are; prepared ones are the last of the keys.
    mask = Prepared(spans) if "q_index" in given or "k_index" in given or mask is spans else mask
    options = Given(**given).lower(PLAIN, q, k, Prepared(spans), fixed=True) if given else None
    if options is not None and q_index is not None and options.q_index is None:
        options = options._replace(q_index=torch.from_numpy(q_index).int())
    return Problem(case, q, k, v, dout, dlse, setting, mask, spans.bounds, options)


def _mask(case: Case, generator: torch.Generator) -> tuple[Any, np.ndarray | None]:
    if case.mask != "random":
        return {**MASKS, **LONG_MASKS}[case.mask](case)
    batch = case.batch if case.mask_batch is None else case.mask_batch
    heads = case.heads if case.mask_heads is None else case.mask_heads
    bounds = random_bounds(generator, batch, heads, case.q_len, case.k_len, case.runs, case.empty)
    return Spans(bounds, case.k_len), None


def solved(problem: Problem) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The exact results, and how far they move when what has the case's dtype moves by half a unit of it.

    No implementation that rounds its intermediate values to that dtype can be asked for less.
    """
    arrays = {name: getattr(problem, name).double().numpy() for name in (*MOVED, "dlse")}
    exact, few = problem.solve(arrays), any(x.numel() < FEW for x in problem.setting.parameters.values())
    moved = sensitivity(problem.solve, arrays, exact, MOVED.__contains__, 3 if few else 1)
    # Products of 16-bit numbers are exact in float32, and lse is a sum over those: the dtype is no excuse.
    own, single = torch.finfo(problem.case.dtype).eps, torch.finfo(torch.float32).eps
    return exact, {name: (min(own, single) if name == "lse" else own) * x for name, x in moved.items()}


@lru_cache(maxsize=8)
def oracle(case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    return solved(make(case))


#: Relative error of an exponential. In bf16 it is that of the kernel, which cuts it to what that needs: see
#: csrc/softmax.h.
EXPONENTIAL = {torch.float64: 1.3e-16, torch.float32: 6.5e-8, torch.bfloat16: 3.3e-6, torch.float16: 6.5e-8}


def rounding(case: Case, exponential: float | None = None) -> float:
    """Sums and exponentials are in float32, or in float64; roundings of a sum walk at random."""
    unit = 2**-53 if case.dtype == torch.float64 else 2**-24
    walk = unit * max(case.k_len, case.q_len * case.heads // case.kv_heads) ** 0.5
    return walk + (EXPONENTIAL[case.dtype] if exponential is None else exponential)


def compare(got: Mapping[str, Any], exact: Mapping[str, np.ndarray], bounds: Mapping[str, float]) -> None:
    """Hold each result, a tensor or an array, to its bound, by norm."""
    for name, x in got.items():
        found = error(np.asarray(x.detach().double() if isinstance(x, Tensor) else x), exact[name])
        assert found <= bounds[name], f"{name}: error {found:.3g}, allowed {bounds[name]:.3g}"


def check(
    of: Case | Problem, got: Mapping[str, Any], extra: float = 0.0, exponential: float | None = None
) -> None:
    """Compare results with the oracle's, within what roundings explain."""
    case, (exact, unavoidable) = (of, oracle(of)) if isinstance(of, Case) else (of.case, solved(of))
    inherent = rounding(case, exponential) + extra
    factors = {name: FACTOR if x.size >= FEW else FACTOR_OF_FEW for name, x in exact.items()}
    compare(got, exact, {name: factors[name] * (unavoidable[name] + inherent) for name in exact})
