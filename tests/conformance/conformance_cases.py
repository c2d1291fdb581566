"""The cells of the conformance suite: options, masks and shapes, with the oracle's answers.

Inputs are standard-normal. A setting builds the keywords of `attention` from parameters that are tensors, and
those of the oracle, by the same function, from parameters that are float64 arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from closeness import FEW, sensitivity
from conformance_masks import MASKS, random_spans
from torch import Tensor

import attnspan as a
from attnspan import reference
from attnspan.options import Options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    q_len: int = 17
    k_len: int = 17
    head_dim: int = 16
    v_dim: int = 16

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "heads": self.heads, "q_len": self.q_len, "k_len": self.k_len}


SHAPES = {
    "one query": Shape(heads=8, kv_heads=1, q_len=1, k_len=259, head_dim=64, v_dim=64),
    "few queries": Shape(heads=2, kv_heads=2, q_len=5, k_len=133, head_dim=32, v_dim=32),
    "sixteen queries": Shape(heads=4, kv_heads=2, q_len=16, k_len=70, head_dim=32, v_dim=32),
    "beyond a tile": Shape(batch=1, heads=1, kv_heads=1, q_len=200, k_len=330, head_dim=64, v_dim=64),
    "more queries than keys": Shape(batch=1, kv_heads=2, q_len=70, k_len=20),
    "MLA": Shape(batch=1, q_len=20, k_len=40, head_dim=192, v_dim=128),
    "small, Dv beyond D": Shape(q_len=21, k_len=35, head_dim=8, v_dim=24),
    "odd head dims": Shape(batch=1, heads=3, kv_heads=3, q_len=33, k_len=65, head_dim=37, v_dim=53),
}


@dataclass(frozen=True)
class Setting:
    """`build(parameters)` gives the keywords of `attention`; each parameter gets a gradient."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    build: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    own_places: bool = False


