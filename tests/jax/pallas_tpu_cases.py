"""Calls of the kernels for TPUs, interpreted on CPU, beside the oracle's answers in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from closeness import error

from attnspan import _dropout, reference
from attnspan.jax.backends import Operands, Static
from attnspan.jax.backends import pallas_tpu as pallas
from attnspan.options import Options

SMALLEST = 128, 128

# Most of a test is compilation, of which the optimizer takes the larger part.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Shape:
    """By default two blocks of queries and three of keys, none of them whole."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 150
    k_len: int = 300
    head_dim: int = 16
    v_dim: int = 24
    dtype: str = "float32"


@dataclass
class Case:
    """NumPy arrays, in float64 what the arrays of the dtype hold."""

    shape: Shape
    bounds: np.ndarray
    static: Static = field(default_factory=lambda: Static(scale=0.25))
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 7
    indices: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, rng = self.shape, np.random.default_rng(3)
        sizes = {
            "q": (s.batch, s.heads, s.q_len, s.head_dim),
            "k": (s.batch, s.kv_heads, s.k_len, s.head_dim),
            "v": (s.batch, s.kv_heads, s.k_len, s.v_dim),
            "dout": (s.batch, s.heads, s.q_len, s.v_dim),
        }
        drawn = {name: _rounded(rng.standard_normal(size), s.dtype) for name, size in sizes.items()}
        drawn["dlse"] = rng.standard_normal((s.batch, s.heads, s.q_len))
        self.arrays = {**drawn, **self.arrays}

    def with_arrays(self, **arrays: np.ndarray) -> Case:
        return replace(self, arrays={**self.arrays, **arrays})

    @property
    def operands(self) -> Operands:
        seeds = None
        if self.static.dropout_p:
            words = _dropout.dropout_seeds(self.seed, self.shape.batch, self.shape.heads)
            seeds = np.ascontiguousarray(words).view(np.uint32).reshape(*words.shape, 2)
        bias, sinks = (self.arrays.get(name) for name in ("bias", "sinks"))
        return Operands(
            jnp.asarray(self.bounds, jnp.int32),
            None if bias is None else jnp.asarray(bias, jnp.float32),
            None if sinks is None else jnp.asarray(sinks, jnp.float32),
            None if seeds is None else jnp.asarray(seeds),
            **{name: jnp.asarray(x, jnp.int32) for name, x in self.indices.items()},
        )

    def run(self) -> dict[str, np.ndarray]:
        """out, lse and every gradient, of the kernels."""
        forward, backward = _compiled(self.static)
        dtype = jnp.dtype(self.shape.dtype)
        q, k, v, dout = (jnp.asarray(self.arrays[name], dtype) for name in ("q", "k", "v", "dout"))
        given, dlse = self.operands, jnp.asarray(self.arrays["dlse"], jnp.float32)
        with pallas.interpreting(simulated=False):
            out, lse = forward(q, k, v, given)
            gradients = backward(dout, dlse, q, k, v, given, out, lse)
        assert out.dtype == q.dtype
        assert lse.dtype == jnp.float32
        assert all(g.dtype == q.dtype for g in gradients[:3])
        found = zip(NAMES, (out, lse, *gradients), strict=True)
        return {name: np.asarray(x, np.float64) for name, x in found if x is not None}

    def solve(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """The oracle's answers, for other arrays than the case's own where they are given."""
        a = {**self.arrays, **(arrays or {})}
        options = Options(
            softcap=self.static.softcap,
            bias=a.get("bias"),
            bias_kind=self.static.bias_kind,
            sinks=a.get("sinks"),
            dropout_p=self.static.dropout_p,
            dropout_seed=np.asarray(self.seed) if self.static.dropout_p else None,
            **self.indices,
        )
        call = (a["q"], a["k"], a["v"], self.bounds, self.static.scale, options)
        out, lse = reference.forward(*call)
        dlse = np.where(np.isfinite(lse), a["dlse"], 0)
        dq, dk, dv, dbias, dsinks = reference.backward(a["dout"], dlse, *call)
        found = zip(NAMES, (out, lse, dq, dk, dv, dbias, dsinks), strict=True)
        return {name: x for name, x in found if x.size}

    def check(self) -> None:
        """Errors are a few times what the results move by when what has the dtype moves by half a unit."""
        got, exact = self.run(), self.solve()
        assert got.keys() == exact.keys()
        near, rng = {}, np.random.default_rng(1)
        unit = float(jnp.finfo(self.shape.dtype).eps)
        for name in ("q", "k", "v", "dout"):
            near[name] = self.arrays[name] * (1 + unit * (rng.random(self.arrays[name].shape) - 0.5))
        # The backward pass takes a sum of the output, which was rounded: as if dlse were another.
        misread = unit * (rng.random(exact["out"].shape) - 0.5) * exact["out"]
        near["dlse"] = self.arrays["dlse"] + (self.arrays["dout"] * misread).sum(-1)
        moved = self.solve(near)
        for name, value in got.items():
            # Float32 sums walk at random.
            walk = 2.0**-24 * np.sqrt(self.shape.k_len * (1 if value.size > 99 else self.shape.q_len))
            allowed = 3 * (error(moved[name], exact[name]) + walk)
            found = error(value, exact[name])
            assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


@cache
def _compiled(static: Static) -> tuple[Any, Any]:
    def forward(q: Any, k: Any, v: Any, given: Operands) -> Any:
        return pallas.forward(q, k, v, given, static, SMALLEST)

    def backward(dout: Any, dlse: Any, q: Any, k: Any, v: Any, given: Operands, out: Any, lse: Any) -> Any:
        return pallas.backward(dout, dlse, q, k, v, given, out, lse, static, True, SMALLEST)

    return tuple(jax.jit(f, compiler_options=QUICKLY) for f in (forward, backward))


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)


def spans(*runs: tuple[Any, Any], shape: Shape) -> np.ndarray:
    """Bounds of two runs for each batch row and head; runs are broadcast, missing ones are empty."""
    size = (shape.batch, shape.heads, shape.q_len)
    full = [np.stack([np.broadcast_to(x, size) for x in run], -1) for run in runs]
    full += [np.zeros((*size, 2), int)] * (2 - len(full))
    return np.stack(full, 3)


def masks(shape: Shape) -> dict[str, np.ndarray]:
    rows = np.arange(shape.q_len) + shape.k_len - shape.q_len
    start = np.searchsorted(cuts := np.array([0, 100, 170, 230]), rows, "right") - 1
    rng = np.random.default_rng(2)
    anywhere = np.sort(rng.integers(0, shape.k_len + 1, (shape.batch, shape.heads, shape.q_len, 4)), -1)
    anywhere[:, :, ::5] = 0
    behind = np.maximum(rows - 30, 0)
    return {
        "full": spans((0, shape.k_len), shape=shape),
        "causal": spans((0, rows + 1), shape=shape),
        "window": spans((behind, np.minimum(rows + 9, shape.k_len)), shape=shape),
        "documents": spans((cuts[start], rows + 1), shape=shape),
        "global and window": spans((0, np.minimum(5, behind)), (behind, rows + 1), shape=shape),
        "anywhere, some rows nothing": anywhere.reshape(*anywhere.shape[:3], 2, 2),
        "nothing": spans(shape=shape),
    }
