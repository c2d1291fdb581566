"""Random problems for backends of JAX, with the oracle's answers and the error that rounding explains."""

from dataclasses import dataclass
from functools import partial

import closeness
import jax
import jax.numpy as jnp
import numpy as np

from attnspan import reference
from attnspan.call.dropout import dropout_seeds
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.jax.part import JaxPart, Static

KINDS = {"alibi": ALIBI, "signed alibi": SIGNED_ALIBI, "table": DISTANCE, "dense": DENSE, "": 0}


@dataclass(frozen=True)
class Case:
    """`lead` are the batch rows and heads that bounds tell apart; `bias_shape` is that of a dense bias."""

    dtype: str = "float32"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 21
    k_len: int = 37
    head_dim: int = 8
    v_dim: int = 12
    lead: tuple[int, int] = (1, 1)
    runs: int = 2
    softcap: float = 0.0
    bias: str = ""
    bias_shape: tuple[int, ...] = ()
    reach: int = 5
    sinks: bool = False
    dropout_p: float = 0.0
    placed: bool = False
    wide_bias: bool = False

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ",".join(f"{k}={v}" for k, v in shown.items()).replace(" ", "") or "plain"

    @property
    def static(self) -> Static:
        return Static(self.head_dim**-0.5, self.softcap, KINDS[self.bias], self.dropout_p)


def causal_window(case: Case, left: int = 11) -> np.ndarray:
    """The last `left` keys of each row, and the first key: two spans."""
    last = np.arange(case.k_len - case.q_len, case.k_len) + 1
    lo = np.maximum(last - left, 0)
    first = np.stack([np.zeros_like(lo), (lo > 1) & (last > 0)], -1)
    spans = np.stack([first, np.stack([lo, np.maximum(last, lo)], -1)], -2)
    spans = np.pad(spans, [(0, 0), (0, case.runs - 2), (0, 0)])
    return np.broadcast_to(spans, (*case.lead, *spans.shape)).astype(np.int32)


def random_bounds(case: Case) -> np.ndarray:
    """Legal spans; every fifth row sees nothing."""
    shape = (*case.lead, case.q_len, 2 * case.runs)
    cuts = np.sort(np.random.default_rng(3).integers(0, case.k_len + 1, shape), -1)
    cuts[:, :, ::5] = 0
    return cuts.reshape(*shape[:3], case.runs, 2).astype(np.int32)


@dataclass
class Problem:
    """Arrays of one call, in the dtypes in which a backend gets them."""

    case: Case
    arrays: dict[str, np.ndarray]  # q, k, v, dout, dlse, and bias and sinks where there are any
    bounds: np.ndarray
    seeds: np.ndarray | None = None
    q_index: np.ndarray | None = None
    k_index: np.ndarray | None = None

    @property
    def part(self) -> JaxPart:
        """The arrays that a backend gets."""
        words = None
        if self.seeds is not None:
            words = np.stack([self.seeds & 0xFFFFFFFF, self.seeds >> 32 & 0xFFFFFFFF], -1).astype(np.uint32)
        options = (self.bounds, self.arrays.get("bias"), self.arrays.get("sinks"), words)
        arrays = (*(self.arrays[name] for name in "qkv"), *options, self.q_index, self.k_index)
        return JaxPart(*jax.tree.map(jnp.asarray, arrays), static=self.case.static)

    def options(self, arrays: dict[str, np.ndarray]) -> Options:
        return Options(
            softcap=self.case.softcap,
            bias=arrays.get("bias"),
            bias_kind=KINDS[self.case.bias],
            sinks=arrays.get("sinks"),
            dropout_p=self.case.dropout_p,
            dropout_seed=self.seeds,
            q_index=self.q_index,
            k_index=self.k_index,
        )


def make(case: Case, bounds: np.ndarray) -> Problem:
    """Standard-normal arrays; biases and sinks too."""
    random = np.random.default_rng(7)

    def normal(*shape: int, dtype: str = case.dtype) -> np.ndarray:
        return random.standard_normal(shape).astype(jnp.dtype(dtype))

    rows, keys = (case.batch, case.heads, case.q_len), (case.batch, case.kv_heads, case.k_len)
    arrays = {
        "q": normal(*rows, case.head_dim),
        "k": normal(*keys, case.head_dim),
        "v": normal(*keys, case.v_dim),
        "dout": normal(*rows, case.v_dim),
        "dlse": normal(*rows, dtype="float64" if case.dtype == "float64" else "float32"),
    }
    if case.bias == "dense":
        dtype = "float32" if case.wide_bias else case.dtype
        arrays["bias"] = normal(*case.bias_shape, dtype=dtype)
        arrays["bias"][..., 1::7] = -np.inf
    elif case.bias:
        table = case.bias == "table"
        shape = (case.heads, 2 * case.reach + 1) if table else (case.bias_shape or (1, case.heads))
        arrays["bias"] = normal(*shape, dtype="float32") * np.float32(1.0 if table else 0.1)
    if case.sinks:
        arrays["sinks"] = normal(case.heads, dtype="float32")
        arrays["sinks"][0] = -np.inf
    problem = Problem(case, arrays, bounds)
    if case.dropout_p:
        problem.seeds = dropout_seeds(-77, case.batch, case.heads)
    if case.placed:
        order = [
            random.permutation(2 * (case.q_len + case.k_len)).astype(np.int32) for _ in range(case.batch)
        ]
        problem.q_index = np.stack([x[: case.q_len] for x in order])
        problem.k_index = np.stack([x[-case.k_len :] for x in order])
    return problem


def solve(problem: Problem, arrays: dict[str, np.ndarray], misread=None) -> dict[str, np.ndarray]:
    """The oracle's results; `misread(out)` is added to dlse, as by a backward pass that reads another out."""
    options = problem.options(arrays)
    call = (*(arrays[name] for name in "qkv"), problem.bounds, problem.case.static.scale, options)
    out, lse = reference.forward(*call)
    dlse = np.where(np.isfinite(lse), arrays["dlse"], 0)
    dlse = dlse if misread is None else dlse + misread(out)
    dq, dk, dv, dbias, dsinks = reference.backward(arrays["dout"], dlse, *call)
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    extra = {"dbias": dbias, "dsinks": dsinks}
    return results | {name: x for name, x in extra.items() if name[1:] in arrays}


def check(problem: Problem, got: dict[str, np.ndarray]) -> None:
    """Compare results by norm with the oracle's; the bound is that of tests/conformance."""
    unit = float(jnp.finfo("float64" if problem.case.dtype == "float64" else "float32").eps)
    closeness.check(got, *oracle(problem), problem.case, 0.55 * unit, unit / 2)


def oracle(problem: Problem) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The exact results, and how far half a unit of the dtype in each input moves them."""
    arrays = {name: x.astype(np.float64) for name, x in problem.arrays.items()}
    exact, own = solve(problem, arrays), float(jnp.finfo(problem.case.dtype).eps)

    def rounded(name: str) -> bool:
        return bool(problem.arrays[name].dtype == problem.case.dtype)

    moved = closeness.sensitivity(partial(solve, problem), arrays, exact, rounded, 3)
    # Products of 16-bit numbers are exact in float32, and lse is a sum over those.
    return exact, {name: (min(own, 2.0**-23) if name == "lse" else own) * x for name, x in moved.items()}
