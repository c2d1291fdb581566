"""What four devices compute in tests of JAX over meshes, compared with the oracle in float64.

Arrays are (B, H, S, D), in the order of the whole problem, unless a name says otherwise.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from samples.masks import BATCH, KEYS, SAMPLES

import attnspan
from attnspan import reference
from attnspan.call.options import ALIBI, DENSE, DISTANCE, Options
from attnspan.jax import attention, dropout_seeds, shard
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans
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


_traces: list[Any] = []


@functools.cache
def _program(**static: Any) -> Any:
    """A compiled function of a mask, arrays in its order and options: outputs and gradients."""

    def run(sharded: Sharded, rows: Any, options: dict[str, Any]) -> Any:
        _traces.append(static)

        def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            given = {**options, "bias": bias, "sinks": sinks, "q_index": rows.get("q_index")}
            return attention(q, k, v, mask=sharded, return_lse=True, **given, **static)

        inputs = rows["q"], rows["k"], rows["v"], options.get("bias"), options.get("sinks")
        (out, lse), pull = jax.vjp(call, *inputs)
        return out, lse, pull((rows["dout"], rows["dlse"]))

    return jax.jit(run)


def on_devices(sharded: Sharded, given: Arrays, options: Any = None, **static: Any) -> Arrays:
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


def every_mask(split: Split, names: list[str]) -> None:
    """One program for each kind of mask, with room for all."""
    _traces.clear()
    like = split.place(_two_rows(attnspan.full())) if split.sequence else None
    for name in names:
        mask = next(sample for sample in SAMPLES if sample.name == name).mask()
        sharded = split.place(_two_rows(mask), like=like)
        got = on_devices(sharded, inputs(split.num_heads), backend=split.backend)
        check(got, oracle(inputs(split.num_heads), mask), name)
    assert len(_traces) <= 2


@functools.cache
def _most_spans() -> int:
    return max(sample.mask().prepare(KEYS, KEYS, batch=BATCH).lowered.runs for sample in SAMPLES)


def _two_rows(mask: Any) -> Prepared:
    """A mask for two batch rows, with as many spans as any sample has: the same program serves all."""
    placed = mask.prepare(KEYS, KEYS, batch=BATCH)
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
        keywords = {"bias": attnspan.alibi(slopes), "dropout_seed": dropout_seeds(seed, BATCH, heads)}
        return {**keywords, "sinks": sinks}, Options(1.5, slopes, ALIBI, sinks, 0.3, seed)
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


def option(split: Split, kind: str, length: int = 21) -> None:
    """Outputs and gradients with options, under packed segments."""
    mask = packed(3, length)
    keywords, lowered = _options(kind, split.num_heads[0], length)
    static: dict[str, Any] = {"backend": split.backend}
    if lowered.dropout_p:
        static |= {"softcap": lowered.softcap, "dropout_p": lowered.dropout_p}
    given = inputs(split.num_heads, length, length)
    got = on_devices(split.place(mask, length), given, jax.tree.map(jnp.asarray, keywords), **static)
    check(got, oracle(given, mask, lowered))


def cross(split: Split, by_key: bool, q_len: int = 13, k_len: int = 22) -> None:
    """Keys are another sequence, with a layout of their own or in order."""
    mask = attnspan.key_padding(np.array([k_len, 9])) & attnspan.window(11, 3)
    keys = Layout.of(q_len=k_len, ranks=split.sequence, method="zigzag", rows_per_chunk=3)
    given = inputs(split.num_heads, q_len, k_len)
    sharded = split.place(mask, q_len, k_len=k_len, keys=keys if by_key else None)
    check(on_devices(sharded, given, backend=split.backend), oracle(given, mask))


def by_head(split: Split, length: int = 21) -> None:
    """Each head has a mask of its own, of batch rows that share it or not."""
    mask = attnspan.from_predicate(lambda _, h, q, k: (k <= q) & (k + 3 * h + 2 >= q))
    given = inputs(split.num_heads, length, length)
    for each in (mask, mask & packed(5, length)):
        check(on_devices(split.place(each, length), given), oracle(given, each))


def packed(seed: int, length: int) -> Any:
    """A causal mask of packed documents, others in each batch row."""
    random = np.random.default_rng(seed)
    rows = [np.repeat(np.arange(length), random.integers(2, 12, length))[:length] for _ in range(BATCH)]
    return attnspan.causal() & attnspan.segments(np.stack(rows))


def new_masks(split: Split, steps: int, most: int, length: int = 48) -> None:
    """A packing and a layout for each step: the program is traced `most` times, and not in the last half."""
    _traces.clear()
    given, counts, placed = inputs(split.num_heads, length, length), [], None
    for step in range(steps):
        mask = packed(step, length)
        placed = split.place(mask, length, like=placed)
        check(on_devices(placed, given, backend=split.backend), oracle(given, mask), step)
        counts.append(len(_traces))
    assert counts[steps // 2 - 1] == counts[-1] <= most, counts


def narrow(split: Split, length: int = 37) -> None:
    """The devices together round no more than one of them does."""
    mask, whole = packed(2, length), inputs(split.num_heads, length, length)
    given = {name: np.asarray(jnp.asarray(x, split.dtype)) for name, x in whole.items()}
    given["dlse"] = whole["dlse"]
    want = oracle({name: x.astype(np.float32) for name, x in given.items()}, mask)
    alone = replace(split, batch=1, heads=1, sequence=0)
    ours, one = (errors(on_devices(x.place(mask, length), given), want) for x in (split, alone))
    assert not {name: (x, one[name]) for name, x in ours.items() if not x < 1.05 * one[name] + ALIKE}


def several_axes(strategy: str, axes: tuple[str, str], length: int = 21) -> None:
    """Two axes of a mesh split the sequence, the first of them named is the outermost."""
    mesh = jax.make_mesh((2, 2), ("outer", "inner"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mask, given = packed(4, length), inputs((4, 2), length, length)
    plan = Split(sequence=4, strategy=strategy).plan(mask, length)
    check(on_devices(plan.on(mesh, rows="unchecked", sequence=axes), given), oracle(given, mask))


_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(split: Split, gradient: bool) -> dict[str, int]:
    """The collectives of a compiled call, by kind: what crosses between devices."""
    sharded, heads = split.place(packed(0, 48), 48), split.num_heads

    def array(count: int) -> Any:
        spec = sharded.spec(split_heads=count % split.heads == 0)
        rows = 48 if sharded.route is None else sharded.route.rows.shape[1]
        placed = jax.sharding.NamedSharding(split.mesh, spec)
        return jax.ShapeDtypeStruct((BATCH, count, rows, DIM), jnp.float32, sharding=placed)

    def call(sharded: Sharded, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=sharded, backend=split.backend)

    def both(sharded: Sharded, q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(functools.partial(call, sharded), q, k, v)[1](dout)

    arrays = [array(heads[0]), array(heads[1]), array(heads[1])]
    program, arguments = (both, [*arrays, arrays[0]]) if gradient else (call, arrays)
    text = jax.jit(program).lower(sharded, *arguments).compile().as_text()
    found = [match[1] for match in _COLLECTIVE.finditer(text or "")]
    return {kind: found.count(kind) for kind in sorted(set(found))}
