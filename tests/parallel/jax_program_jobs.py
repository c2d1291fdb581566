"""Programs over the devices of a JAX mesh: what they consist of, what travels, and what is refused."""

import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax_jobs import BATCH, DIM, Split, inputs, oracle, packed, worst

import attnspan
from attnspan.jax import attention, shard
from attnspan.parallel import Layout, Plan


def layers(split: Split, length: int = 21) -> float:
    """The worst error of a second mask on the rows of a first one, within remat, for two layers at once."""
    masks = attnspan.causal(), attnspan.window(4) & packed(1, length)
    first = split.place(masks[0], length)
    given = inputs(split.num_heads, length, length)
    rows = first.shard({name: given[name] for name in ("q", "k", "v", "dout")}, axis=2)
    second = split.plan(masks[1], layout=first.plan.layout)
    second = second.on(split.mesh, sequence="context", rows=rows)

    @jax.jit
    def run(masks: Any, rows: Any) -> Any:
        @jax.checkpoint
        def call(mask: Any, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=mask, backend=split.backend)

        both = jax.vjp(lambda q, k, v: [call(mask, q, k, v) for mask in masks], *(rows[x] for x in "qkv"))
        return both[0], both[1]([rows["dout"]] * 2)

    outs, gradients = run((first, second), rows)
    named = dict(zip(("dq", "dk", "dv", "out 0", "out 1"), (*gradients, *outs), strict=True))
    got = {name: np.asarray(first.unshard(x, axis=2)) for name, x in named.items()}
    given = {**given, "dlse": np.zeros_like(given["dlse"])}
    wanted = [oracle(given, mask) for mask in masks]
    want = {name: wanted[0][name] + wanted[1][name] for name in ("dq", "dk", "dv")}
    return worst(got, want | {f"out {i}": x["out"] for i, x in enumerate(wanted)})


def packed_rows(length: int = 40) -> float:
    """The worst error in layout "thd", whose one row is split as a sequence."""
    mask = attnspan.causal() & attnspan.documents(np.array([0, 11, 12, 30, length]))
    given = inputs((4, 2), length, length)
    placed = Split(sequence=4).place(mask, length, batch=1, layout=Layout.of(mask, q_len=length, ranks=4))
    whole = {name: given[name][0].swapaxes(0, 1) for name in "qkv"}
    rows = placed.shard(whole, axis=0, batch_axis=None)
    q, k, v = (rows[x] for x in "qkv")
    out, lse = attention(q, k, v, mask=placed, layout="thd", return_lse=True, q_index=rows["q_index"])
    got = {
        "out": np.asarray(placed.unshard(out, axis=0, batch_axis=None)).swapaxes(0, 1),
        "lse": np.asarray(placed.unshard(lse, axis=1, batch_axis=None)),
    }
    want = oracle(given, mask)
    return max(
        float(np.abs(x - want[name][0]).max() / np.abs(want[name][0]).max()) for name, x in got.items()
    )


def second_derivative(backend: str) -> float:
    """The error of a second derivative, against that of one device."""
    split = Split(1, 2, 2, backend=backend, shared=True)
    q, k, v, *_ = map(jnp.asarray, inputs(split.num_heads, 8, 8).values())

    def twice(mask: Any, place: Any) -> np.ndarray:
        def loss(q: Any) -> Any:
            return (attention(place(q), place(k), place(v), mask=mask, backend=backend) ** 2).sum()

        return np.asarray(jax.jit(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()))(q))

    placed = split.place(attnspan.causal(), 8)
    got = twice(placed, functools.partial(placed.shard, axis=2))
    want = twice(attnspan.causal(), lambda x: x)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def wrong_rows(length: int = 24) -> dict[str, Any]:
    """The loop played wrongly: rows of one layout with the plan of another."""
    split = Split(sequence=4)
    plans = [split.plan(packed(seed, length), length) for seed in range(2)]
    axes: dict[str, Any] = {"sequence": "context"}
    first, second = (plan.on(split.mesh, **axes) for plan in plans)
    x = inputs((4, 2), length, length)
    rows = [placed.shard({name: x[name] for name in "qkv"}, axis=2) for placed in (first, second)]

    @jax.jit
    def call(placed: Any, rows: Any) -> Any:
        q, k, v = (rows[name] for name in "qkv")
        return attention(q, k, v, mask=placed, q_index=rows["q_index"])

    loader = plans[1].layout.shard({"tokens": np.zeros((BATCH, length), int)}, rank=0)
    return {
        "same": bool(np.isfinite(call(first, rows[0])).all()),
        "other": bool(np.isnan(call(first, rows[1])).all()),
        "marked": _said(lambda: plans[0].on(split.mesh, rows=rows[1], **axes)),
        "loader": _said(lambda: plans[0].on(split.mesh, rows=loader, **axes)),
        "unmarked": _said(lambda: plans[0].on(split.mesh, rows=dict(rows[0]), **axes)),
        "shape": _said(lambda: call(first, {**rows[0], "q_index": jnp.zeros((1, 3), int)})),
        "mine": plans[1].on(split.mesh, rows=loader, **axes).frame.q_len,
    }


