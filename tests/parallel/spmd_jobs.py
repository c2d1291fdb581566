"""What four devices compute in tests of `attnspan.jax.shard`, compared with the oracle in float64.

Arrays are (B, H, S, D), in the order of the whole problem, unless a name says otherwise.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from mask_samples import BATCH, KEYS, SAMPLES

import attnspan
from attnspan import reference
from attnspan.jax import attention, dropout_seeds
from attnspan.masks import Prepared
from attnspan.options import ALIBI, DENSE, DISTANCE, Options
from attnspan.parallel.spmd import Sharded, shard
from attnspan.spans import Spans

DIM = 8


@dataclass(frozen=True)
class Split:
    """How devices share a problem: sizes of the mesh's axes, and the heads."""

    batch: int = 1
    heads: int = 1
    sequence: int = 0
    strategy: str = "exchange"
    num_heads: tuple[int, int] = (4, 2)
    explicit: bool = False
    backend: str | None = None
    dtype: str = "float32"

    def shard(self, mask: Any, q_len: int = KEYS, k_len: int | None = None, **keywords: Any) -> Sharded:
        """The attention of this split."""
        sizes = (self.batch, self.heads, max(self.sequence, 1))
        kind = jax.sharding.AxisType.Explicit if self.explicit else jax.sharding.AxisType.Auto
        names = ("data", "model", "context")
        count = int(np.prod(sizes))
        mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * 3, devices=jax.devices()[:count])
        if self.sequence:
            keywords |= {
                "q_len": q_len,
                "k_len": k_len,
                "num_heads": self.num_heads,
                "batch_size": BATCH,
                "strategy": self.strategy,
            }
        sequence = "context" if self.sequence else None
        return shard(mesh, mask=mask, batch="data", heads="model", sequence=sequence, **keywords)


Arrays = dict[str, np.ndarray]


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
    # The gradient of an lse that is -inf means nothing.
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    found = reference.backward(dout, dlse, q, k, v, bounds, scale, options)
    return {"out": out, "lse": lse, **dict(zip(names, found, strict=True))}


@functools.cache
def _program(**static: Any) -> Any:
    """A compiled function of a `Sharded`, arrays in its order and options: outputs and gradients."""

    def run(sharded: Sharded, q: Any, k: Any, v: Any, dout: Any, dlse: Any, options: dict[str, Any]) -> Any:
        _program_traces.append(static)

        def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            given = {**options, "bias": bias, "sinks": sinks}
            return attention(q, k, v, mask=sharded, return_lse=True, **given, **static)

        (out, lse), pull = jax.vjp(call, q, k, v, options.get("bias"), options.get("sinks"))
        return out, lse, pull((dout, dlse))

    return jax.jit(run)


_program_traces: list[Any] = []


def on_devices(
    sharded: Sharded, given: Arrays, options: dict[str, Any] | None = None, **static: Any
) -> Arrays:
    """The same on all devices, in the order of the whole problem."""
    place = functools.partial(sharded.shard, axis=2)
    arrays = [sharded.shard_keys(x, axis=2) if name in "kv" else place(x) for name, x in given.items()]
    # Where shardings are types, a gradient has that of its output.
    for at, spec in ((3, sharded.spec()), (4, sharded.axes.spec("batch", "heads", "sequence"))):
        arrays[at] = jax.device_put(arrays[at], jax.sharding.NamedSharding(sharded.mesh, spec))
    out, lse, (dq, dk, dv, dbias, dsinks) = _program(**static)(sharded, *arrays, options or {})
    found = {"out": out, "lse": lse, "dq": dq}
    found = {name: np.asarray(sharded.unshard(x, axis=2), np.float64) for name, x in found.items()}
    for name, x in (("dk", dk), ("dv", dv)):
        found[name] = np.asarray(_unshard_keys(sharded, x), np.float64)
    leaves = jax.tree.leaves(dbias)
    return found | {
        "dbias": np.zeros(0) if not leaves else np.asarray(leaves[0], np.float64),
        "dsinks": np.zeros(0) if dsinks is None else np.asarray(dsinks, np.float64),
    }