class Draw:
    """Random arrays for one cell."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.generator = torch.Generator().manual_seed(5)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(size, generator=self.generator)
        # Of both 16-bit dtypes, so that one answer of the oracle serves both.
        return x if dtype == torch.float32 else x.to(torch.bfloat16).to(torch.float16).to(dtype)

    def dense(self, batch: int, heads: int, rows: int, dtype: torch.dtype | None = None) -> Setting:
        values = self.normal(batch, heads, rows, self.shape.k_len, dtype=dtype or self.dtype)
        return Setting({"values": values}, lambda p: {"bias": a.dense_bias(p["values"])})

    def places(self) -> dict[str, Tensor]:
        """Global indices in any order, another one in each batch row."""
        shape = self.shape
        far = 2 * (shape.q_len + shape.k_len)
        order = [torch.randperm(far, generator=self.generator) for _ in range(shape.batch)]
        return {
            "q_index": torch.stack([x[: shape.q_len] for x in order]),
            "k_index": torch.stack([x[-shape.k_len :] for x in order]),
        }


def _softcap(_: Draw) -> Setting:
    return Setting(build=lambda _: {"softcap": 1.5})


def _sinks(draw: Draw) -> Setting:
    return Setting({"sinks": draw.normal(draw.shape.heads)}, lambda p: {"sinks": p["sinks"]})


def _alibi(draw: Draw) -> Setting:
    slopes = torch.from_numpy(a.alibi_slopes(draw.shape.heads))
    return Setting({"slopes": slopes}, lambda p: {"bias": a.alibi(p["slopes"])})


def _signed_alibi(draw: Draw) -> Setting:
    slopes = 0.1 * draw.normal(draw.shape.batch, draw.shape.heads)
    return Setting({"slopes": slopes}, lambda p: {"bias": a.alibi(p["slopes"], signed=True)})


def _t5(draw: Draw) -> Setting:
    buckets = a.t5_buckets(12, 40)
    table = draw.normal(draw.shape.heads, 12)
    return Setting({"table": table}, lambda p: {"bias": a.relative(p["table"], buckets)})


def _distance_table(draw: Draw) -> Setting:
    table = draw.normal(draw.shape.heads, 15)
    return Setting({"table": table}, lambda p: {"bias": a.relative(p["table"])})


def _dropout(_: Draw) -> Setting:
    return Setting(build=lambda _: {"dropout_p": 0.2, "dropout_seed": torch.tensor(77)})


def _dropout_seeds(draw: Draw) -> Setting:
    seeds = torch.randint(-(2**62), 2**62, (draw.shape.batch, draw.shape.heads), generator=draw.generator)
    return Setting(build=lambda _: {"dropout_p": 0.5, "dropout_seed": seeds})


def _everything(draw: Draw) -> Setting:
    parameters = {"sinks": draw.normal(draw.shape.heads), "table": draw.normal(draw.shape.heads, 12)}
    buckets = a.t5_buckets(12, 40)

    def build(p: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "softcap": 2.0,
            "bias": a.relative(p["table"], buckets),
            "sinks": p["sinks"],
            "dropout_p": 0.1,
            "dropout_seed": torch.tensor(-1),
        }

    return Setting(parameters, build)


def _everything_dense(draw: Draw) -> Setting:
    dense = draw.dense(draw.shape.batch, draw.shape.heads, draw.shape.q_len)
    sinks = draw.normal(draw.shape.heads)

    def build(p: Mapping[str, Any]) -> dict[str, Any]:
        extra = {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": torch.tensor(4)}
        return {**dense.build(p), "sinks": p["sinks"], **extra}

    return Setting({**dense.parameters, "sinks": sinks}, build)


def _placed(make: Callable[[Draw], Setting]) -> Callable[[Draw], Setting]:
    def placed(draw: Draw) -> Setting:
        setting, places = make(draw), draw.places()
        return replace(setting, build=lambda p: {**setting.build(p), **places}, own_places=True)

    return placed


OPTIONS: dict[str, Callable[[Draw], Setting]] = {
    "none": lambda _: Setting(),
    "softcap": _softcap,
    "sinks": _sinks,
    "alibi": _alibi,
    "alibi, signed, per batch row": _signed_alibi,
    "T5": _t5,
    "distance table": _distance_table,
    "dense": lambda draw: draw.dense(draw.shape.batch, draw.shape.heads, draw.shape.q_len),
    "dense, float32": lambda draw: draw.dense(1, draw.shape.heads, draw.shape.q_len, torch.float32),
    "dense, all heads": lambda draw: draw.dense(draw.shape.batch, 1, draw.shape.q_len),
    "dense, one for all": lambda draw: draw.dense(1, 1, draw.shape.q_len),
    "dense, per key": lambda draw: draw.dense(draw.shape.batch, draw.shape.heads, 1),
    "dense, per key, one for all": lambda draw: draw.dense(1, 1, 1),
    "dropout": _dropout,
    "dropout by seeds": _dropout_seeds,
    "everything": _everything,
    "everything, dense": _everything_dense,
    "alibi, indices given": _placed(_alibi),
    "dropout, indices given": _placed(_dropout),
    "everything, indices given": _placed(_everything),
}


@dataclass(frozen=True)
class Cell:
    """One problem; `mask` is a name of MASKS, or "random", two spans a row that differ by batch row."""

    option: str
    mask: str
    shape: Shape
    dtype: torch.dtype


@dataclass
class Problem:
    """The arguments of a cell, and how its results are named."""

    cell: Cell
    inputs: dict[str, Tensor]
    setting: Setting
    mask: a.Mask | a.Spans
    q_index: np.ndarray | None
    dout: Tensor
    dlse: Tensor

    @property
    def scale(self) -> float:
        return self.cell.shape.head_dim**-0.5

    def keywords(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        # Bare spans do not say where their rows are; prepared ones are the last of the keys.
        mask = a.Prepared(self.mask) if isinstance(self.mask, a.Spans) else self.mask
        return {**self.setting.build(parameters), "mask": mask, "scale": self.scale}

    def bounds(self) -> np.ndarray:
        if isinstance(self.mask, a.Spans):
            return np.asarray(self.mask.bounds)
        return np.asarray(self.mask.spans(**self.cell.shape.sizes).bounds)

    def options(self, parameters: Mapping[str, np.ndarray]) -> Options:
        """The options as the oracle takes them; positions that follow from the mask are those of its docs."""
        given = self.setting.build(parameters)
        bias, kind = given.get("bias"), 0
        if bias is not None:
            bias, kind = bias.lower(**self.cell.shape.sizes, wide=True)
        seed = given.get("dropout_seed")
        return Options(
            softcap=given.get("softcap", 0.0),
            bias=bias,
            bias_kind=kind,
            sinks=given.get("sinks"),
            dropout_p=given.get("dropout_p", 0.0),
            dropout_seed=None if seed is None else seed.numpy(),
            q_index=given["q_index"].numpy() if "q_index" in given else self.q_index,
            k_index=given["k_index"].numpy() if "k_index" in given else None,
        )


def make(cell: Cell) -> Problem:
    shape, dtype = cell.shape, cell.dtype
    draw = Draw(shape, dtype)
    # Stored (B, S, H, D), as projections leave them.
    sizes = {
        "q": (shape.batch, shape.q_len, shape.heads, shape.head_dim),
        "k": (shape.batch, shape.k_len, shape.kv_heads, shape.head_dim),
        "v": (shape.batch, shape.k_len, shape.kv_heads, shape.v_dim),
    }
    inputs = {name: draw.normal(*size, dtype=dtype).transpose(1, 2) for name, size in sizes.items()}
    setting = OPTIONS[cell.option](draw)
    q_index = None
    if cell.mask == "random":
        mask: Any = random_spans(draw.generator, shape.batch, 1, shape.q_len, shape.k_len, runs=2)
    else:
        sample = MASKS[cell.mask](shape)
        mask, q_index = sample.mask, sample.q_index
    if setting.own_places and not isinstance(mask, a.Spans):
        mask = mask.spans(**shape.sizes)
    dout = draw.normal(shape.batch, shape.heads, shape.q_len, shape.v_dim, dtype=dtype)
    dlse = draw.normal(shape.batch, shape.heads, shape.q_len)
    return Problem(cell, inputs, setting, mask, q_index, dout, dlse)


def _solve(
    problem: Problem, arrays: dict[str, np.ndarray], misread: Callable[[np.ndarray], np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The oracle's results for float64 arrays of every input, parameter and incoming gradient.

    `misread(out)` is added to dlse: what a backward pass makes of an `out` that is not the exact one.
    """
    parameters = {name: arrays[name] for name in problem.setting.parameters}
    options = problem.options(parameters)
    call = (arrays["q"], arrays["k"], arrays["v"], problem.bounds(), problem.scale, options)
    out, lse = reference.forward(*call)
    dlse = np.where(np.isfinite(lse), arrays["dlse"], 0)
    dlse = dlse if misread is None else dlse + misread(out)
    dq, dk, dv, dbias, dsinks = reference.backward(arrays["dout"], dlse, *call)
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    for name, given in parameters.items():
        if name == "sinks":
            results["dsinks"] = dsinks
        elif name == "table" and dbias.shape != given.shape:
            gathered = np.zeros_like(given)
            buckets = problem.setting.build(parameters)["bias"].buckets
            np.add.at(gathered, (slice(None), buckets), dbias)
            results["dtable"] = gathered
        else:
            results[f"d{name}"] = dbias.reshape(given.shape)
    return results