def ragged(length: int = 48) -> dict[str, Any]:
    """What the ragged exchange of TPUs and GPUs would move, by its definition in NumPy; and its lowering."""
    split, asked, tables = Split(batch=2, sequence=2), Counter[Any](), Plan.tables
    plan = split.plan(packed(0, length), length)
    try:
        Plan.tables = lambda self, rank: (asked.update([rank]), tables(self, rank))[1]  # type: ignore[method-assign]
        placed = plan.on(split.mesh, sequence="context", batch="data")
    finally:
        Plan.tables = tables  # type: ignore[method-assign]
    lists = jax.tree.map(np.asarray, placed.route.exchange)
    held = plan.keys.rows_per_rank
    right = []
    for part in range(2):
        own = [plan.layout.rows[rank][part] for rank in range(2)]
        sent = [np.append(x, -1)[np.minimum(lists.send[part, r], held)] for r, x in enumerate(own)]
        for rank, counts in enumerate(lists.counts[part]):
            room = np.full_like(sent[0], -1)
            for source, (send, receive, there, _) in enumerate(lists.counts[part]):
                begin = send[:rank].sum()
                assert receive[rank] == lists.counts[part, rank, 0, source]
                assert counts[1, source] == send[rank]
                room[there[rank] : there[rank] + send[rank]] = sent[source][begin : begin + send[rank]]
            both = np.concatenate([own[rank], room, [-1]])
            found = both[np.minimum(lists.source[part, rank], len(both) - 1)]
            keys = lists.keys[part].reshape(2, -1)[rank]
            right.append(bool((found[found >= 0] == keys[found >= 0]).all() and (keys[found < 0] == 0).all()))
    q, k, v, dout, _ = inputs((4, 2), length, length).values()
    rows = dict(placed.shard({"q": q, "k": k, "v": v, "dout": dout}, axis=2))

    @jax.jit
    def step(placed: Any, rows: Any) -> Any:
        call = functools.partial(attention, mask=placed, backend="xla")
        return jax.vjp(call, *(rows[x] for x in "qkv"))[1](rows["dout"])

    traced = step.trace(placed, rows)
    platforms = "cpu", "tpu", "cuda"
    texts = {x: traced.lower(lowering_platforms=(x,)).as_text() for x in platforms}
    lowered = {
        x: (text.count("@ragged_all_to_all"), text.count('"stablehlo.all_to_all"'))
        for x, text in texts.items()
    }
    return {"right": right, "lowered": lowered, "asked": dict(asked)}