def _unshard_keys(sharded: Sharded, x: Any) -> Any:
    deal = sharded.rows if sharded.keys is None else sharded.keys
    return x if deal is None else np.asarray(x)[:, :, np.asarray(deal.place)]


def errors(got: Arrays, want: Arrays) -> dict[str, float]:
    """Norms of the differences, of the results' own norms; -inf must be where it is."""
    found = {}
    for name, x in want.items():
        y = got[name]
        assert x.shape == y.shape, (name, x.shape, y.shape)
        assert (np.isinf(x) == np.isinf(y)).all(), name
        x, y = (np.where(np.isinf(z), 0.0, z) for z in (x, y))
        # Gradients of scores may cancel, down to nothing where each row sees one key.
        least = np.linalg.norm(want["dv"]) / 4 if name in ("dq", "dk", "dbias", "dsinks") else 1e-30
        found[name] = float(np.linalg.norm(x - y) / max(np.linalg.norm(x), least))
    return found


def worst(got: Arrays, want: Arrays) -> float:
    """The largest of the errors; a NaN is the largest of all."""
    return max(errors(got, want).values(), key=lambda x: np.inf if np.isnan(x) else x)


def every_mask(split: Split, names: list[str]) -> tuple[dict[str, float], int]:
    """The worst error under each of these masks, and how many programs were traced for all of them."""
    _program_traces.clear()
    sharded, found = split.shard(_two_rows(SAMPLES[0])), {}
    for sample in (sample for sample in SAMPLES if sample.name in names):
        sharded = sharded.with_mask(_two_rows(sample))
        given = inputs(split.num_heads)
        got = on_devices(sharded, given, backend=split.backend)
        found[sample.name] = worst(got, _wanted(sample.name, split.num_heads))
    return found, len(_program_traces)


@functools.cache
def _wanted(name: str, heads: tuple[int, int]) -> Arrays:
    sample = next(sample for sample in SAMPLES if sample.name == name)
    return oracle(inputs(heads), sample.mask())


@functools.cache
def _most_spans() -> int:
    """The most spans of a row among the samples, for one program under all of them."""
    return max(sample.mask().prepare(KEYS, KEYS, batch=BATCH).lowered.runs for sample in SAMPLES)


def _two_rows(sample: Any) -> Prepared:
    """A sample for two batch rows, with as many spans as any has: the same program serves all."""
    placed = sample.mask().prepare(KEYS, KEYS, batch=BATCH)
    bounds = np.broadcast_to(placed.lowered.bounds, (BATCH, *placed.lowered.bounds.shape[1:]))
    bounds = np.pad(bounds, [(0, 0)] * 3 + [(0, _most_spans() - bounds.shape[3]), (0, 0)])
    index = placed.q_index
    return Prepared(Spans(bounds, KEYS), np.arange(KEYS, dtype=np.int32)[None] if index is None else index)


def _options(kind: str, heads: int, length: int) -> tuple[dict[str, Any], Options]:
    """Keywords of a call, and the same for the oracle."""
    random = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    sinks, seed = normal(heads), np.array(0x0123_4567_89AB_CDEF)
    if kind == "alibi":
        slopes = np.abs(normal(BATCH, heads)) / 16
        keywords = {
            "bias": attnspan.alibi(slopes),
            "dropout_seed": dropout_seeds(seed, BATCH, heads),
        }
        lowered = Options(1.5, slopes, ALIBI, sinks, 0.3, seed)
        return {**keywords, "sinks": sinks}, lowered
    if kind == "shared alibi":
        slopes = np.abs(normal(heads)) / 16
        return {"bias": attnspan.alibi(slopes)}, Options(0.0, slopes[None], ALIBI)
    if kind == "relative":
        table = normal(heads, 9)
        keywords = {"bias": attnspan.relative(table), "sinks": sinks}
        return keywords, Options(0.0, table, DISTANCE, sinks)
    shape = {"dense": (BATCH, 1, length, length), "shared dense": (1, heads, 1, length)}[kind]
    values = normal(*shape)
    return {"bias": attnspan.dense_bias(values)}, Options(0.0, values, DENSE)