def _arrays(problem: Problem) -> dict[str, Tensor]:
    gradients = {"dout": problem.dout, "dlse": problem.dlse}
    return {**problem.inputs, **problem.setting.parameters, **gradients}


def oracle(cell: Cell) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The exact results, and how far they move when what has the cell's dtype moves by half a unit of it.

    No implementation that rounds its intermediate values to that dtype can be asked for less.
    """
    half = replace(cell, dtype=torch.bfloat16)
    exact = _exact(cell if cell.dtype == torch.float32 else half)
    # Products of 16-bit numbers are exact in float32, and lse is a sum over those: the dtype is no
    # excuse for it.
    own, single = torch.finfo(cell.dtype).eps, torch.finfo(torch.float32).eps
    moved = _sensitivity(half)
    return exact, {name: (single if name == "lse" else own) * moved[name] for name in exact}


@lru_cache(maxsize=4)
def _exact(cell: Cell) -> dict[str, np.ndarray]:
    problem = make(cell)
    return _solve(problem, {n: x.double().numpy() for n, x in _arrays(problem).items()})


@lru_cache(maxsize=4)
def _sensitivity(cell: Cell) -> dict[str, float]:
    """How far the results move, for movements of at most 1/2 of whatever has the cell's dtype (relative)."""
    problem = make(cell)
    arrays = {n: x.double().numpy() for n, x in _arrays(problem).items()}
    few = any(x.numel() < FEW for x in problem.setting.parameters.values())

    def rounded(name: str) -> bool:
        return _arrays(problem)[name].dtype == cell.dtype

    return sensitivity(partial(_solve, problem), arrays, _exact(cell), rounded, 3 if few else 1)