def refusals() -> dict[str, str]:
    """What is said about each mistake."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = Layout.of(attnspan.causal(), q_len=8, ranks=2)
    plan = functools.partial(layout.plan, batch=BATCH, strategy="exchange")
    axes = {"batch": "data", "sequence": "context"}
    whole, placed = shard(mesh, batch="data", heads="context"), plan(heads=(4, 2)).on(mesh, **axes)
    q, k = jnp.ones((BATCH, 4, 8, DIM)), jnp.ones((BATCH, 2, 8, DIM))
    apart = attnspan.segments(np.arange(BATCH)[:, None].repeat(8, 1))

    def lying(*spec: Any) -> Any:
        return jax.device_put(q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    calls = {
        "no mesh": lambda: shard({"data": 2}),  # type: ignore[arg-type]
        "no axis": lambda: shard(mesh, batch="dp"),
        "axis twice": lambda: plan(heads=(4, 2)).on(mesh, sequence="context", heads="context"),
        "axis number": lambda: shard(mesh, batch=2),  # type: ignore[arg-type]
        "no mask": lambda: shard(mesh, mask=jnp.ones((8, 8), bool)),  # type: ignore[arg-type]
        "no sequence": lambda: plan(heads=(4, 2)).on(mesh, sequence=None),
        "ranks": lambda: plan(heads=(4, 2)).on(mesh, sequence=("data", "context")),
        "heads of axis": lambda: plan(heads=(3, 3)).on(mesh, sequence="context", heads="data"),
        "batch of axis": lambda: layout.plan(
            attnspan.causal() & attnspan.segments(np.zeros((3, 8), int) + [[0], [1], [2]]),
            heads=(4, 2),
            batch=3,
            strategy="ring",
        ).on(mesh, **axes),
        "strategy": lambda: plan(heads=(4, 2), strategy="ulysses").on(mesh, **axes),
        "rows": lambda: placed.attention(q[:, :, :6], k[:, :, :6], k[:, :, :6]),
        "heads of q": lambda: placed.attention(k, k, k),
        "batch of plan": lambda: (
            plan(attnspan.causal() & apart, heads=(4, 2))
            .on(mesh, **axes)
            .attention(*(jnp.ones((4, n, 8, DIM)) for n in (4, 2, 2)))
        ),
        "batch": lambda: whole.attention(q[:1], k[:1], k[:1]),
        "query heads": lambda: whole.attention(q[:, :3], q[:, :3], q[:, :3]),
        "sequence without a plan": lambda: whole.attention(lying(None, None, "context"), k, k),
        "head_dim": lambda: whole.attention(lying(None, None, None, "data"), k, k),
        "other axes": lambda: placed.attention(lying("context"), k, k),
        "dense bias": lambda: placed.attention(q, k, k, bias=jnp.zeros((8, 8))),
        "k_index": lambda: placed.attention(q, k, k, k_index=jnp.arange(8)),
        "thd": lambda: shard(mesh, batch="data").attention(q[0], q[0], q[0], layout="thd"),
        "explain inside": lambda: jax.jit(lambda x: x.explain())(placed),
        "shard of another length": lambda: placed.shard(jnp.ones((2, 9))),
        "shard of a q_index": lambda: placed.shard({"q_index": np.ones((2, 8))}),
        "shard of a list": lambda: placed.shard([1, 2]),
        "one row of two": lambda: (
            plan(attnspan.causal(), heads=(4, 2), layout=None)
            if False
            else Split(sequence=2).place(packed(0, 8), 8).shard(np.ones((1, 8)))
        ),
    }
    return {name: _said(call) for name, call in calls.items()}


def _said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def page(blocks: list[str]) -> dict[str, Any]:
    """Run the examples of a page one after the other; what they gave, and what one device gives."""
    names: dict[str, Any] = {"__name__": "page"}
    before: list[Any] = []
    for block in blocks:
        exec(compile(block, "docs/spmd.md", "exec"), names)
        before = before or [np.asarray(names[x]) for x in ("q", "k", "v")]

    def off(got: Any, want: Any) -> float:
        return float(np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want))

    def alone(mask: Any, **options: Any) -> Any:
        call = functools.partial(attention, mask=mask, layout="bshd", **options)
        return np.asarray(jax.jit(call)(*map(jnp.asarray, before)))

    mask, layer = attnspan.causal() & attnspan.segments(np.asarray(names["ids"])), names["layer"]
    layer.attention_fn = functools.partial(names["attention_fn"], mask)
    slopes = attnspan.alibi(attnspan.alibi_slopes(names["Hq"]))
    return {
        "traces": names["step"]._cache_size(),
        "losses": names["losses"],
        "losses of one": _losses_of_one(names),
        "batch and heads": off(names["out"], alone(mask)),
        "window": off(names["biased"], alone(attnspan.causal() & attnspan.window(8), bias=slopes)),
        "flax": off(names["flax_out"], np.asarray(layer(jnp.asarray(names["hidden"]), deterministic=True))),
    }


def _losses_of_one(names: dict[str, Any]) -> list[float]:
    params, losses, step = names["first_params"], [], jax.jit(jax.value_and_grad(names["loss_of"]))
    for seed in range(4):
        whole = {**names["whole_rows"](seed), "q_index": None}
        mask = attnspan.causal() & attnspan.segments(whole["ids"])
        loss, gradients = step(params, whole, mask)
        params = jax.tree.map(lambda x, g: np.asarray(x - 0.3 * g), params, gradients)
        losses.append(float(loss))
    return losses