def option(split: Split, kind: str, length: int = 21) -> dict[str, float]:
    """Errors of outputs and gradients with options, under packed segments."""
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (BATCH, length)))
    mask = attnspan.causal() & attnspan.segments(ids)
    keywords, lowered = _options(kind, split.num_heads[0], length)
    static: dict[str, Any] = {"backend": split.backend}
    if lowered.dropout_p:
        static |= {"softcap": lowered.softcap, "dropout_p": lowered.dropout_p}
    given = inputs(split.num_heads, length, length)
    keywords = jax.tree.map(jnp.asarray, keywords)
    got = on_devices(split.shard(mask, length), given, keywords, **static)
    want = oracle(given, mask, lowered)
    want["dbias"] = want["dbias"].reshape(got["dbias"].shape)
    return errors(got, want)


def cross(split: Split, q_len: int = 13, k_len: int = 22) -> dict[str, float]:
    """Errors where keys are another sequence."""
    mask = attnspan.key_padding(np.array([k_len, 9])) & attnspan.window(11, 3)
    given = inputs(split.num_heads, q_len, k_len)
    return errors(
        on_devices(split.shard(mask, q_len, k_len), given, backend=split.backend), oracle(given, mask)
    )


def packed(seed: int, length: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.stack(
        [np.repeat(np.arange(length), random.integers(2, 12, length))[:length] for _ in range(BATCH)]
    )


def new_masks(split: Split, steps: int, length: int = 48) -> tuple[list[int], float]:
    """After each step, each with a packing of its own: how often the step was traced. And the worst error."""
    _program_traces.clear()
    given, counts, most = inputs(split.num_heads, length, length), [], 0.0
    sharded = None
    for step in range(steps):
        mask = attnspan.causal() & attnspan.segments(packed(step, length))
        sharded = split.shard(mask, length) if sharded is None else sharded.with_mask(mask)
        got = on_devices(sharded, given, backend=split.backend)
        counts.append(len(_program_traces))
        most = max(most, worst(got, oracle(given, mask)))
    return counts, most


def narrow(split: Split, length: int = 37) -> dict[str, tuple[float, float]]:
    """Errors in a narrow dtype: those of the devices, and those of one."""
    mask = attnspan.causal() & attnspan.segments(packed(2, length))
    whole = inputs(split.num_heads, length, length)
    given = {name: np.asarray(jnp.asarray(x, split.dtype)) for name, x in whole.items()}
    given["dlse"] = whole["dlse"]
    want = oracle({name: x.astype(np.float32) for name, x in given.items()}, mask)
    alone = replace(split, batch=1, heads=1, sequence=0)
    ours, one = (
        errors(on_devices(each.shard(mask, length), given, backend=split.backend), want)
        for each in (split, alone)
    )
    return {name: (ours[name], one[name]) for name in ours}


def several_axes(length: int = 21) -> dict[str, float]:
    """Errors where two axes of a mesh split the sequence, and no axis the rest."""
    mesh = jax.make_mesh((2, 2), ("outer", "inner"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mask, given = attnspan.causal() & attnspan.segments(packed(4, length)), inputs((4, 2), length, length)
    keywords = {"q_len": length, "num_heads": (4, 2), "batch_size": BATCH, "strategy": "auto"}
    sharded = shard(mesh, mask=mask, sequence=("outer", "inner"), **keywords)
    return errors(on_devices(sharded, given), oracle(given, mask))
