"""Calls of JAX that the devices of a mesh share, compared with the oracle in float64.

Arrays are (B, H, S, D), in the order of the whole problem, unless a name says otherwise.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from samples.masks import BATCH, KEYS

import attnspan
from attnspan import reference
from attnspan.call.options import Options
from attnspan.jax import attention, shard
from attnspan.parallel import Layout, Plan
from attnspan.parallel.jax import Sharded

DIM = 8
#: Norm of a difference over the norm of the result.
ALIKE = 1e-6
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Split:
    """How devices share a problem; `shared`: batch rows share a layout; `explicit`: how many axes are."""

    batch: int = 1
    heads: int = 1
    sequence: int = 0
    strategy: str = "exchange"
    num_heads: tuple[int, int] = (4, 2)
    shared: bool = False
    explicit: int = 0
    backend: str | None = None
    dtype: str = "float32"

    @property
    def mesh(self) -> jax.sharding.Mesh:
        sizes = (self.batch, self.heads, max(self.sequence, 1))
        types = [jax.sharding.AxisType.Explicit] * self.explicit + [jax.sharding.AxisType.Auto] * 3
        names, devices = ("data", "model", "context"), jax.devices()[: int(np.prod(sizes))]
        return jax.make_mesh(sizes, names, axis_types=tuple(types[:3]), devices=devices)

    def plan(self, mask: Any, q_len: int = KEYS, **options: Any) -> Plan:
        if "layout" not in options:
            sizes = {"ranks": self.sequence, "rows_per_chunk": 2}
            zigzag = Layout.of(q_len=q_len, method="zigzag", **sizes)
            k_len = options.get("k_len")
            whole = {"q_len": q_len, "k_len": k_len, "batch": BATCH, "heads": self.num_heads[0], **sizes}
            options["layout"] = zigzag if self.shared else Layout.of(mask, **whole)
        layout = options.pop("layout")
        keywords = {"heads": self.num_heads, "batch": BATCH, "strategy": self.strategy}
        return layout.plan(mask, **(keywords | options))

    def place(self, mask: Any, q_len: int = KEYS, like: Any = None, **options: Any) -> Sharded:
        axes = {"batch": "data", "heads": "model"}
        if not self.sequence:
            return shard(self.mesh, mask=mask, **axes)
        return self.plan(mask, q_len, **options).on(
            self.mesh, rows="unchecked", sequence="context", like=like, **axes
        )


@functools.cache
def inputs(heads: tuple[int, int], q_len: int = KEYS, k_len: int = KEYS) -> Arrays:
    """Standard-normal q, k, v and gradients of out and lse."""
    random = np.random.default_rng(q_len)
    sizes = {
        "q": (BATCH, heads[0], q_len, DIM),
        "k": (BATCH, heads[1], k_len, DIM),
        "v": (BATCH, heads[1], k_len, DIM),
        "dout": (BATCH, heads[0], q_len, DIM),
        "dlse": (BATCH, heads[0], q_len),
    }
    return {name: random.standard_normal(size, np.float32) for name, size in sizes.items()}


def oracle(given: Arrays, mask: Any, options: Options | None = None) -> Arrays:
    """Outputs and gradients in float64 on one process."""
    q, k, v, dout, dlse = given.values()
    placed = mask.prepare(q.shape[2], k.shape[2], batch=BATCH, heads=q.shape[1])
    bounds, scale = placed.lowered.bounds, DIM**-0.5
    options = (options or Options())._replace(q_index=placed.q_index)
    out, lse = reference.forward(q, k, v, bounds, scale, options)
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    found = reference.backward(dout, dlse, q, k, v, bounds, scale, options)
    return {"out": out, "lse": lse, **dict(zip(names, found, strict=True))}


#: An entry for each time that a program was traced.
traces: list[Any] = []


@functools.cache
def _program(**static: Any) -> Any:
    """A compiled function of a mask, arrays in its order and options: outputs and gradients."""

    def run(sharded: Sharded, rows: Any, options: dict[str, Any]) -> Any:
        traces.append(static)

        def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            given = {**options, "bias": bias, "sinks": sinks, "q_index": rows.get("q_index")}
            return attention(q, k, v, mask=sharded, return_lse=True, **given, **static)

        inputs = rows["q"], rows["k"], rows["v"], options.get("bias"), options.get("sinks")
        (out, lse), pull = jax.vjp(call, *inputs)
        return out, lse, pull((rows["dout"], rows["dlse"]))

    return jax.jit(run)


def attend(sharded: Sharded, given: Arrays, options: Any = None, **static: Any) -> Arrays:
    """The same on all devices, in the order of the whole problem."""
    rows = sharded.shard({name: x for name, x in given.items() if name not in "kv"}, axis=2)
    rows |= {name: sharded.shard_keys(given[name], axis=2) for name in "kv"}
    # Where shardings are types, a gradient has that of its output.
    for name, spec in (("dout", sharded.spec()), ("dlse", sharded.axes.spec("batch", "heads", "sequence"))):
        rows[name] = sharded.axes.put(rows[name], spec)
    out, lse, (dq, dk, dv, dbias, dsinks) = _program(**static)(sharded, rows, options or {})
    found = {name: sharded.unshard(x, axis=2) for name, x in (("out", out), ("lse", lse), ("dq", dq))}
    keys = sharded.plan.keys if sharded.route is not None else None
    for name, x in (("dk", dk), ("dv", dv)):
        whole = np.asarray(x)
        places = None if keys is None else keys.places[:, None, :, None]
        found[name] = x if places is None else np.take_along_axis(whole, places, axis=2)
    for name, x in (("dbias", dbias), ("dsinks", dsinks)):
        found[name] = (jax.tree.leaves(x) or [np.zeros(0)])[0]
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def errors(got: Arrays, want: Arrays) -> dict[str, float]:
    """Norms of the differences, of the results' own norms; -inf must be where it is."""
    found = {}
    for name, x in want.items():
        y = got[name].reshape(x.shape)
        assert (np.isinf(x) == np.isinf(y)).all(), name
        x, y = (np.where(np.isinf(z), 0.0, z) for z in (x, y))
        # Gradients of scores may cancel, down to nothing where each row sees one key.
        least = np.linalg.norm(want["dv"]) / 4 if name in ("dq", "dk", "dbias", "dsinks") else 1e-30
        found[name] = float(np.linalg.norm(x - y) / max(np.linalg.norm(x), least))
    return found


def check(got: Arrays, want: Arrays, what: Any = "") -> None:
    """Roundings of float32 are the only difference."""
    far = {name: error for name, error in errors(got, want).items() if not error < ALIKE}
    assert not far, (what, far)


def packed(seed: int, length: int) -> Any:
    """A causal mask of packed documents, others in each batch row."""
    random = np.random.default_rng(seed)
    rows = [np.repeat(np.arange(length), random.integers(2, 12, length))[:length] for _ in range(BATCH)]
    return attnspan.causal() & attnspan.segments(np.stack(rows))
