"""Programs of `attnspan.jax.shard` on four devices: what they consist of, and what is refused."""

import functools
import re
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from spmd_jobs import BATCH, DIM, Split, inputs, oracle, packed, worst

import attnspan
from attnspan.jax import attention
from attnspan.parallel.spmd import Sharded, shard

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(split: Split, gradient: bool) -> dict[str, int]:
    """The collectives of a compiled call, by kind: what crosses between devices."""
    mask = attnspan.causal() & attnspan.segments(packed(0, 48))
    sharded = split.shard(mask, 48)
    heads = split.num_heads

    def array(count: int) -> Any:
        spec = sharded.spec(split_heads=count % split.heads == 0)
        rows = 48 if sharded.rows is None else sharded.rows.rows.shape[0]
        placed = jax.sharding.NamedSharding(sharded.mesh, spec)
        return jax.ShapeDtypeStruct((BATCH, count, rows, DIM), jnp.float32, sharding=placed)

    def call(sharded: Sharded, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=sharded, backend=split.backend)

    def both(sharded: Sharded, q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(functools.partial(call, sharded), q, k, v)[1](dout)

    arrays = [array(heads[0]), array(heads[1]), array(heads[1])]
    program, arguments = (both, [*arrays, arrays[0]]) if gradient else (call, arrays)
    text = jax.jit(program).lower(sharded, *arguments).compile().as_text()
    assert text is not None
    found = [match[1] for match in _COLLECTIVE.finditer(text)]
    return {kind: found.count(kind) for kind in sorted(set(found))}


def layers(split: Split, length: int = 21) -> float:
    """The worst error of a second mask on the rows of a first one, within remat, for two layers at once."""
    ids = packed(1, length)
    first, second = attnspan.causal(), attnspan.window(4) & attnspan.segments(ids)
    sharded = split.shard(first, length)
    given = inputs(split.num_heads, length, length)
    other = sharded.with_mask(second, keep_rows=True)
    q, k, v, dout = (sharded.shard(given[name], axis=2) for name in ("q", "k", "v", "dout"))

    @jax.jit
    def run(masks: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        @jax.checkpoint
        def call(mask: Any, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=mask, backend=split.backend)

        outs, pull = jax.vjp(lambda q, k, v: [call(mask, q, k, v) for mask in masks], q, k, v)
        return outs, pull([dout, dout])

    outs, gradients = run((sharded, other), q, k, v, dout)
    named = zip(("dq", "dk", "dv"), gradients, strict=True)
    got = {name: np.asarray(sharded.unshard(x, axis=2)) for name, x in named}
    got |= {f"out {i}": np.asarray(sharded.unshard(x, axis=2)) for i, x in enumerate(outs)}
    given = {**given, "dlse": np.zeros_like(given["dlse"])}
    wanted = [oracle(given, mask) for mask in (first, second)]
    want = {name: wanted[0][name] + wanted[1][name] for name in ("dq", "dk", "dv")}
    return worst(got, want | {f"out {i}": x["out"] for i, x in enumerate(wanted)})


def packed_rows(length: int = 40) -> float:
    """The worst error in layout "thd", whose one row is split as a sequence."""
    cu = np.array([0, 11, 12, 30, length])
    mask, given = attnspan.causal() & attnspan.documents(cu), inputs((4, 2), length, length)
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = shard(mesh, mask=mask, sequence="context", q_len=length, num_heads=(4, 2))
    q, k, v = (
        sharded.shard(given[name][0].swapaxes(0, 1), axis=0, batch_axis=None) for name in ("q", "k", "v")
    )
    out, lse = attention(q, k, v, mask=sharded, layout="thd", return_lse=True)
    got = {
        "out": np.asarray(sharded.unshard(out, axis=0, batch_axis=None)).swapaxes(0, 1),
        "lse": np.asarray(sharded.unshard(lse, axis=1, batch_axis=None)),
    }
    want = oracle(given, mask)
    return max(
        float(np.abs(got[name] - want[name][0]).max()) / float(np.abs(want[name][0]).max()) for name in got
    )


def second_derivative(backend: str) -> float:
    """The error of a second derivative, against that of one device."""
    split = Split(1, 2, 2, backend=backend)
    mask = attnspan.causal()
    q, k, v, *_ = map(jnp.asarray, inputs(split.num_heads, 8, 8).values())

    def twice(mask: Any, place: Any) -> np.ndarray:
        def loss(q: Any) -> Any:
            return (attention(place(q), place(k), place(v), mask=mask, backend=backend) ** 2).sum()

        return np.asarray(jax.jit(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()))(q))

    sharded = split.shard(mask, 8)
    got = twice(sharded, functools.partial(sharded.shard, axis=2))
    want = twice(mask, lambda x: x)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def refusals() -> dict[str, str]:
    """What is said about each mistake."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=auto)
    planned = {"sequence": "context", "q_len": 8, "num_heads": (4, 2)}
    whole, sharded = shard(mesh, batch="data", heads="context"), shard(mesh, batch="data", **planned)
    q, k = jnp.ones((BATCH, 4, 8, DIM)), jnp.ones((BATCH, 2, 8, DIM))

    def placed(*spec: Any) -> Any:
        return jax.device_put(q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    calls = {
        "no mesh": lambda: shard({"data": 2}),  # type: ignore[arg-type]
        "no axis": lambda: shard(mesh, batch="dp"),
        "axis twice": lambda: shard(mesh, batch="data", sequence=("context", "data")),
        "axis number": lambda: shard(mesh, batch=2),  # type: ignore[arg-type]
        "no mask": lambda: shard(mesh, mask=jnp.ones((8, 8), bool)),  # type: ignore[arg-type]
        "no q_len": lambda: shard(mesh, sequence="context"),
        "heads": lambda: shard(mesh, sequence="context", q_len=8, num_heads=(4, 3)),
        "heads of axis": lambda: shard(mesh, heads="data", **(planned | {"num_heads": (3, 3)})),
        "useless q_len": lambda: shard(mesh, batch="data", q_len=8),
        "strategy": lambda: shard(mesh, strategy="ulysses", **planned),
        "mask of another length": lambda: shard(mesh, mask=attnspan.causal().prepare(6, 6), **planned),
        "traced mask": lambda: jax.jit(lambda ids: shard(mesh, mask=attnspan.segments(ids), **planned).valid)(
            jnp.zeros(8, int)
        ),
        "rows": lambda: sharded.attention(q[:, :, :6], k[:, :, :6], k[:, :, :6]),
        "heads of q": lambda: sharded.attention(k, k, k),
        "batch": lambda: whole.attention(q[:1], k[:1], k[:1]),
        "query heads": lambda: whole.attention(q[:, :3], q[:, :3], q[:, :3]),
        "sequence without a plan": lambda: whole.attention(placed(None, None, "context"), k, k),
        "head_dim": lambda: whole.attention(placed(None, None, None, "data"), k, k),
        "other axes": lambda: sharded.attention(placed("context"), k, k),
        "dense bias": lambda: sharded.attention(q, k, k, bias=jnp.zeros((8, 8))),
        "q_index": lambda: sharded.attention(q, k, k, q_index=jnp.arange(8)),
        "thd": lambda: shard(mesh, batch="data").attention(q[0], q[0], q[0], layout="thd"),
        "explain inside": lambda: jax.jit(lambda x: x.explain())(sharded),
        "positions of whole": lambda: whole.positions,
        "shard of another length": lambda: sharded.shard(jnp.ones((2, 9))),
    }
    return {name: _said(call) for name, call in calls.items()}


def _said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def page(blocks: list[str]) -> dict[str, Any]:
    """Run the examples of a page one after the other; what they gave, beside one device."""
    names: dict[str, Any] = {"__name__": "page"}
    before = None
    for block in blocks:
        exec(compile(block, "docs/spmd.md", "exec"), names)
        if "out" in names and before is None:
            before = [np.asarray(names[x]) for x in ("q", "k", "v")]
    causal, segments = attnspan.causal(), attnspan.segments

    def off(got: Any, want: Any) -> float:
        return float(np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want))

    def alone(mask: Any, **options: Any) -> np.ndarray:
        assert before is not None
        call = functools.partial(attention, mask=mask, layout="bshd", **options)
        return np.asarray(jax.jit(call)(*map(jnp.asarray, before)))

    mask = causal & segments(np.asarray(names["ids"]))
    slopes = attnspan.alibi(attnspan.alibi_slopes(names["Hq"]))
    layer, sharded = names["layer"], names["sharded"]
    layer.attention_fn = functools.partial(names["attention_fn"], mask)
    return {
        "traces": names["step"]._cache_size(),
        "losses": names["losses"],
        "losses of one": _losses_of_one(names),
        "batch and heads": off(names["out"], alone(mask)),
        "window": off(sharded.unshard(names["biased"]), alone(causal & attnspan.window(8), bias=slopes)),
        "flax": off(names["flax_out"], np.asarray(layer(jnp.asarray(names["hidden"]), deterministic=True))),
    }


def _losses_of_one(names: dict[str, Any]) -> list[float]:
    params = {
        name: np.random.default_rng(1).standard_normal(x, np.float32) / 8
        for name, x in names["shapes"].items()
    }
    losses, step = [], jax.jit(jax.value_and_grad(names["loss_of"]))
    for seed in range(4):
        whole = names["whole_rows"](seed)
        mask = attnspan.causal() & attnspan.segments(whole["ids"])
        loss, gradients = step(params, whole, mask)
        params = jax.tree.map(lambda x, g: np.asarray(x - 0.3 * g), params, gradients)
        losses.append(float(loss))
    return losses
